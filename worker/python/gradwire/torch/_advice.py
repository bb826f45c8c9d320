"""A word on optimizers and compressors that are known not to go well together."""

from __future__ import annotations

import re
import warnings
from typing import Any, Collection, Mapping, Optional

import torch

# Optimizers that divide by a running mean of squared gradients, by the names of their classes and of
# those they are made from: AdamW, FusedAdam, DistributedLamb, ...
_ADAPTIVE = re.compile(
    r"adam|lamb|lans|rmsprop|adagrad|adadelta|adafactor|adabelief|novograd|yogi", re.IGNORECASE)
# Methods of gradwire that are made to go with such compressors.
_FOR_COMPRESSION = ("lans", "clan", "dist_ef_sgdm", "onebit_adam", "onebit_lamb")
# Rounding: biased by less than training notices.
_ROUNDING = ("fp16", "bf16")
# Momentum for which a loss of accuracy with onebit is measured (docs/results/accuracy.md).
_LONG_MOMENTUM = 0.9


def advise(optimizer: torch.optim.Optimizer, plan: Mapping[str, Any], names: Collection[str]
           ) -> None:
    """Warns if the compression that the plan has for the tensors `names` in the end is known to harm
    training with this optimizer.

    plan: as gradwire.plan() gives it.
    """
    text = advice(optimizer, plan, names)
    if text is not None:
        warnings.warn(text, UserWarning, stacklevel=3)


def advice(optimizer: torch.optim.Optimizer, plan: Mapping[str, Any], names: Collection[str]
           ) -> Optional[str]:
    """What advise() warns of, or None."""
    biased = _biased_compressors(plan, names)
    if not biased:
        return None
    method = getattr(optimizer, "method_name", None)
    if method in _FOR_COMPRESSION:
        return None
    kind = type(optimizer).__name__ if method is None else method
    # "topk(ratio=0.01) for 'Gradient.fc.weight' and 3 more tensors"
    compressor, tensors = next(iter(biased.items()))
    where = f"{compressor} for '{tensors[0]}'"
    if len(tensors) > 1:
        where += f" and {len(tensors) - 1} more tensor{'s' if len(tensors) > 2 else ''}"
    if _ADAPTIVE.search(kind) or any(_ADAPTIVE.search(base.__name__)
                                     for base in type(optimizer).__mro__):
        return (f"{kind} with {where}: what a biased compressor leaves out comes in later steps (error "
                "feedback), which is shown to converge for SGD; an optimizer that divides by a mean of "
                "squared gradients sees squares of distorted ones. Adam was measured to lose about "
                "a point of accuracy so, and nothing with configs/adam.yaml (docs/results/torch.md)")
    momentum = max((group.get("momentum", 0) for group in optimizer.param_groups), default=0)
    momentum = max(momentum, getattr(optimizer, "momentum", 0))  # of a method, which has one for all
    onebit = [name for name in biased if name.startswith("onebit")]
    if onebit and momentum >= _LONG_MOMENTUM:
        return (f"{kind} with momentum {momentum:g} and {onebit[0]}: a multilayer perceptron was measured "
                "to lose 1.6 points of accuracy so, and to diverge at larger rates; with momentum 0.5 "
                "and five times the learning rate it lost 0.2 (configs/sgd.yaml, "
                "docs/results/accuracy.md). To keep the momentum, use configs/sgd_momentum.yaml")
    return None


def _biased_compressors(plan: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Compressor, in its written form, to those of the tensors that go through it, either way, once
    warm-up is over."""
    wanted = set(names)
    found: dict = {}
    for unit in plan["units"]:
        steady = unit["phases"][-1]
        for direction in ("uplink", "downlink"):
            compressor = steady[direction]
            if (steady[f"{direction}_class"] in ("exact", "unbiased")
                    or compressor.split("(")[0] in _ROUNDING):
                continue
            for member in unit["members"]:
                tensors = found.setdefault(compressor, [])
                if member["tensor"] in wanted and member["tensor"] not in tensors:
                    tensors.append(member["tensor"])
    return {compressor: tensors for compressor, tensors in found.items() if tensors}
