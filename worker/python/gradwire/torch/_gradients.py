"""Gradients on their way: what DistributedOptimizer and DistributedDataParallel share."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from .. import rank
from .._client import Client, invalid, require
from . import _ops

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Steps:
    """When the client's step ends, with several exchanges in one process.

    end_step is the client's: it ends the step for everything that is fused, whoever owns it, and
    all ranks must call it at the same place. So it is called when every exchange has handed over all
    its gradients since the last call. One that does so twice before has shown that the others
    rest, and ends the step alone, unless some of another's gradients are under way: then that
    one's step() does it. One whose optimizer is gone meanwhile is abandoned there. A new connection
    begins anew; exchanges of one before take no part.
    """

    def __init__(self) -> None:
        self._client: Callable[[], Optional[Client]] = lambda: None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._exchanges = 0
        self._complete: Set[int] = set()
        # Kept alive until they are complete, so that what becomes of them is not up to the collector.
        self._begun: Dict[int, Optional["GradientExchange"]] = {}

    def enter(self) -> int:
        """The number of a new exchange: that of its construction, the same on every rank."""
        client = require()
        if self._client() is not client:
            self._client = weakref.ref(client)
            self._begin_anew()
        self._exchanges += 1
        return self._exchanges - 1

    def are_several(self) -> bool:
        """Whether the connection has had more than one exchange."""
        return self._exchanges > 1

    def begin(self, number: int, exchange: Optional["GradientExchange"] = None) -> None:
        """The exchange has some gradients under way, and others to come.
        exchange: one that can be abandoned."""
        self._begun[number] = exchange

    def complete(self, number: int) -> None:
        """All gradients of the exchange are under way."""
        self._begun.pop(number, None)
        if number in self._complete:
            for exchange in list(self._begun.values()):
                if exchange is not None and exchange.is_orphan():
                    exchange.abandon()
            if number not in self._complete:
                self._complete.add(number)  # the step of an abandoned one has ended: this is the next
                return
            if self._begun:
                return
            self._complete = {number}
        else:
            self._complete.add(number)
            if len(self._complete) < self._exchanges:
                return
            self._complete = set()
        _ops.end_step()


_steps = _Steps()


class Slot:
    """A parameter and where its gradient is."""

    __slots__ = ("parameter", "name", "group", "priority", "arrivals", "sent", "handle", "hook",
                 "node")

    def __init__(self, parameter: torch.Tensor, name: str, group: int, priority: int) -> None:
        self.parameter = parameter
        self.name = name
        self.group = group
        self.priority = priority
        self.arrivals = 0  # backward passes since the last step
        self.sent: Optional[torch.Tensor] = None  # what is averaged in place while handle is set
        self.handle: Any = None
        self.hook: Any = None
        self.node: Any = None  # PyTorch 1: the node must live as long as its hook


# Who averages a parameter's gradient, by the parameter's id. Not an attribute of the parameter, which
# would be saved along with it.
_owners: Dict[int, Tuple["weakref.ref[torch.Tensor]", "weakref.ref[Any]"]] = {}


def owner_of(parameter: torch.Tensor) -> Any:
    """Who averages its gradient: something with hand_on, or None."""
    known, owner = _owners.get(id(parameter), (None, None))
    return owner() if known is not None and known() is parameter else None


def set_owner(parameter: torch.Tensor, owner: Any) -> None:
    """Neither is kept alive."""
    key = id(parameter)
    _owners[key] = weakref.ref(parameter, lambda _: _owners.pop(key, None)), weakref.ref(owner)


class GradientExchange:
    """Averages the gradients of parameters in place, while the backward pass goes on.

    Threads: those that run the backward pass and the training loop, one at a time.
    """

    def __init__(self, owner: str, compression: Any, passes: int = 1,
                 begin: Optional[Callable[[], None]] = None,
                 arrived: Optional[Callable[[], None]] = None, method: Any = None) -> None:
        """owner: the class's name, for messages.
        passes: backward passes until a gradient is handed over.
        begin: called before a step's first gradient is handed over.
        arrived: called when a gradient comes from the backward pass.
        Both are bound methods; their object is not kept alive.
        method: a MethodOptimizer, which sees each gradient before it is pushed and after it was
            pulled; it is not kept alive.
        """
        self.owner = owner
        self.passes = passes
        self.slots: List[Slot] = []
        self.paused = False  # gradients add up on this rank
        self.ready = False  # all are averaged, and nobody has used them yet
        self.sent_all = False  # send_rest is over, receive_all is not: an exception came in between
        self.void: List[str] = []  # of the last step: the tensors that were not finite
        self.at_fault: Set[int] = set()  # ranks whose gradients were not, until warn_of_void
        self._client = weakref.ref(require())
        self.number = _steps.enter()
        self.prefix = "Gradient." if self.number == 0 else f"Gradient@{self.number}."
        self.released = False
        self._compression = compression
        self._begun = False
        self._begin = weakref.WeakMethod(begin) if begin else None
        self._arrived = weakref.WeakMethod(arrived) if arrived else None
        self._method: Callable[[], Any] = weakref.ref(method) if method is not None else lambda: None

    def add(self, group: int, named: Sequence[Tuple[str, torch.Tensor, int]]) -> None:
        """Declares the parameters (name, parameter, priority) of a group together. Collective."""
        if not named:
            return
        for name, parameter, _ in named:
            previous = owner_of(parameter)
            if previous is not None and previous is not self:
                previous.hand_on(name, self.owner)
        slots = [Slot(parameter, self.prefix + name, group, priority)
                 for name, parameter, priority in named]
        declare = _ops.declare if self._method() is None else _ops.declare_all
        declare({slot.name: self._on_the_wire(slot.parameter) for slot in slots},
                priority={slot.name: slot.priority for slot in slots})
        for slot in slots:
            self._watch(slot)
            set_owner(slot.parameter, self)
        self.slots += slots

    def _on_the_wire(self, parameter: torch.Tensor) -> torch.Tensor:
        """Shape and dtype of what travels, without memory."""
        return self._compression.compress(torch.empty_like(parameter, device="meta"))[0]

    def _watch(self, slot: Slot) -> None:
        """Calls _on_gradient after each gradient is added to parameter.grad."""
        this = weakref.ref(self)

        def hook(*_: Any) -> None:
            exchange = this()
            if exchange is not None:
                exchange._on_gradient(slot)

        if hasattr(slot.parameter, "register_post_accumulate_grad_hook"):
            slot.hook = slot.parameter.register_post_accumulate_grad_hook(hook)
        else:
            with torch.enable_grad():
                slot.node = slot.parameter.expand_as(slot.parameter).grad_fn.next_functions[0][0]
            slot.hook = slot.node.register_hook(hook)

    def hand_on(self, name: str, to: str) -> None:
        """Another exchange wants the parameter: this one averages nothing any more."""
        if self._client() is not require():
            self._release()  # it could do nothing any more
            return
        if self.owner == "DistributedDataParallel" or to == "DistributedDataParallel":
            raise invalid(f"the gradient of '{name}' is averaged by a {self.owner} already, and a "
                          f"{to} would do it again: use one of the two")
        if self.is_under_way() is not None:
            gc.collect()  # if the optimizer is garbage, then on all ranks
            if self.is_orphan():
                self.abandon()
                return
            raise invalid(f"'{name}' belongs to a {self.owner} whose gradients are under way: call "
                          "its step() before its parameters go to another")
        self._release()

    def is_orphan(self) -> bool:
        """Whether its optimizer is gone."""
        return self._begin is not None and self._begin() is None

    def abandon(self) -> None:
        """Its optimizer is gone with gradients under way. They are completed, since a tensor has one
        push-pull at a time and all ranks must count the same steps; nobody wants the averages."""
        if not self.sent_all:
            for slot in self.slots:
                if slot.handle is None:
                    self._send(slot, torch.zeros_like(slot.parameter))
            self._end_sending()
        self.receive_all()
        self.reset()
        self._release()

    def _release(self) -> None:
        for slot in self.slots:
            slot.hook.remove()
        self.released = True

    def _on_gradient(self, slot: Slot) -> None:
        if self.paused or self.is_orphan():
            return  # a model whose optimizer is gone is like any other
        if slot.handle is not None or self.ready:
            if not self.ready or not self.void:
                self._refuse_second(slot)
            self.reset()  # a scaler has skipped step()
        slot.arrivals += 1
        if slot.arrivals == self.passes:
            self._send(slot, slot.parameter.grad)
        if self._arrived is not None:
            self._arrived()()

    def _refuse_second(self, slot: Slot) -> None:
        state = "averaged" if self.ready else "on its way"
        if self.owner == "DistributedDataParallel":
            raise invalid(
                f"a gradient of '{slot.name}' on rank {rank()} while the one before is on its way. "
                "Either the last backward pass ended with an error, and the other ranks wait for the "
                "rest of its gradients: end the program; or this pass runs inside of another, as "
                "activation checkpointing does with use_reentrant=True: use use_reentrant=False")
        if self._arrived is not None and not self.ready:
            raise invalid(
                f"a gradient of '{slot.name}' on rank {rank()} before its last update was "
                "applied: since step() the forward of its module, and of the model, was not called. "
                "Call the model, or synchronize() first")
        raise invalid(
            f"a second gradient of '{slot.name}' on rank {rank()} before step() has used the "
            f"first, which is {state} already. To add up several backward passes, give "
            "backward_passes_per_step or run all but the last under no_sync(). If the loss of "
            "another optimizer reaches this parameter, run its backward pass under this "
            "optimizer's no_sync(), or set requires_grad_(False) meanwhile")

    def _check_connection(self) -> None:
        if require() is not self._client():
            raise invalid(f"this {self.owner} was made for a connection that is closed: make it anew "
                          "after gradwire.init(), from a plain optimizer or module")

    def _send(self, slot: Slot, gradient: torch.Tensor) -> None:
        self._check_connection()
        if not self._begun:
            self._begun = True
            _steps.begin(self.number, self)
            if self._begin is not None:
                self._begin()()
        if gradient.layout is not torch.strided:
            raise invalid(f"the gradient of '{slot.name}' is sparse ({gradient.layout}), expected a "
                          "dense one: build the embedding with sparse=False")
        method = self._method()
        if method is not None and slot.parameter.requires_grad:
            if method.freeze_step > 0 and _steps.are_several():
                raise invalid(f"{type(method).__name__} counts the steps of its warm-up as the job "
                              "does, which other optimizers of this process end too: expected it to "
                              "be the only one")
            method.before_push(slot.parameter, gradient)
        slot.sent = gradient
        slot.handle = _ops.push_pull_async_inplace(
            gradient, name=slot.name, priority=slot.priority, compression=self._compression)

    def send_rest(self) -> None:
        """Hands over what the backward pass has not: what .grad holds, else zeros. Nothing if that was
        done before receive_all was interrupted."""
        if self.released:
            raise invalid(f"this {self.owner} has lost its parameters to another that was built "
                          "from them later: use that one")
        self._check_connection()
        if self.sent_all:
            return
        for slot in self.slots:
            if slot.handle is not None:
                continue
            parameter = slot.parameter
            if not parameter.requires_grad:  # frozen meanwhile: .grad stays as it is
                self._send(slot, torch.zeros_like(parameter))
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._send(slot, parameter.grad)
        self._end_sending()

    def _end_sending(self) -> None:
        self._begun = False
        self.void = []
        self.sent_all = True
        if self._method() is not None:
            self._method().after_sending()
        _steps.complete(self.number)

    def send_zeros(self) -> None:
        """As send_rest for a rank that has no gradients at all; nothing of its own is changed."""
        for slot in self.slots:
            self._send(slot, torch.zeros_like(slot.parameter))
        self._end_sending()

    def receive(self, slot: Slot) -> bool:
        """Waits for one tensor's average.  Returns whether it is one: False if it was void."""
        handle = slot.handle
        _ops.synchronize(handle)
        slot.handle, slot.arrivals = None, 0
        if self._method() is not None:
            self._method().after_pull(slot.parameter, slot.sent, handle.of_client)
        if handle.nonfinite:
            self.at_fault.update(handle.nonfinite_ranks)
        return not handle.nonfinite

    def receive_all(self) -> None:
        """Waits for all averages; self.void then has the names of those that were not finite. It may
        be called again after Ctrl-C has interrupted it."""
        for slot in self.slots:
            if slot.handle is not None and not self.receive(slot):
                self.void.append(slot.name)
        self.sent_all = False
        self.ready = True

    def warn_of_void(self, void: List[str], consequence: str) -> None:
        """Says which averages were not finite, and what becomes of them."""
        names = ", ".join(f"'{name}'" for name in void[:5])
        if len(void) > 5:
            names += f" and {len(void) - 5} more"
        whose = ""
        if self.at_fault:
            ranks = sorted(self.at_fault)
            whose = (f", because of rank{'s' if len(ranks) > 1 else ''} "
                     + ", ".join(str(number) for number in ranks))
            self.at_fault = set()
        warnings.warn(f"the averages of {names} are not finite{whose}: {consequence}",
                      RuntimeWarning, stacklevel=5)

    def reset(self) -> None:
        """The averages have been used, or are not wanted."""
        self.ready = False
        for slot in self.slots:
            slot.arrivals = 0
            slot.sent = None

    def is_under_way(self) -> Optional[Slot]:
        """The first tensor that is under way."""
        return next((slot for slot in self.slots if slot.handle is not None), None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in the context add up on this rank."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Refuses what has no gradient that can be averaged. Errors: INVALID_ARGUMENT by name."""
    kind = type(parameter).__name__
    if kind in ("FlatParameter", "DTensor", "ShardedTensor") or getattr(
            parameter, "_is_flat_param", False):
        raise invalid(f"parameter '{name}' is a {kind}: a part of a parameter, whose gradient FSDP "
                      "or tensor parallelism reduces itself. Gradwire averages whole gradients")
    if parameter.layout is not torch.strided:
        raise invalid(f"parameter '{name}' is sparse ({parameter.layout}), expected a dense one")
    if parameter.dtype not in _DTYPES:
        raise invalid(f"parameter '{name}' is {str(parameter.dtype)[6:]}, expected one of "
                      + ", ".join(str(dtype)[6:] for dtype in _DTYPES))


def check_module(module: torch.nn.Module, what: str, compiled: bool) -> None:
    """Refuses modules that work otherwise than `what` expects.

    compiled: whether compiled modules are fine.
    """
    for name, part in module.named_modules():
        where = f"module '{name}'" if name else "the module"
        kinds = [kind.__name__ for kind in type(part).__mro__]
        if "FullyShardedDataParallel" in kinds or "FSDPModule" in kinds:
            raise invalid(f"{what}: {where} is sharded by FSDP, which reduces gradients itself and "
                          "keeps a part of each on a rank. Give the module before it is sharded")
        if "DistributedDataParallel" in kinds:
            raise invalid(f"{what}: {where} is a DistributedDataParallel, which averages gradients "
                          "itself. Give the module inside")
        if not compiled and "OptimizedModule" in kinds:
            raise invalid(f"{what}: {where} is compiled by torch.compile, which leaves out the hooks "
                          "of the modules inside. Give the module before it is compiled")


def unique_names(named: Any, what: str) -> Dict[str, torch.Tensor]:
    """name to parameter, in order. Errors: INVALID_ARGUMENT for a name that is there twice."""
    result: Dict[str, torch.Tensor] = {}
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
                and isinstance(entry[1], torch.Tensor)):
            raise invalid(f"{what}: expected pairs of a name and a parameter, as "
                          f"model.named_parameters() gives, got a {type(entry).__name__}")
        name, parameter = entry
        if name in result:
            raise invalid(f"{what}: two parameters are named '{name}'")
        result[name] = parameter
    return result
