"""The adaptive methods as PyTorch optimizers, to be given to DistributedOptimizer."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

import torch

from .._client import Client, invalid
from .._method import MethodState
from . import _ops

# What load_state_dict and state_dict have beside PyTorch's own keys.
_KEY = "method"


def _written(name: str, parameters: Mapping[str, Any]) -> str:
    """As "lans(beta1=0.9,eps=1e-06)"; what is None is left to the method."""
    values = {key: str(value).lower() if isinstance(value, bool) else
              str(value) if isinstance(value, int) else repr(float(value))
              for key, value in parameters.items() if value is not None}
    return name + ("(" + ",".join(f"{key}={value}" for key, value in values.items()) + ")"
                   if values else "")


class MethodOptimizer(torch.optim.Optimizer):
    """The job's adaptive method (the setting `method`), or the one that is given.

        optimizer = gradwire.DistributedOptimizer(gradwire.LANS(model.parameters(), lr=0.01),
                                                  named_parameters=model.named_parameters())

    It works behind DistributedOptimizer only: that pushes what the method makes of each gradient,
    and what was pulled is in .grad when step() brings it into the parameters. lr may differ by group
    and change in every step. Of weight_decay a method has one: a group has that, or 0.
    The parameters are float32 tensors in host memory. Moments are the library's: `state` stays empty,
    and state_dict() has them as one tensor of bytes.
    """

    def __init__(self, params: Any, lr: float, method: Optional[str] = None) -> None:
        """method: such as "lans(beta1=0.95)"; None: the job's."""
        self._begin(params, lr, None, lambda decay: method)

    def _begin(self, params: Any, lr: float, weight_decay: Optional[float],
               spec: Callable[[Optional[float]], Optional[str]]) -> None:
        """spec: makes the written method from the weight decay that the groups have."""
        self._spec = spec
        self._method: Optional[MethodState] = None
        self._decay = 0.0  # the method's
        self._waits: Optional[torch.Tensor] = None  # a state that came before the method
        self._pulled: Dict[torch.Tensor, Any] = {}  # handles, until they are used
        self._ids: Dict[torch.Tensor, int] = {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def __getstate__(self) -> Dict[str, Any]:
        raise invalid(f"a {type(self).__name__} can't be copied or pickled: make it anew and load its "
                      "state_dict()")

    @property
    def method_name(self) -> Optional[str]:
        """Such as "lans"; None: not known before it is distributed."""
        text = self._method.text() if self._method is not None else self._spec(None)
        return None if text is None else text.split("(")[0]

    @property
    def skipped_updates(self) -> int:
        """Tensors, over all steps, that were left alone because what was pulled is not finite."""
        return 0 if self._method is None else int(self._method.value("skipped"))

    # ---- What DistributedOptimizer calls ---------------------------------------------------------

    def open_method(self, client: Client) -> None:
        """Makes the method. Errors: NOT_FOUND, INVALID_ARGUMENT, with the reason."""
        decays = {group["weight_decay"] for group in self.param_groups} - {0, None}
        if len(decays) > 1:
            raise invalid(f"the groups have weight_decay {sorted(decays)}: {type(self).__name__} has "
                          "one for all, and groups without it have 0")
        method = MethodState(client, self._spec(decays.pop() if decays else None))
        self._method = method
        self._client = client
        self._ids = {}
        self._decay = method.value("weight_decay")
        self._needs_skip = bool(method.value("needs_skip"))
        self.freeze_step = int(method.value("freeze_step"))
        for group in self.param_groups:
            if group["weight_decay"] is None:
                group["weight_decay"] = self._decay
        self.defaults["weight_decay"] = self._decay

    def agree_on_method(self, prefix: str) -> None:
        """Collective. prefix: of names in the job. Errors: INVALID_ARGUMENT if rank 0's differs."""
        text = self._state().text()
        is_root = self._client.rank() == 0
        theirs = _ops.broadcast_text(f"{prefix}method", text if is_root else None, 0)
        if theirs != text:
            raise invalid(f"the method of rank {self._client.rank()} is {text}, that of rank 0 "
                          f"{theirs}: every rank makes the same")

    def check_member(self, name: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Errors: INVALID_ARGUMENT by name for what no method takes."""
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise invalid(f"parameter '{name}' is {str(parameter.dtype)[6:]} on {parameter.device}, "
                          f"expected float32 on cpu for {type(self).__name__}")
        self._check_group(group)

    def add_members(self, members: Iterable[Tuple[str, str, torch.Tensor]], group: Mapping[str, Any]
                    ) -> None:
        """Name, name in the job and parameter of each; they are declared."""
        for name, declared, parameter in members:
            number = self._client.tensors[declared].id
            self._state().add(number, name, group["weight_decay"] != 0)
            self._ids[parameter] = number
        self._skips = bool(self._client.value("filter_skips"))
        if self._waits is not None and len(self._ids) == self._num_trained():
            waits, self._waits = self._waits, None
            self._load(waits)

    def _num_trained(self) -> int:
        return sum(parameter.requires_grad for group in self.param_groups
                   for parameter in group["params"])

    def before_push(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """The gradient becomes what is pushed."""
        packed = gradient.detach().contiguous()
        self._state().send(self._ids[parameter], packed.data_ptr(), packed.numel())
        if packed.data_ptr() != gradient.data_ptr():
            gradient.detach().copy_(packed)

    def after_pull(self, parameter: torch.Tensor, pulled: torch.Tensor, handle: Any) -> None:
        """A push-pull is complete."""
        self._pulled[parameter] = handle
        if self._skips:
            # What the filter held back still has this rank's own numbers, and a norm over all of
            # .grad would differ by rank.
            flat = pulled.detach().contiguous().view(-1)
            end = 0
            for first, count in handle.active_ranges() + [(flat.numel(), 0)]:
                flat[end:first] = 0
                end = first + count
            if flat.data_ptr() != pulled.data_ptr():
                pulled.detach().copy_(flat.view(pulled.shape))

    def after_sending(self) -> None:
        """Everything of a step was pushed."""
        self._state().end_step()

    def drop_pulled(self) -> None:
        """What was averaged is not wanted."""
        for parameter in self._pulled:
            self._state().cancel(self._ids[parameter])
        self._pulled = {}

    # ---- An optimizer's own ----------------------------------------------------------------------

    def _state(self) -> MethodState:
        if self._method is None:
            raise invalid(f"{type(self).__name__} makes steps only behind DistributedOptimizer, which "
                          "pushes what the method makes of a gradient: give it to that")
        return self._method

    def _check_group(self, group: Mapping[str, Any]) -> None:
        _check_rate(group["lr"])
        if group["weight_decay"] not in (0, self._decay):
            raise invalid(f"a group has weight_decay {group['weight_decay']}, expected 0 or "
                          f"{self._decay:g}, which is the method's")

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Brings what was pulled into the parameters. A tensor of which it is not finite is left
        alone, on every rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._state()
        for group in self.param_groups:
            self._check_group(group)  # of all, before anything changes
        for group in self.param_groups:
            for parameter in group["params"]:
                handle = self._pulled.pop(parameter, None)
                if handle is None:
                    continue
                pulled = parameter.grad
                if pulled is None or not parameter.requires_grad or (
                        self._needs_skip and not pulled.any()):
                    state.cancel(self._ids[parameter])
                    continue
                pulled = pulled.contiguous()
                values = parameter.detach().contiguous()
                state.update(handle, pulled.data_ptr(), float(group["lr"]), values.data_ptr(),
                             values.numel())
                if values.data_ptr() != parameter.data_ptr():
                    parameter.copy_(values)
                else:
                    parameter.view(-1)[:0].zero_()  # autograd is told that it has changed
        return loss

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As torch.optim's. Whether weight decay applies to it stays as it is."""
        super().add_param_group(param_group)
        _check_rate(self.param_groups[-1]["lr"])

    def state_dict(self) -> Dict[str, Any]:
        """As torch.optim's, with the method's state under "method", a tensor of bytes. What a worker
        sends may depend on its own history, so each rank keeps its own."""
        result = super().state_dict()
        saved = self._waits
        if self._method is not None and saved is None:
            saved = torch.frombuffer(bytearray(self._method.save()), dtype=torch.uint8)
        result[_KEY] = saved
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what state_dict gave, before or after the optimizer is distributed.
        Errors: INVALID_ARGUMENT for the state of another optimizer, another method or other
        parameters, CORRUPT_DATA for damaged bytes."""
        if not isinstance(state_dict, Mapping) or _KEY not in state_dict:
            raise invalid(f"this is no state of a {type(self).__name__}: it lacks '{_KEY}'")
        saved = state_dict[_KEY]
        if self._method is None:
            self._waits = saved
        elif saved is not None:
            self._load(saved)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})

    def adopt_state(self, saved: Optional[torch.Tensor]) -> None:
        """Another rank's state of the method."""
        if saved is not None:
            self._load(saved)

    def _load(self, saved: Any) -> None:
        if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
            raise invalid(f"the state of the method is a {type(saved).__name__}, expected a tensor of "
                          "bytes")
        self._state().load(saved.cpu().numpy().tobytes())


def _check_rate(rate: Any) -> None:
    if not float(rate) >= 0:
        raise invalid(f"lr is {rate}, expected 0 or more")


def _betas(betas: Tuple[float, float]) -> Dict[str, float]:
    if len(betas) != 2:
        raise invalid(f"betas is {betas!r}, expected two numbers")
    return {"beta1": betas[0], "beta2": betas[1]}


class _Named(MethodOptimizer):
    """A method that is chosen by class."""

    _name = ""

    def _make(self, params: Any, lr: float, weight_decay: float, parameters: Dict[str, Any]) -> None:
        def spec(decay: Optional[float]) -> str:
            return _written(self._name, {**parameters, "weight_decay": decay or 0.0})

        self._begin(params, lr, weight_decay, spec)


class SGD(_Named):
    """SGD with momentum. With a strong compressor rather DistEFSGDM."""

    _name = "sgd"

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9,
                 weight_decay: float = 0.0) -> None:
        self.momentum = momentum  # what advise() looks at
        self._make(params, lr, weight_decay, {"momentum": momentum})


class DistEFSGDM(_Named):
    """SGD whose momentum is on the worker, before feedback (Zheng, Huang, Kwok 2019)."""

    _name = "dist_ef_sgdm"

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9,
                 weight_decay: float = 0.0) -> None:
        self._make(params, lr, weight_decay, {"momentum": momentum})


