"""DistributedOptimizer: an optimizer whose gradients are averaged over the workers."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch

from .. import Code, GradwireError, plan, rank, size
from .._client import invalid, require
from . import _ops
from ._advice import advise
from ._gradients import GradientExchange, Slot, check_module, check_parameter, unique_names
from ._methods import MethodOptimizer

_URGENT = 2**30  # before every gradient
# How long a rank that leaves join() with an error waits for the others to hear of it.
_FAREWELL_S = 10.0


class _Void(Exception):
    """A closure's gradients were not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class _DistributedOptimizer:
    """What DistributedOptimizer adds to an optimizer's own class, which comes next in the order."""

    param_groups: List[Dict[str, Any]]
    skipped_steps: int  # steps that were left out because an average was not finite

    def _distribute(self, named: Optional[Dict[str, torch.Tensor]], compression: Any, passes: int,
                    scaler: Any, model: Optional[torch.nn.Module]) -> None:
        """What a constructor would do."""
        self.skipped_steps = 0
        self._skips_synchronize = False
        self._scaler = scaler
        self._scale: Optional[float] = None  # what Gradwire has been told, as _rates
        self._rates: List[Optional[float]] = []
        self._join: Optional[_Join] = None
        self._overlap: Optional[_Overlap] = None
        self._names = None if named is None else {
            parameter: (name, -i)
            for i, (name, parameter) in reversed(list(enumerate(named.items())))}
        self._frozen: List[Tuple[int, torch.Tensor]] = []
        self._adapts = isinstance(self, MethodOptimizer)
        # Checked before anything is declared.
        if self._adapts:
            self.open_method(require())
        members = [self._members(index) for index in range(len(self.param_groups))]
        self._exchange = GradientExchange(
            "DistributedOptimizer", compression, passes, self._begin_step,
            self._on_gradient if model is not None else None, self if self._adapts else None)
        if self._adapts:
            self.agree_on_method(self._exchange.prefix)
        for index, named_members in enumerate(members):
            self._enroll(index, named_members)
        # A scheduler that is older than the wrapper counts the steps in an attribute of its own.
        self._counted_step = counted = self.__dict__.pop("step", None)
        if counted is not None:
            this = weakref.ref(self)

            @functools.wraps(counted)
            def step(*arguments: Any, **more: Any) -> Any:
                optimizer = this()
                return type(optimizer).step(optimizer, *arguments, **more)

            self.step = step  # type: ignore[method-assign]
        if scaler is not None:
            _synchronize_before_unscaling(scaler, self)
        if model is not None:
            self._overlap = _Overlap(self, model)

    # ---- Which parameters ----------------------------------------------------------------------

    def _members(self, index: int) -> List[Tuple[str, torch.Tensor, int]]:
        """Name, parameter and priority of each member of a group.  Errors: INVALID_ARGUMENT."""
        result = []
        for i, parameter in enumerate(self.param_groups[index]["params"]):
            if self._names is None:
                before = sum(len(group["params"]) for group in self.param_groups[:index])
                name, priority = f"{index}.{i}", -(before + i)
            elif parameter in self._names:
                name, priority = self._names[parameter]
            else:
                raise invalid(
                    f"parameter {i} of group {index} (shape {list(parameter.shape)}) is not among "
                    "the named_parameters: give those of the whole model, model.named_parameters()")
            check_parameter(name, parameter)
            if self._adapts:
                self.check_member(name, parameter, self.param_groups[index])
            result.append((name, parameter, priority))
        return result

    def _enroll(self, index: int, members: List[Tuple[str, torch.Tensor, int]]) -> None:
        self._rates.append(None)
        self._add(index, [member for member in members if member[1].requires_grad])
        self._frozen += [(index, member[1]) for member in members if not member[1].requires_grad]

    def _add(self, index: int, members: List[Tuple[str, torch.Tensor, int]]) -> None:
        self._exchange.add(index, members)
        if self._adapts:
            prefix = self._exchange.prefix
            self.add_members([(name, prefix + name, parameter) for name, parameter, _ in members],
                             self.param_groups[index])

    def _enroll_thawed(self) -> None:
        """Parameters that were frozen and are not any more. All ranks thaw the same."""
        thawed = [entry for entry in self._frozen if entry[1].requires_grad]
        if not thawed:
            return
        self._frozen = [entry for entry in self._frozen if not entry[1].requires_grad]
        for index in sorted({index for index, _ in thawed}):
            mine = {parameter for group, parameter in thawed if group == index}
            self._add(index, [member for member in self._members(index) if member[1] in mine])
            self._rates[index] = None
        self._begin_step()  # for these; others may be under way
        if self._overlap is not None:
            self._overlap.learn_anew()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As the optimizer's own. Collective: the new parameters are declared."""
        self._finish_updates()
        super().add_param_group(param_group)  # type: ignore[misc]
        index = len(self.param_groups) - 1
        try:
            self._enroll(index, self._members(index))
        except GradwireError:
            self.param_groups.pop()
            del self._rates[index:]
            raise
        if self._overlap is not None:
            self._overlap.learn_anew()

    # ---- A step --------------------------------------------------------------------------------

    def _inner_step(self, *arguments: Any, **named: Any) -> Any:
        """The optimizer's own step."""
        if self._counted_step is not None and self._overlap is None:
            return self._counted_step(*arguments, **named)
        return super().step(*arguments, **named)  # type: ignore[misc]

    def _begin_step(self) -> None:
        """Tells Gradwire what the step's gradients are multiplied with, before and afterwards."""
        rates = self._own_rates()
        if self._join is not None and self._join.rates is not None:
            rates = self._join.rates
        for index, rate in enumerate(rates):
            if rate is not None and rate != self._rates[index]:
                names = [slot.name for slot in self._exchange.slots if slot.group == index]
                if names:
                    _ops.set_learning_rate(rate, names)
                self._rates[index] = rate
        if self._scaler is not None:
            scale = float(self._scaler.get_scale())
            if scale != self._scale:
                _ops.set_loss_scale(scale)
                self._scale = scale

    def _count_step(self) -> None:
        """What _counted_step does for a scheduler, once a step."""
        if self._counted_step is not None:
            self._step_count = getattr(self, "_step_count", 0) + 1  # PyTorch 1
            self._opt_called = True

    def _own_rates(self) -> List[Optional[float]]:
        rates = [group.get("lr") for group in self.param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    def _send_rest(self) -> None:
        self._enroll_thawed()
        if self._join is not None:
            self._join.send(_Join.ACTIVE)
        self._exchange.send_rest()
        if self._join is not None:
            self._join.receive()

    def synchronize(self) -> None:
        """Hands over what is left and waits for all averages, which are in .grad then. step() does it
        itself; call it before to clip the gradients, for example.

        With overlap_forward it also applies the updates of the last step.
        """
        self._finish_updates()
        if self._exchange.ready or (self._overlap is not None and not self._overlap.has_gradients):
            return
        self._send_rest()
        self._exchange.receive_all()
        self._report(self._exchange.void)

    def _report(self, void: List[str]) -> None:
        if void:
            self.skipped_steps += 1
            what = ("the step is left out on every rank"
                    if self._overlap is None and not self._adapts else "they are left out on every rank")
            self._exchange.warn_of_void(void, f"{what} ({self.skipped_steps} steps so far)")

    def step(self, closure: Optional[Callable[[], Any]] = None, **more: Any) -> Any:
        """Averages what is not averaged yet and applies it. Collective.

        closure: evaluated with gradients on; each evaluation averages them.
        A step whose averages are not finite is left out by all ranks.
        """
        exchange = self._exchange
        if closure is not None:
            return self._step_with_closure(closure, more)
        if self._overlap is not None and not exchange.ready:
            self._finish_updates()
            self._send_rest()
            self._overlap.begin(more)
            self._count_step()
            return None
        if not exchange.ready:
            if self._skips_synchronize:
                raise invalid("step() under skip_synchronize(), but the gradients are not averaged: "
                              "call synchronize() before")
            self.synchronize()
        if self._overlap is not None:
            self._overlap.has_gradients = False
            self._count_step()
        exchange.reset()
        if exchange.void and not self._adapts:
            return None
        return self._inner_step(**more)

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step tells the profiler

    def _step_with_closure(self, closure: Callable[[], Any], more: Dict[str, Any]) -> Any:
        if self._overlap is not None:
            raise invalid("step(closure) with overlap_forward: the closure's forward pass would have "
                          "to wait for the step that it is a part of. Use one of the two")

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._exchange.reset()
            if self._exchange.void and not self._adapts:
                raise _Void(loss)
            return loss

        try:
            return self._inner_step(evaluate, **more)
        except _Void as void:
            return void.loss

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() in the context uses what synchronize() before it has averaged."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def no_sync(self) -> Any:
        """A context in which the gradients of backward passes add up on this rank. Those passes do
        not count for backward_passes_per_step; the next one outside takes their sum along."""
        return self._exchange.no_sync()

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """As the optimizer's own. Errors: INVALID_ARGUMENT between backward() and step()."""
        if self._overlap is not None:
            self._overlap.let_go()
        slot = self._exchange.is_under_way()
        if slot is not None and (self._overlap is None or slot not in self._overlap.pending):
            raise invalid(f"zero_grad() on rank {rank()} while '{slot.name}' is on its way: it "
                          "belongs after step(). To drop the gradients on all ranks, call "
                          "synchronize() first")
        if self._overlap is None or not self._overlap.pending:
            self._exchange.reset()
            if self._adapts:
                self.drop_pulled()
        if self._overlap is not None:
            self._overlap.has_gradients = False
        super().zero_grad(*arguments, **named)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise invalid(f"a distributed {type(self).__name__} can't be copied or pickled, since its "
                      "gradients have names in the job: save or copy its state_dict()")

    # ---- Overlap with the next forward pass ------------------------------------------------------

    def _on_gradient(self) -> None:
        self._overlap.has_gradients = True  # type: ignore[union-attr]

    def _finish_updates(self) -> None:
        if self._overlap is not None:
            self._overlap.finish()

    def state_dict(self) -> Dict[str, Any]:
        """As the optimizer's own, with all updates applied."""
        self._finish_updates()
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """As the optimizer's own."""
        self._finish_updates()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    # ---- Uneven batches --------------------------------------------------------------------------

    @contextlib.contextmanager
    def join(self, buffers: Iterable[Tuple[str, torch.Tensor]] = ()) -> Iterator[None]:
        """A context for loops that are longer on some ranks. Collective.

        A rank that leaves early sends zeros until the last one leaves; the averages are still over
        all workers. Then everybody has the parameters, the optimizer's state and the `buffers`
        (such as model.named_buffers()) of the lowest rank that made the last step, and gradients
        are dropped. Errors: UNAVAILABLE if another rank leaves with an error.
        """
        if self._scaler is not None:
            raise invalid("join() with grad_scaler: the scale of a rank that has run out would fall "
                          "behind. Give all ranks the same number of batches")
        if self._adapts:
            raise invalid(f"join() with {type(self).__name__}: a rank that has run out would have a "
                          "state of its own. Give all ranks the same number of batches")
        self._finish_updates()
        join = _Join(self)
        self._join = join
        try:
            yield
            self._finish_updates()
            slot = self._exchange.is_under_way()
            if slot is not None:
                raise invalid(f"join() on rank {rank()} is left between backward() and step(): "
                              f"'{slot.name}' is on its way")
            join.answer()
        except Exception:
            join.leave_with_error()
            raise
        finally:
            self._join = None
            _Join.is_open = False
        self.zero_grad()
        join.share(unique_names(buffers, "join(buffers)"))


class _Join:
    """Who still has batches: one row a rank, exchanged before each step's averages are waited for."""

    OUT, ACTIVE, FAILED = 0, 1, 2
    is_open = False  # in this process; a rank that has run out could answer for one optimizer only

    def __init__(self, optimizer: _DistributedOptimizer) -> None:
        if _Join.is_open:
            raise invalid("join() inside another join(): a rank that has run out can answer for one "
                          "optimizer only. Give one optimizer all parameters, in groups")
        self._optimizer = optimizer
        # State, then the bits of the groups' learning rates.
        self._columns = 1 + 2 * len(optimizer.param_groups)
        self._name = f"{optimizer._exchange.prefix}(join {self._columns})"
        self._handle: Any = None
        self._last_active: Optional[int] = None
        self.rates: Optional[List[Optional[float]]] = None  # of a rank that goes on, once we don't
        _ops.declare({self._name: self._rows()}, average=False, priority=_URGENT)
        _Join.is_open = True

    def _rows(self) -> torch.Tensor:
        return torch.zeros(size(), self._columns, dtype=torch.int32)

    def send(self, state: int) -> None:
        rows = self._rows()
        row = rows[rank()]
        row[0] = state
        rates = [float("nan") if rate is None else rate for rate in self._optimizer._own_rates()]
        row[1:] = torch.tensor(rates, dtype=torch.float64).view(torch.int32)
        self._handle = _ops.push_pull_async_inplace(rows, average=False, name=self._name,
                                                    priority=_URGENT)

    def receive(self) -> Optional[torch.Tensor]:
        """The row of the lowest rank that goes on.  Errors: UNAVAILABLE if a rank has failed."""
        rows = _ops.synchronize(self._handle)
        states = rows[:, 0].tolist()
        if self.FAILED in states:
            raise GradwireError(Code.UNAVAILABLE,
                                f"rank {states.index(self.FAILED)} has left join() with an error, "
                                f"which rank {rank()} can't go on without", exit_code=5)
        if self.ACTIVE not in states:
            return None
        self._last_active = states.index(self.ACTIVE)
        return rows[self._last_active]

    def answer(self) -> None:
        """Sends zeros as long as somebody goes on."""
        exchange = self._optimizer._exchange
        while True:
            self.send(self.OUT)
            row = self.receive()
            if row is None:
                return
            rates = row[1:].clone().view(torch.float64).tolist()  # a view would start at an odd place
            self.rates = [None if rate != rate else rate for rate in rates]
            exchange.send_zeros()
            exchange.receive_all()
            exchange.reset()
            self._optimizer._report(exchange.void)

    def leave_with_error(self) -> None:
        """Lets the others know, if they still can."""
        try:
            self.send(self.FAILED)
            _ops.synchronize(self._handle, timeout=_FAREWELL_S)
        except GradwireError:
            pass  # the job has ended, or they hear of it when this process ends

    def share(self, buffers: Dict[str, torch.Tensor]) -> None:
        """Brings everybody to the state of a rank that made the last step."""
        if self._last_active is None:
            return
        optimizer, prefix = self._optimizer, self._optimizer._exchange.prefix + "join."
        parameters = {name: parameter for index in range(len(optimizer.param_groups))
                      for name, parameter, _ in optimizer._members(index)}
        _ops.broadcast_parameters(parameters, self._last_active, prefix=prefix)
        _ops.broadcast_parameters(buffers, self._last_active, prefix=prefix + "buffer.")
        _ops.broadcast_optimizer_state(optimizer, self._last_active, prefix=prefix)


class _Overlap:
    """Updates that are applied when the next forward pass comes to their module.

    Which module's forward a parameter belongs to is learnt from the first forward pass of the whole
    model: a module whose forward is not called there (its parent uses its parameters itself)
    leaves them to the nearest one around it whose forward is.
    """

    def __init__(self, optimizer: _DistributedOptimizer, model: torch.nn.Module) -> None:
        self.pending: Set[Slot] = set()
        self.has_gradients = False  # since the last step
        self._optimizer = weakref.proxy(optimizer)
        self._model = model
        self._groups: List[Dict[str, Any]] = []  # as they were at step()
        self._more: Dict[str, Any] = {}
        self._void: List[str] = []
        self._called: Optional[Set[torch.nn.Module]] = None
        self._slots: Optional[Dict[torch.nn.Module, List[Slot]]] = None  # None: still learning
        this = weakref.ref(self)

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            overlap = this()
            if overlap is not None:
                overlap._enter(module)

        def after_state_dict(*_: Any) -> None:
            overlap = this()
            if overlap is not None:
                overlap.finish()  # the state's tensors are the parameters' own memory

        for module in model.modules():
            module.register_forward_pre_hook(before_forward)
        model._register_state_dict_hook(after_state_dict)

    def learn_anew(self) -> None:
        self._called = self._slots = None

    def _enter(self, module: torch.nn.Module) -> None:
        if self._slots is None:
            self._learn(module)
        if not self.pending:
            return
        if self._slots is None:
            self.finish()
            return
        mine = [slot for slot in self._slots.get(module, ()) if slot in self.pending]
        if mine:
            self._apply(mine)

    def _learn(self, module: torch.nn.Module) -> None:
        if module is self._model:
            if self._called is not None:
                by_parameter = {slot.parameter: slot for slot in self._optimizer._exchange.slots}
                self._slots = {}
                self._assign(self._model, self._model, by_parameter)
                return
            self._called = set()
        if self._called is not None:
            self._called.add(module)

    def _assign(self, module: torch.nn.Module, nearest: torch.nn.Module,
                by_parameter: Dict[torch.Tensor, Slot]) -> None:
        if module in self._called:  # type: ignore[operator]
            nearest = module
        mine = self._slots.setdefault(nearest, [])  # type: ignore[union-attr]
        mine += [by_parameter[parameter] for parameter in module.parameters(recurse=False)
                 if parameter in by_parameter]
        for child in module.children():
            self._assign(child, nearest, by_parameter)

    def begin(self, more: Dict[str, Any]) -> None:
        """A step whose gradients are all under way."""
        optimizer = self._optimizer
        optimizer._exchange.sent_all = False  # from here on `pending` knows what is left to do
        # A scheduler may change them before the update is applied.
        self._groups = [{key: value for key, value in group.items() if key != "params"}
                        for group in optimizer.param_groups]
        self._more = more
        self._void = []
        self.pending = set(optimizer._exchange.slots)
        self.has_gradients = False

    def let_go(self) -> None:
        """zero_grad: what is pending is held here."""
        for slot in self.pending:
            slot.parameter.grad = None

    def finish(self) -> None:
        """Applies everything that is pending."""
        if self.pending:
            self._apply([slot for slot in self._optimizer._exchange.slots if slot in self.pending])

    def _apply(self, slots: List[Slot]) -> None:
        optimizer = self._optimizer
        parts: List[Dict[str, Any]] = [dict(group, params=[]) for group in self._groups]
        gradients = []
        for slot in slots:
            finite = optimizer._exchange.receive(slot)
            self.pending.discard(slot)
            if not finite:
                self._void.append(slot.name)
            if optimizer._adapts or (finite and slot.parameter.requires_grad):
                parts[slot.group]["params"].append(slot.parameter)
                gradients.append((slot.parameter, slot.parameter.grad))
                slot.parameter.grad = slot.sent
            slot.sent = None
        groups, optimizer.param_groups = optimizer.param_groups, parts
        try:
            optimizer._inner_step(**self._more)
        finally:
            optimizer.param_groups = groups
            for parameter, gradient in gradients:
                parameter.grad = gradient
        for part, group in zip(parts, self._groups):
            for key, value in group.items():
                if part[key] is not value:
                    raise invalid(
                        f"{optimizer.__class__.__name__} keeps '{key}' in its parameter group and "
                        "changes it in step(), which overlap_forward calls for a few parameters at "
                        "a time: use it without overlap_forward")
        if not self.pending and self._void:
            optimizer._report(self._void)


def _synchronize_before_unscaling(scaler: Any, optimizer: _DistributedOptimizer) -> None:
    """The scaler looks for infinities in the averages, so that it decides alike on every rank."""
    this = weakref.ref(optimizer)

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(which: Any, *arguments: Any, **named: Any) -> Any:
            if which is this():
                which.synchronize()
            return inner(which, *arguments, **named)

        return call

    # The second is called for optimizers that unscale their gradients themselves.
    for name in ("unscale_", "_check_inf_per_device"):
        if hasattr(scaler, name):
            setattr(scaler, name, wrap(getattr(scaler, name)))


def DistributedOptimizer(optimizer: torch.optim.Optimizer,  # pylint: disable=invalid-name
                         named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
                         compression: Any = _ops.Compression.none,
                         backward_passes_per_step: int = 1, *, grad_scaler: Any = None,
                         overlap_forward: bool = False,
                         model: Optional[torch.nn.Module] = None) -> torch.optim.Optimizer:
    """Makes the optimizer average its gradients over all workers, during the backward pass.

    The optimizer itself is changed and returned: it stays an instance of its class, and schedulers
    that have it stay right. It has, beside its own methods, synchronize(), skip_synchronize(),
    no_sync(), join() and skipped_steps. Collective, as are its step() and add_param_group().

    named_parameters: model.named_parameters(), front layers first; a gradient is the tensor
        "Gradient.<name>". None: they are numbered by group and position. The names of the second
        optimizer of a process begin with "Gradient@1.", and so on.
    compression: Compression.none or Compression.fp16, before what the job's configuration does.
    backward_passes_per_step: gradients of so many passes are added up on each rank.
    grad_scaler: the GradScaler that scales the loss.
    overlap_forward: step() returns at once, and each module of `model` waits for its own parameters
        when its forward is called.
    Errors: INVALID_ARGUMENT for parameters that have no name, one that is there twice, or a dtype or
    layout that can't be averaged.
    Threads: one trains, the same all the time.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer: got a {type(optimizer).__name__}, expected a "
                        "torch.optim.Optimizer")
    if isinstance(optimizer, MethodOptimizer):
        if grad_scaler is not None:
            raise invalid(f"grad_scaler with {type(optimizer).__name__}: a method takes gradients of "
                          "float32 as they are. Use it without")
        if compression is not _ops.Compression.none:
            raise invalid(f"compression with {type(optimizer).__name__}: a method pushes float32, and "
                          "the job's configuration compresses it; expected Compression.none")
    if isinstance(optimizer, _DistributedOptimizer):
        raise invalid("DistributedOptimizer: the optimizer is distributed already")
    if isinstance(backward_passes_per_step, bool) or not isinstance(
            backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise invalid(f"backward_passes_per_step is {backward_passes_per_step!r}, expected a whole "
                      "number from 1")
    if overlap_forward != (model is not None):
        raise invalid("overlap_forward=True and model= go together: the model's modules wait for "
                      "their parameters")
    if model is not None:
        check_module(model, "overlap_forward", compiled=False)
        if grad_scaler is not None:
            raise invalid("overlap_forward with grad_scaler: the scaler looks at all gradients "
                          "before the step, so nothing could overlap. Use one of the two")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise invalid("overlap_forward with LBFGS, which updates all parameters together: use it "
                          "without overlap_forward")
    named = None if named_parameters is None else unique_names(named_parameters, "named_parameters")
    original = type(optimizer)
    optimizer.__class__ = type(original.__name__, (_DistributedOptimizer, original),
                               {"__module__": original.__module__, "__doc__": original.__doc__})
    try:
        optimizer._distribute(  # type: ignore[attr-defined]
            named, compression, backward_passes_per_step, grad_scaler, model)
    except BaseException:
        optimizer.__class__ = original
        raise
    if rank() == 0:
        advise(optimizer, plan(), [slot.name for slot in optimizer._exchange.slots])  # type: ignore[attr-defined]
    return optimizer
