"""Gradwire for PyTorch.

    import gradwire.torch as gradwire
    gradwire.init()
    optimizer = gradwire.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    gradwire.broadcast_parameters(model.state_dict(), root_rank=0)

Names and signatures are those of BytePS and Horovod; docs/torch.md says how they behave.
"""

from .. import (Code, GradwireError, barrier, init, is_initialized, load_state_dict, local_rank,
                local_size, plan, rank, set_learning_rate, set_loss_scale, shutdown, size, state_dict,
                stats, version)
from ._ddp_hook import DDPState, comm_hook
from ._methods import (CLAN, LAMB, LANS, SGD, AdamW, DistEFSGDM, MethodOptimizer, OneBitAdam,
                       OneBitLAMB)
from ._ops import (Compression, broadcast_optimizer_state, broadcast_parameters, declare, end_step,
                   poll, push_pull, push_pull_async, push_pull_async_inplace, push_pull_inplace,
                   synchronize)
from ._optimizer import DistributedOptimizer
from ._parallel import DistributedDataParallel

__all__ = [
    "AdamW", "CLAN", "Code", "Compression", "DDPState", "DistEFSGDM", "DistributedDataParallel",
    "DistributedOptimizer", "GradwireError", "LAMB", "LANS", "MethodOptimizer", "OneBitAdam",
    "OneBitLAMB", "SGD", "barrier", "broadcast_optimizer_state", "broadcast_parameters", "comm_hook",
    "declare", "end_step", "init", "is_initialized", "load_state_dict", "local_rank", "local_size",
    "plan", "poll", "push_pull", "push_pull_async", "push_pull_async_inplace", "push_pull_inplace",
    "rank", "set_learning_rate", "set_loss_scale", "shutdown", "size", "state_dict", "stats",
    "synchronize", "version",
]