class AdamW(_Named):
    """Adam with decoupled weight decay. With a strong compressor rather OneBitAdam or CLAN."""

    _name = "adamw"

    def __init__(self, params: Any, lr: float = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, bias_correction: bool = True) -> None:
        self._make(params, lr, weight_decay,
                   {**_betas(betas), "eps": eps, "bias_correction": bias_correction})


class LAMB(_Named):
    """Adam's direction in the length of each tensor (You et al. 2020).

    norm_low, norm_high: between which the norm of a tensor counts; None: as it is.
    """

    _name = "lamb"

    def __init__(self, params: Any, lr: float = 0.01, betas: Tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, norm_low: Optional[float] = None,
                 norm_high: Optional[float] = None, bias_correction: bool = True) -> None:
        self._make(params, lr, weight_decay,
                   {**_betas(betas), "eps": eps, "norm_low": norm_low, "norm_high": norm_high,
                    "bias_correction": bias_correction})


class LANS(_Named):
    """LAMB on normalized gradients, with a second term (Zheng et al. 2020)."""

    _name = "lans"

    def __init__(self, params: Any, lr: float = 0.01, betas: Tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, norm_low: Optional[float] = None,
                 norm_high: Optional[float] = None) -> None:
        self._make(params, lr, weight_decay,
                   {**_betas(betas), "eps": eps, "norm_low": norm_low, "norm_high": norm_high})


