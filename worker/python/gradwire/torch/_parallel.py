"""DistributedDataParallel: a module whose gradients are averaged when backward() returns."""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Sequence

import torch

from .. import rank
from .._client import invalid
from . import _ops
from ._gradients import GradientExchange, check_module, check_parameter


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that any optimizer trains it on all workers.

    At construction everybody takes over rank 0's parameters and buffers. When backward() returns,
    .grad has the averages over all workers; a parameter without a gradient on this rank counts as
    zeros. Collective, as is every backward() that reaches the module.
    state_dict and load_state_dict are the module's own, without a prefix.
    """

    def __init__(self, module: torch.nn.Module, device_ids: Optional[Sequence[Any]] = None,
                 broadcast_buffers: bool = True, compression: Any = _ops.Compression.none) -> None:
        """device_ids: one device at most, where the module is already.
        broadcast_buffers: whether rank 0's buffers go to all before each forward pass in training.
        compression: Compression.none or Compression.fp16, before what the job's configuration does.
        Errors: INVALID_ARGUMENT for a parameter that can't be averaged, by name.
        """
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel: got a {type(module).__name__}, expected a "
                            "torch.nn.Module")
        if device_ids is not None and len(device_ids) > 1:
            raise invalid(f"device_ids is {list(device_ids)}, expected one device at most: start one "
                          "process for each")
        check_module(module, "DistributedDataParallel", compiled=True)
        named = [(name, parameter, -i)
                 for i, (name, parameter) in enumerate(module.named_parameters())]
        for name, parameter, _ in named:
            check_parameter(name, parameter)
        trained = [entry for entry in named if entry[1].requires_grad]
        if not trained:
            raise invalid("DistributedDataParallel: the module has no parameter that requires a "
                          "gradient, so it needs no wrapper")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._exchange = GradientExchange("DistributedDataParallel", compression,
                                          arrived=self._on_gradient)
        self._is_queued = False
        self._exchange.add(0, trained)
        everything: Dict[str, torch.Tensor] = {name: parameter for name, parameter, _ in named}
        everything.update(module.named_buffers())
        _ops.broadcast_parameters(everything, 0, prefix=self._exchange.prefix + "start.")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if (self.broadcast_buffers and self.training and torch.is_grad_enabled()
                and not self._exchange.paused):
            self._broadcast_buffers()
        return self.module(*inputs, **named)

    def no_sync(self) -> Any:
        """A context in which the gradients of backward passes add up on this rank; the next backward
        pass outside hands over the sums."""
        return self._exchange.no_sync()

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*arguments, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise invalid("a DistributedDataParallel can't be copied or pickled, since its gradients have "
                      "names in the job: save or copy its module")

    def _broadcast_buffers(self) -> None:
        """All buffers of a dtype in one broadcast."""
        by_dtype: Dict[torch.dtype, List[torch.Tensor]] = {}
        for buffer in self.module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            packed = {str(dtype)[6:]: torch.cat([buffer.reshape(-1) for buffer in buffers])
                      for dtype, buffers in by_dtype.items()}
            for dtype, flat in packed.items():
                _ops._broadcast_tensor(f"{self._exchange.prefix}buffers.{dtype}", flat, 0)
            if rank() == 0:
                return
            for flat, buffers in zip(packed.values(), by_dtype.values()):
                for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
                    buffer.copy_(part.view(buffer.shape))

    def _on_gradient(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            this = weakref.ref(self)

            def finish() -> None:
                wrapper = this()
                if wrapper is not None:
                    wrapper._finish()

            # Runs when this backward pass has nothing left to do, before backward() returns.
            torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _finish(self) -> None:
        self._is_queued = False
        exchange = self._exchange
        exchange.send_rest()
        exchange.receive_all()
        exchange.reset()
        if exchange.void:
            exchange.warn_of_void(exchange.void, "these gradients are NaN on every rank")
