"""Gradients on a device: torch copies them to pinned host memory, the library averages them there,
and torch copies the average back.

    COPYING_OUT -> PUSHING -> COPYING_IN -> DONE, and from each of the first three FAILED

The trainer's thread queues the copy out and goes on. One thread waits for these copies in the order
in which they were handed over and begins their pushes; another waits for the pushes and queues the
copies back, so a slow push holds up no later copy. Who synchronizes an earlier one takes its place.
"""

from __future__ import annotations

import collections
import enum
import threading
import time
import warnings
import weakref
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Union

import torch

from .._client import Client, Code, GradwireError, Handle, invalid

# What a thread waits for at most, in seconds, until it looks whether it should end.
_SLICE_S = 0.1
# Copies out that nobody has begun to push yet; more make the trainer's thread wait.
_MOST_OUTGOING = 1024
_CLOSE_S = 10.0


class State(enum.Enum):
    """Where a staged push-pull is."""

    COPYING_OUT = "copying out"
    PUSHING = "pushing"
    COPYING_IN = "copying in"
    DONE = "done"
    FAILED = "failed"


class Device:
    """What staging asks of a device. Events are the device's own objects.

    Threads: copy_out and follow are called by the trainer's, the others by any.
    """

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of the tensor's shape and dtype, packed."""
        raise NotImplementedError

    def copy_out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        """Queues host <- tensor after what the current stream has been given; returns the event of
        its end."""
        raise NotImplementedError

    def copy_in(self, host: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Queues tensor <- host; returns the event of its end."""
        raise NotImplementedError

    def query(self, event: Any) -> bool:
        """True once the event has happened. Does not block."""
        raise NotImplementedError

    def wait(self, event: Any, timeout: float) -> bool:
        """Blocks for the event, at most `timeout` seconds, and says whether it has happened."""
        raise NotImplementedError

    def follow(self, event: Any, tensor: torch.Tensor) -> None:
        """Makes what the current stream of the tensor's device is given from now on run after the
        event. Does not block."""
        raise NotImplementedError


_warned = False


def _warn_untested() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn("gradwire: staging of CUDA tensors is untested on a GPU; compare a few steps "
                      "with the same steps on the CPU first", RuntimeWarning, stacklevel=3)


class CudaDevice(Device):
    """All CUDA devices of the process. Nothing of CUDA is touched before the first copy.

    A device has one stream a direction: a copy back need not wait for later copies out, which wait
    for the backward pass. A copy back begins after its copy out has ended, and so after everything
    that the trainer's stream had been given at that time.
    """

    _FIRST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3

    def __init__(self) -> None:
        # Made by copy_out; a copy back has always one before it.
        self._streams: Dict[torch.device, Tuple[Any, Any]] = {}

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy_out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        _warn_untested()
        device = tensor.device
        if torch.cuda.is_current_stream_capturing():
            raise invalid("the current stream is captured into a CUDA graph, which would replay the "
                          "copies without the exchange; push outside of the graph")
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        stream = self._streams[device][0]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(stream):
            # A lazy negation would be done on the host, before the copy is there.
            host.copy_(tensor.detach().resolve_neg(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        tensor.record_stream(stream)  # its memory must not be given away before
        return event

    def copy_in(self, host: torch.Tensor, tensor: torch.Tensor) -> Any:
        stream = self._streams[tensor.device][1]
        with torch.no_grad(), torch.cuda.stream(stream):
            tensor.detach().copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        tensor.record_stream(stream)
        return event

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any, timeout: float) -> bool:
        # event.synchronize() knows no deadline.
        deadline = time.monotonic() + timeout
        nap = self._FIRST_NAP_S
        while not event.query():
            rest = deadline - time.monotonic()
            if rest <= 0:
                return False
            time.sleep(min(nap, rest))
            nap = min(2 * nap, self._LONGEST_NAP_S)
        return True

    def follow(self, event: Any, tensor: torch.Tensor) -> None:
        torch.cuda.current_stream(tensor.device).wait_event(event)


class Staged:
    """One staged push-pull; for poll and synchronize. Made by Staging.push.

    nonfinite, nonfinite_ranks: as those of gradwire.Handle.
    """

    __slots__ = ("name", "nonfinite", "nonfinite_ranks", "_staging", "_state", "_tensor", "_out",
                 "_host", "_event", "_begin", "_handle", "_claimed", "_waiting", "_error")

    def __init__(self, staging: "Staging", name: str, tensor: torch.Tensor, out: torch.Tensor,
                 begin: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self.name = name
        self.nonfinite = False
        self.nonfinite_ranks: Tuple[int, ...] = ()
        self._staging = staging
        self._state = State.COPYING_OUT
        self._tensor: Optional[torch.Tensor] = tensor  # both live until the device is done with them
        self._out = out
        self._host: Optional[torch.Tensor] = None
        self._event: Any = None  # of the copy that is under way
        self._begin: Optional[Callable[[torch.Tensor, torch.Tensor], Any]] = begin
        self._handle: Any = None
        self._claimed = False  # a thread waits for the push, and will queue the copy back
        self._waiting = 0  # threads in wait()
        self._error: Optional[GradwireError] = None

    @property
    def state(self) -> State:
        """Where it is now."""
        return self._staging.state_of(self)

    def poll(self) -> bool:
        """True once wait would return at once."""
        return self._staging.poll(self)

    def wait(self, timeout: Optional[float] = None) -> torch.Tensor:
        """Waits until the copy back is queued, makes the current stream wait for its end, and gives
        the tensor. Errors and timeout as gradwire.synchronize."""
        self._staging.wait(self, timeout)
        return self._out


def finish_push(handle: Handle, timeout: Optional[float]) -> bool:
    """Waits for a push-pull of the library. Returns whether it has completed: False after the
    caller's own timeout, which ends nothing."""
    try:
        handle.wait(timeout)
    except GradwireError as error:
        if error.code != Code.TIMEOUT or timeout is None:
            raise
        if not handle.poll():
            return False
        handle.wait()  # it has completed since, or the job has ended: what has come of it counts
    return True


def _rest(deadline: Optional[float]) -> Optional[float]:
    """Seconds until the deadline, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Staging:
    """The staged push-pulls of one client.

    Two threads, from the first push to close() or to the end of the main thread. An error is kept and
    raised by wait() of the tensor it belongs to; the others go on, and fail for themselves if
    the client has.
    Threads: push and in_order from one at a time; the rest from any.
    """

    def __init__(self, device: Device, rank: int,
                 finish: Callable[[Any, Optional[float]], bool] = finish_push,
                 check: Callable[[], None] = lambda: None) -> None:
        """rank: for messages. finish: as finish_push. check: called before anything that locks;
        raises in a process that has no client."""
        self._device = device
        self._rank = rank
        self._finish = finish
        self._check = check
        # Guards all below and the items' members; notified at each change.
        self._changed = threading.Condition()
        self._outgoing: Deque[Union[Staged, Callable[[], None]]] = collections.deque()
        self._pushing: List[Staged] = []  # as they were begun
        self._arriving: List[Staged] = []  # being copied back
        self._free: Dict[str, torch.Tensor] = {}  # pinned buffers that nobody uses, by tensor
        self._threads: List[threading.Thread] = []
        self._ended: Optional[GradwireError] = None  # why nothing more is taken
        self._call_error: Optional[GradwireError] = None

    # --- the trainer's thread --------------------------------------------------------------------

    def push(self, name: str, tensor: torch.Tensor, out: torch.Tensor,
             begin: Callable[[torch.Tensor, torch.Tensor], Any]) -> Staged:
        """Queues the copy of `tensor` to the host and returns. Nothing may write to `tensor` or touch
        `out` until wait() of the result.

        out: where the average goes; may be `tensor`. It must exist on the current stream by now.
        begin: begin(host_in, host_out) -> handle begins the push-pull of host memory; both may be
            the same. Pushes begin in the order of these calls.
        Errors: INVALID_ARGUMENT for another shape, dtype or device of `out`; what close() left.
        """
        self._check()
        if (out.shape, out.dtype, out.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise invalid(f"tensor '{name}': out is {out.dtype} of shape {list(out.shape)} on "
                          f"{out.device}, expected {tensor.dtype} of {list(tensor.shape)} on "
                          f"{tensor.device}")
        item = Staged(self, name, tensor, out, begin)
        with self._changed:
            self._wait_for_room()
            self._reap()
            host = self._free.pop(name, None)
        try:
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = self._device.pinned_like(tensor)
            item._host = host
            item._event = self._device.copy_out(tensor, host)
        except Exception as error:
            with self._changed:
                self._fail(item, self._explain(item, "copying it to the host failed", error))
            return item
        self._hand_over(item)
        return item

    def in_order(self, call: Callable[[], None]) -> None:
        """Has `call` called once all that was pushed before has begun, before what is pushed later.
        For end_step. An error of it is raised by the next push or in_order."""
        self._check()
        with self._changed:
            self._wait_for_room()
        self._hand_over(call)

    def wait_for_calls(self) -> None:
        """Blocks until all that in_order was given has been called. Errors: those of the calls."""
        self._check()
        with self._changed:
            while not all(isinstance(entry, Staged) for entry in self._outgoing):
                self._changed.wait(_SLICE_S)
            self._raise_errors()

    def _wait_for_room(self) -> None:
        while self._ended is None and len(self._outgoing) >= _MOST_OUTGOING:
            self._changed.wait(_SLICE_S)
        self._raise_errors()

    def _raise_errors(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._call_error is not None:
            error, self._call_error = self._call_error, None
            raise error

    def _hand_over(self, entry: Union[Staged, Callable[[], None]]) -> None:
        with self._changed:
            if self._ended is not None:
                if isinstance(entry, Staged):
                    self._fail(entry, self._ended)
                raise self._ended
            self._outgoing.append(entry)
            if not self._threads:
                self._threads = [threading.Thread(target=self._begin_pushes, name="gradwire-out"),
                                 threading.Thread(target=self._finish_pushes, name="gradwire-in")]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()

    def state_of(self, item: Staged) -> State:
        self._check()
        with self._changed:
            self._reap()
            return item._state

    def poll(self, item: Staged) -> bool:
        """True once wait(item) would return at once."""
        self._check()
        with self._changed:
            if item._state is not State.PUSHING or item._claimed:
                return item._state not in (State.COPYING_OUT, State.PUSHING)
            item._claimed = True
        self._advance(item, 0)
        with self._changed:
            return item._state is not State.PUSHING

    def wait(self, item: Staged, timeout: Optional[float]) -> None:
        """As Staged.wait."""
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            item._waiting += 1
        try:
            while True:
                with self._changed:
                    while item._state is State.COPYING_OUT or (
                            item._state is State.PUSHING and item._claimed):
                        rest = _rest(deadline)
                        if rest == 0:
                            raise self._timeout(item)
                        self._changed.wait(rest)
                    if item._state is not State.PUSHING:
                        break
                    item._claimed = True
                self._advance(item, _rest(deadline))
                if item._state is State.PUSHING and _rest(deadline) == 0:
                    raise self._timeout(item)
        finally:
            with self._changed:
                item._waiting -= 1
                self._changed.notify_all()
        if item._error is not None:
            raise item._error
        try:
            self._device.follow(item._event, item._out)
        except Exception as error:
            raise self._explain(item, "waiting for its copy to the device failed",
                                error) from error

    def _timeout(self, item: Staged) -> GradwireError:
        return GradwireError(Code.TIMEOUT, f"tensor '{item.name}' on rank {self._rank} is not there "
                             f"yet: {item._state.value}")

    def close(self, orderly: bool, timeout: float = _CLOSE_S) -> None:
        """Ends the threads; all that is pending fails, in order after its pushes have begun, so that
        no other rank waits for one. Errors: TIMEOUT if a thread does not end."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while orderly and self._outgoing and self._ended is None:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    break
                self._changed.wait(rest)
            self._end("the client is shut down")
        for thread in self._threads:
            thread.join(max(_SLICE_S * 2, deadline - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise GradwireError(Code.TIMEOUT, f"rank {self._rank}: after {timeout:g} s the staging "
                                f"threads {', '.join(stuck)} have not ended")

    # --- with self._changed held -----------------------------------------------------------------

    def _fail(self, item: Staged, error: GradwireError) -> None:
        """Its buffer is not used again: the device or the library may still do so."""
        if item._state in (State.DONE, State.FAILED):
            return
        for place in (self._pushing, self._arriving):
            if item in place:
                place.remove(item)
        item._state, item._error = State.FAILED, error
        item._tensor = item._host = item._handle = item._begin = None
        self._changed.notify_all()

    def _reap(self) -> None:
        """Takes the buffers whose copies back have ended."""
        for item in list(self._arriving):
            try:
                if not self._device.query(item._event):
                    continue
            except Exception as error:
                self._fail(item, self._explain(item, "copying it to the device failed", error))
                continue
            self._arriving.remove(item)
            item._state = State.DONE
            assert item._host is not None
            self._free[item.name] = item._host
            item._tensor = item._host = item._handle = None
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = GradwireError(Code.UNAVAILABLE, f"rank {self._rank}: {why}")
        items = [entry for entry in self._outgoing if isinstance(entry, Staged)]
        self._outgoing.clear()
        for item in items + self._pushing + self._arriving:
            self._fail(item, GradwireError(
                Code.UNAVAILABLE, f"tensor '{item.name}' on rank {self._rank} is lost, "
                f"{item._state.value}: {why}"))
        self._free.clear()
        self._changed.notify_all()

    def _must_end(self) -> bool:
        # The interpreter waits for threads before it calls what would close us.
        if self._ended is None and not threading.main_thread().is_alive():
            self._end("the main thread has ended")
        return self._ended is not None

    # --- the staging threads ---------------------------------------------------------------------

    def _explain(self, item: Staged, what: str, error: Exception) -> GradwireError:
        result = GradwireError(Code.INTERNAL, f"tensor '{item.name}' on rank {self._rank} "
                               f"({item._out.device}): {what}: {error}")
        result.__cause__ = error
        return result

    def _begin_pushes(self) -> None:
        while True:
            with self._changed:
                while not self._must_end() and not self._outgoing:
                    self._changed.wait(_SLICE_S)
                if self._ended is not None:
                    return
                entry = self._outgoing[0]
            if isinstance(entry, Staged):
                self._begin_push(entry)
            else:
                self._call(entry)
            with self._changed:
                # Only now, so that close() knows what has begun.
                if self._outgoing and self._outgoing[0] is entry:
                    self._outgoing.popleft()
                self._changed.notify_all()
            del entry  # a tensor must not live on because of an idle thread

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not isinstance(error, GradwireError):
                error = GradwireError(Code.INTERNAL, f"rank {self._rank}: ending the step failed: "
                                      f"{error}")
            with self._changed:
                self._call_error = error

    def _begin_push(self, item: Staged) -> None:
        with self._changed:
            host, event, begin = item._host, item._event, item._begin
        what = "copying it to the host failed"
        try:
            while not self._device.wait(event, _SLICE_S):
                with self._changed:
                    if self._must_end():
                        return
            with self._changed:
                if item._state is not State.COPYING_OUT:
                    return  # closed
            what = "its push could not begin"
            assert host is not None and begin is not None
            handle = begin(host, host)
        except Exception as error:
            if not isinstance(error, GradwireError):
                error = self._explain(item, what, error)
            with self._changed:
                self._fail(item, error)
            return
        with self._changed:
            if item._state is State.COPYING_OUT:
                item._state, item._handle, item._event = State.PUSHING, handle, None
                item._begin = None
                self._pushing.append(item)
                self._changed.notify_all()

    def _finish_pushes(self) -> None:
        while True:
            with self._changed:
                if self._must_end():
                    return
                self._reap()
                # Whoever waits for one does it there, with the deadline of the job.
                item = next((item for item in self._pushing
                             if not item._claimed and not item._waiting), None)
                arriving = self._arriving[0] if self._arriving else None
                if item is not None:
                    item._claimed = True
                elif arriving is None:
                    self._changed.wait(_SLICE_S)
                    continue
                else:
                    event = arriving._event
            if item is not None:
                self._advance(item, _SLICE_S)
            else:
                try:
                    self._device.wait(event, _SLICE_S)
                except Exception as error:
                    with self._changed:
                        self._fail(arriving, self._explain(
                            arriving, "copying it to the device failed", error))
                del event
            del item, arriving

    def _advance(self, item: Staged, timeout: Optional[float]) -> None:
        """Waits for the push of an item that this thread has claimed, and queues its copy back."""
        error: Optional[GradwireError] = None
        event = None
        try:
            with self._changed:
                handle, host = item._handle, item._host
                if item._state is not State.PUSHING:
                    return  # closed
            what = "its push failed"
            try:
                if self._finish(handle, timeout):
                    item.nonfinite = handle.nonfinite
                    item.nonfinite_ranks = handle.nonfinite_ranks
                    what = "copying it to the device failed"
                    event = self._device.copy_in(host, item._out)
            except Exception as raised:
                error = (raised if isinstance(raised, GradwireError)
                         else self._explain(item, what, raised))
        finally:  # also if Ctrl-C comes in between
            with self._changed:
                item._claimed = False
                if error is not None:
                    self._fail(item, error)
                elif event is not None and item._state is State.PUSHING:
                    self._pushing.remove(item)
                    item._state, item._event = State.COPYING_IN, event
                    self._arriving.append(item)
                self._changed.notify_all()


_stagings: "weakref.WeakKeyDictionary[Client, Staging]" = weakref.WeakKeyDictionary()


def existing_staging(client: Client) -> Optional[Staging]:
    """The client's staging, if it has staged a tensor."""
    return _stagings.get(client)


def staging_of(client: Client) -> Staging:
    """The client's staging of CUDA tensors, which ends with the client."""
    staging = _stagings.get(client)
    if staging is None:
        # `check` is not the client's own method: it would keep its key alive.
        this = weakref.ref(client)

        def check() -> None:
            owner = this()
            if owner is not None:
                owner.check_process()

        staging = Staging(CudaDevice(), client.rank(), check=check)
        client.before_close.append(staging.close)
        _stagings[client] = staging
    return staging