class CLAN(LANS):
    """LANS behind two-way compression, which it wants (Zheng et al. 2021)."""

    _name = "clan"


class OneBitAdam(_Named):
    """Adam whose second moment is frozen after the warm-up; then momenta are sent (Tang et al. 2021).

    freeze_step: the first step after the warm-up; None: compression.warmup_steps, which it must be.
    """

    _name = "onebit_adam"

    def __init__(self, params: Any, lr: float = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, freeze_step: Optional[int] = None,
                 bias_correction: bool = True, v_floor: float = 0.1) -> None:
        self._make(params, lr, weight_decay,
                   {**_betas(betas), "eps": eps, "freeze_step": freeze_step,
                    "bias_correction": bias_correction, "v_floor": v_floor})


class OneBitLAMB(_Named):
    """LAMB whose second moment and trust ratio are frozen after the warm-up; then momenta are sent
    (Li et al. 2021). freeze_step as OneBitAdam."""

    _name = "onebit_lamb"

    def __init__(self, params: Any, lr: float = 0.01, betas: Tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-6, weight_decay: float = 0.01, freeze_step: Optional[int] = None,
                 norm_low: Optional[float] = None, norm_high: Optional[float] = None,
                 bias_correction: bool = True, v_floor: float = 0.1) -> None:
        self._make(params, lr, weight_decay,
                   {**_betas(betas), "eps": eps, "freeze_step": freeze_step, "norm_low": norm_low,
                    "norm_high": norm_high, "bias_correction": bias_correction, "v_floor": v_floor})


# By the method's name.
METHODS: Dict[str, Any] = {kind._name: kind for kind in
                           (SGD, DistEFSGDM, AdamW, LAMB, LANS, CLAN, OneBitAdam, OneBitLAMB)}
