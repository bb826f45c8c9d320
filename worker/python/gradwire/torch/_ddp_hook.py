"""A communication hook for PyTorch's own DistributedDataParallel."""

# Annotations stay objects here: DistributedDataParallel compares the hook's with types of its own.
import queue
import threading
from typing import Any, Dict, List, Optional

import torch

from .. import Code, GradwireError
from .._client import Client, invalid, require
from . import _ops
from ._gradients import (_steps, check_module, check_parameter, owner_of, set_owner,
                         unique_names)

# How long the waiter waits at once for what nobody else waits for yet.
_SLICE_S = 0.1


class _Bucket:
    """A bucket under way. DistributedDataParallel waits for its future, which is completed even if
    the push-pulls fail; the error is raised by DDPState."""

    def __init__(self, handles: List[_ops.Pushed], buffer: torch.Tensor,
                 future: "torch.futures.Future[torch.Tensor]") -> None:
        self.handles = handles
        self.buffer = buffer
        self.future = future
        self.error: Optional[Exception] = None
        self.is_awaited = False  # by the training loop: now the job's deadline counts
        self.is_given_up = False
        self.done = threading.Event()


class _Waiter:
    """Completes the futures of a client's buckets, in the order in which they were handed over.

    Threads: one of its own, from the first DDPState until the client is closed.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._queue: "queue.SimpleQueue[Optional[_Bucket]]" = queue.SimpleQueue()
        self._lock = threading.Lock()  # so that nothing is put behind the end
        self._is_closing = False
        self._gives_up = False
        client.before_close.append(self._close)
        # A program that ends without shutdown ends its threads when it leaves the job, and what is no
        # daemon is waited for before that.
        self._thread = threading.Thread(target=self._run, name="gradwire-ddp-hook", daemon=True)
        self._thread.start()

    def put(self, bucket: _Bucket) -> None:
        with self._lock:
            if not self._is_closing:
                self._queue.put(bucket)
                return
        self._complete(bucket)

    def _close(self, orderly: bool) -> None:
        with self._lock:
            self._is_closing = True
            self._gives_up = not orderly
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            bucket = self._queue.get()
            if bucket is None:
                return
            self._complete(bucket)

    def _complete(self, bucket: _Bucket) -> None:
        for handle in bucket.handles:
            try:
                self._wait(bucket, handle)
            except Exception as error:  # pylint: disable=broad-except
                bucket.error = bucket.error or error
        bucket.future.set_result(bucket.buffer)
        bucket.done.set()

    def _wait(self, bucket: _Bucket, handle: _ops.Pushed) -> None:
        while not (self._gives_up or bucket.is_given_up):
            if bucket.is_awaited or self._is_closing or handle.poll():
                handle.wait()
                return
            try:
                handle.wait(_SLICE_S)
                return
            except GradwireError as error:
                if error.code != Code.TIMEOUT:
                    raise
                # Of the slice; or of the job, and then it is complete and wait says so.


_waiter: Optional[_Waiter] = None


def _waiter_of(client: Client) -> _Waiter:
    global _waiter
    if _waiter is None or _waiter.client is not client:
        _waiter = _Waiter(client)
    return _waiter


def _named_parameters(source: Any) -> Dict[str, torch.Tensor]:
    """name to each parameter that DistributedDataParallel averages."""
    if not isinstance(source, torch.nn.Module):
        return {name: parameter for name, parameter in unique_names(source, "DDPState").items()
                if parameter.requires_grad}
    if any(kind.__name__ == "DistributedDataParallel" and kind.__module__.startswith("torch.")
           for kind in type(source).__mro__):
        source = source.module
    check_module(source, "DDPState", compiled=True)
    ignored = getattr(source, "_ddp_params_and_buffers_to_ignore", ())
    return {name: parameter for name, parameter in source.named_parameters()
            if parameter.requires_grad and name not in ignored}


class DDPState:
    """What comm_hook needs to know of a model: names and residuals belong to parameters, whatever
    buckets PyTorch puts them in.

        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(gradwire.torch.DDPState(model), gradwire.torch.comm_hook)
    """

    owner = "comm_hook"

    def __init__(self, model: Any) -> None:
        """Declares the gradients. Collective.

        model: the module, wrapped or not, or pairs (name, parameter) as its named_parameters() gives.
        Errors: INVALID_ARGUMENT for a parameter that can't be averaged, by name.
        """
        client = require()
        named = _named_parameters(model)
        if not named:
            raise invalid("DDPState: the model has no parameter that requires a gradient")
        for name, parameter in named.items():
            check_parameter(name, parameter)
            previous = owner_of(parameter)
            if previous is not None:
                previous.hand_on(name, self.owner)
        self._number = _steps.enter()
        prefix = "Gradient." if self._number == 0 else f"Gradient@{self._number}."
        self._names = {parameter: prefix + name for name, parameter in named.items()}
        _ops.declare({name: parameter for parameter, name in self._names.items()})
        for parameter in self._names:
            set_owner(parameter, self)
        self._waiter = _waiter_of(client)
        self._buckets: List[_Bucket] = []  # handed over since the last backward pass
        self._error: Optional[GradwireError] = None  # while they were

    def hand_on(self, name: str, to: str) -> None:
        """Something else is about to average the parameter."""
        if to != self.owner:
            raise invalid(f"the gradient of '{name}' is averaged by DistributedDataParallel with "
                          f"Gradwire's comm_hook, and a {to} would do it again: use one of the two")

    def _hand_over(self, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
        # An exception would reach the caller of backward() as a RuntimeError of PyTorch's: it is kept
        # for _finish.
        handles: List[_ops.Pushed] = []
        if self._error is None:
            try:
                self._push(bucket, handles)
            except GradwireError as error:
                self._error = error
        device = bucket.buffer().device
        # Of a device, so that whoever waits for it waits for the copies back as well.
        devices = [] if device.type == "cpu" else [device]
        future: "torch.futures.Future[torch.Tensor]" = torch.futures.Future(devices=devices)
        handed = _Bucket(handles, bucket.buffer(), future)
        self._buckets.append(handed)
        if self._error is not None:
            for other in self._buckets:
                other.is_given_up = True
        self._waiter.put(handed)
        if bucket.is_last():
            try:
                # Before DistributedDataParallel's own, which waits for the futures; only in the first
                # pass of a static graph after it.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
                is_backward = True
            except RuntimeError:
                is_backward = False
            if not is_backward:
                self._finish()  # a rank that has joined has no backward pass
        return future

    def _push(self, bucket: Any, handles: List[_ops.Pushed]) -> None:
        if require() is not self._waiter.client:
            raise invalid("the DDPState was made for a connection that is closed: register the hook "
                          "anew after gradwire.init()")
        names = []
        for parameter in bucket.parameters():
            name = self._names.get(parameter)
            if name is None:
                raise invalid(f"a parameter of shape {list(parameter.shape)} is in a bucket on rank "
                              f"{require().rank()}, but was not given to DDPState: give it the "
                              "whole model")
            names.append(name)
        if bucket.buffer().layout is not torch.strided:
            raise invalid(f"the gradient of '{names[0]}' is sparse ({bucket.buffer().layout}), "
                          "expected a dense one: build the embedding with sparse=False")
        _steps.begin(self._number)
        for name, gradient in zip(names, bucket.gradients()):
            handles.append(_ops.push_pull_async_inplace(gradient, name=name))
        if bucket.is_last():
            _steps.complete(self._number)

    def _finish(self) -> None:
        """Waits for the backward pass's averages. Errors: the job's."""
        buckets, self._buckets = self._buckets, []
        error: Optional[Exception] = self._error
        self._error = None
        for bucket in buckets:
            bucket.is_awaited = True
        for bucket in buckets:
            bucket.done.wait()
            error = error or bucket.error
        if error is not None:
            raise error


def comm_hook(state: DDPState, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def]
    """For DistributedDataParallel.register_comm_hook: averages a bucket's gradients in place.

    A round in which some worker's gradients are not finite gives NaN everywhere. An error of the job
    is raised by backward() as a GradwireError.
    Threads: whichever runs the backward pass; it does not wait.
    """
    if not isinstance(state, DDPState):
        raise TypeError(f"comm_hook: its state is a {type(state).__name__}, expected the "
                        "gradwire.torch.DDPState of the model")
    return state._hand_over(bucket)
