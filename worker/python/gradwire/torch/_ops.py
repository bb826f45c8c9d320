"""Push-pull, broadcast and declaration of torch tensors, with the names that BytePS gave them."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Union

import torch

from .. import _client, end_step as _end_step
from .._client import Client, Declaration, Handle, Memory, invalid, require
from .._client import set_learning_rate, set_loss_scale  # the optimizer's
from ._staging import existing_staging, staging_of

_DTYPES = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.float64: "float64", torch.int8: "int8", torch.uint8: "uint8", torch.int32: "int32",
    torch.int64: "int64",
}


class _NoCompression:
    """The tensor travels in its own dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor


class _FP16Compression:
    """Floating point tensors are handed over as float16 and come back in their own dtype. The
    settings under `compression` in the YAML do the same and more, with error feedback."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.dtype != torch.float16:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class Compression:
    """What a tensor is cast to before it is handed over; the real compression is configured in YAML."""

    none = _NoCompression
    fp16 = _FP16Compression


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """The tensor's dtype as Gradwire calls it, or an error that names the tensor."""
    if tensor.layout != torch.strided:
        raise invalid(f"tensor '{name}' is sparse ({tensor.layout}): only dense tensors are averaged; "
                      "give the layer sparse=False, or call to_dense() first")
    known = _DTYPES.get(tensor.dtype)
    if known is None:
        expected = ", ".join(str(dtype) for dtype in _DTYPES)
        raise invalid(f"tensor '{name}' is {tensor.dtype}, expected one of {expected}")
    return known


def host_pointer(tensor: torch.Tensor, name: str) -> int:
    """The address of a packed tensor in host memory. The one place where an address is taken: what
    lives on a device never gets past it."""
    if tensor.device.type != "cpu":
        raise invalid(f"tensor '{name}' is on {tensor.device}, expected cpu")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise invalid(f"tensor '{name}' is not packed in memory")
    return tensor.data_ptr()


def declaration(tensor: torch.Tensor, name: str, average: bool, priority: Optional[int]
                ) -> Declaration:
    """What servers and other workers are told of the tensor."""
    _client.encode(name, "a tensor's name")
    return Declaration(name, tuple(tensor.shape), dtype_name(tensor, name),
                       _client.AVERAGE if average else _client.SUM, priority)


def _is_packed(tensor: torch.Tensor) -> bool:
    # What is lazily negated is not what lies in memory.
    return tensor.is_contiguous() and not tensor.is_neg()


def check_tensor(tensor: Any, name: Optional[str]) -> str:
    """The name, once both can be pushed."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"what is pushed as {name!r} is a {type(tensor).__name__}, expected a "
                        "torch.Tensor")
    if name is None:
        raise invalid("the tensor needs a name: give name=..., the same on every worker and in every "
                      "round")
    dtype_name(tensor, name)
    return name


def refuse_skip(client: Client) -> None:
    """An optimizer that knows nothing of the filter would take what is left in a gradient for one.
    Once something is declared."""
    if client.value("filter_skips"):
        raise invalid("compression.filter.inactive is skip, which gradwire.torch does not support: "
                      "what is held back would keep this worker's own gradient, and the optimizers "
                      "would use it; expected zero_fill, or an optimizer of a method such as LANS")


def begin(client: Client, tensor: torch.Tensor, declared: Declaration, out: torch.Tensor) -> Handle:
    """Begins the push-pull of `tensor` into `out`, of the same shape and dtype on the CPU (or the
    same tensor). What is not packed is copied."""
    source = tensor if _is_packed(tensor) else tensor.resolve_neg().contiguous()
    if out is tensor:
        target = source
    else:
        target = out if _is_packed(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    finish = None
    if target is not out:
        def finish() -> None:
            with torch.no_grad():
                out.copy_(target)
    name = declared.name
    memory = Memory(host_pointer(source, name), host_pointer(target, name),
                    source.numel() * source.element_size(), (source, target), out, finish)
    # Only now: a tensor that cannot be pushed leaves its name free.
    if declared.name not in client.tensors:
        client.declare([declared])
        refuse_skip(client)
    return client.push_pull(declared, memory)


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether it travels through pinned host memory."""
    return tensor.device.type == "cuda"


def _begin_staged(client: Client, tensor: torch.Tensor, declared: Declaration, out: torch.Tensor
                  ) -> Any:
    # Collective, so not when the copy happens to end.
    client.declare([declared])
    refuse_skip(client)

    def begin_on_host(host_in: torch.Tensor, host_out: torch.Tensor) -> Handle:
        return begin(client, host_in, declared, host_out)

    return staging_of(client).push(declared.name, tensor, out, begin_on_host)


def end_step() -> None:
    """As gradwire.end_step, after the tensors of a device that were pushed before. An error of the
    job is then raised by the next call that needs it."""
    client = require()
    staging = existing_staging(client)
    if staging is None:
        _end_step()
    else:
        staging.in_order(lambda: client.check(client.native.gradwire_end_step(client.pointer())))


def push_pull_async_inplace(tensor: torch.Tensor, average: bool = True, name: Optional[str] = None,
                            version: int = 0, priority: Optional[int] = None,
                            compression: Any = Compression.none) -> "Pushed":
    """Begins to replace `tensor` by its average (or sum) over all workers and returns at once.

    The tensor may be neither read nor written until the handle is synchronized.
    name: which tensor it is, the same on every worker and in every round; its first use declares it,
        which is collective. priority: higher goes first; counts in the first use.
    version: taken for compatibility; rounds are counted by the library.
    """
    return _push(tensor, tensor, average, check_tensor(tensor, name), priority, compression)


def push_pull_async(tensor: torch.Tensor, average: bool = True, name: Optional[str] = None,
                    version: int = 0, priority: Optional[int] = None,
                    compression: Any = Compression.none) -> "Pushed":
    """As push_pull_async_inplace, with the result in a fresh tensor."""
    name = check_tensor(tensor, name)
    return _push(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format,
                                          requires_grad=False), average, name, priority, compression)


def push_pull(tensor: torch.Tensor, average: bool = True, name: Optional[str] = None,
              version: int = 0, priority: Optional[int] = None,
              compression: Any = Compression.none) -> torch.Tensor:
    """The average (or sum) of every worker's `tensor`, in a fresh tensor."""
    return synchronize(push_pull_async(tensor, average, name, version, priority, compression))


def push_pull_inplace(tensor: torch.Tensor, average: bool = True, name: Optional[str] = None,
                      version: int = 0, priority: Optional[int] = None,
                      compression: Any = Compression.none) -> torch.Tensor:
    """Replaces `tensor` by its average (or sum) over all workers."""
    return synchronize(push_pull_async_inplace(tensor, average, name, version, priority, compression))


class Pushed:
    """A push-pull of a torch tensor under way; for poll and synchronize."""

    __slots__ = ("name", "_handle", "_out", "_cast", "_context", "_compression")

    def __init__(self, name: str, handle: Any, out: torch.Tensor, cast: Optional[torch.Tensor],
                 context: Any, compression: Any) -> None:
        self.name = name
        self._handle = handle
        self._out = out
        self._cast = cast  # where the result is, in the dtype that travels; None: in `out`
        self._context = context
        self._compression = compression

    @property
    def nonfinite(self) -> bool:
        """Once it is synchronized: as gradwire.Handle."""
        return self._handle.nonfinite

    @property
    def nonfinite_ranks(self) -> Tuple[int, ...]:
        """Once it is synchronized: as gradwire.Handle."""
        return self._handle.nonfinite_ranks

    @property
    def of_client(self) -> Any:
        """The gradwire.Handle, of a tensor in host memory."""
        return self._handle

    def poll(self) -> bool:
        """True once synchronize would return at once."""
        return self._handle.poll()

    def wait(self, timeout: Optional[float] = None) -> torch.Tensor:
        """Waits for the result and gives it. Errors and timeout as gradwire.synchronize."""
        self._handle.wait(timeout)
        if self._cast is not None:
            with torch.no_grad():
                self._out.copy_(self._compression.decompress(self._cast, self._context))
            self._cast = None
        return self._out


def _push(tensor: torch.Tensor, out: torch.Tensor, average: bool, name: str,
          priority: Optional[int], compression: Any) -> Pushed:
    in_place = out is tensor
    tensor = tensor.detach()
    out = tensor if in_place else out.detach()
    sent, context = compression.compress(tensor)
    cast = None if sent is tensor else sent
    place = out if cast is None else cast
    client = require()
    declared = declaration(sent, name, average, priority)
    if is_staged(sent):
        handle = _begin_staged(client, sent, declared, place)
    else:
        staging = existing_staging(client)
        if staging is not None:
            staging.wait_for_calls()  # this may be of a step later
        handle = begin(client, sent, declared, place)
    return Pushed(name, handle, out, cast, context, compression)


def poll(handle: Pushed) -> bool:
    """True once synchronize would return at once."""
    return handle.poll()


def synchronize(handle: Pushed, timeout: Optional[float] = None) -> torch.Tensor:
    """Waits for the push-pull and returns its result.

    timeout: seconds; None: the job's own deadline (timeouts.stall_stop). A TIMEOUT of the caller's
        own, shorter deadline ends nothing: the handle can be synchronized again.
    """
    return handle.wait(timeout)


def declare(tensors: Mapping[str, torch.Tensor], average: bool = True,
            priority: Union[int, Mapping[str, int], None] = None) -> None:
    """Declares tensors together, before their first use. Collective. As gradwire.declare."""
    declare_all(tensors, average, priority)
    refuse_skip(require())


def declare_all(tensors: Mapping[str, torch.Tensor], average: bool = True,
                priority: Union[int, Mapping[str, int], None] = None) -> None:
    """declare, for who knows what the filter leaves in a gradient."""
    batch = []
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
        own = priority.get(name) if isinstance(priority, Mapping) else priority
        batch.append(declaration(tensor, name, average, own))
    require().declare(batch)


# --- broadcast -----------------------------------------------------------------------------------

_MOST_TEXT = 1 << 28


def broadcast_text(name: str, text: Optional[str], root: int) -> str:
    """Copies the root's text to all."""
    client = require()
    length = torch.tensor([0 if text is None else len(text.encode())], dtype=torch.int64)
    client.broadcast(f"{name}.length", host_pointer(length, name), 8, root)
    count = int(length[0])
    if not 0 <= count <= _MOST_TEXT:
        raise invalid(f"broadcast '{name}': a description of {count} bytes, expected at most "
                      f"{_MOST_TEXT}")
    if count == 0:
        return ""
    # What a name stands for keeps its size, and later texts may be longer or shorter.
    room = 1 << max(12, (count - 1).bit_length())
    data = torch.zeros(room, dtype=torch.uint8)
    if text is not None:
        data[:count] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    client.broadcast(f"{name}.text.{room}", host_pointer(data, name), room, root)
    return bytes(data[:count].numpy().tobytes()).decode()


def _broadcast_tensor(name: str, tensor: torch.Tensor, root: int) -> None:
    """Copies the root's tensor into everybody's, byte for byte; any dtype, any device."""
    if tensor.layout != torch.strided:
        raise invalid(f"broadcast '{name}': a sparse tensor ({tensor.layout}) can't be sent")
    client = require()
    with torch.no_grad():
        host = tensor.detach()
        if host.device.type == "meta":
            raise invalid(f"broadcast '{name}': the tensor is on {host.device} and has no values")
        if host.device.type != "cpu" or not _is_packed(host) or host.is_conj():
            host = host.cpu().resolve_conj().resolve_neg().contiguous()
        num_bytes = host.numel() * host.element_size()
        if num_bytes > 0:
            client.broadcast(name, host_pointer(host, name), num_bytes, root)
        if host.data_ptr() != tensor.data_ptr() and client.rank() != root:
            tensor.detach().copy_(host)


def _describe(tensor: torch.Tensor) -> Dict[str, Any]:
    return {"dtype": str(tensor.dtype).replace("torch.", ""), "shape": list(tensor.shape)}


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str = "Parameter.") -> None:
    """Copies worker `root_rank`'s tensors into everybody's, byte for byte, whatever the compression.
    Collective.

    params: a state_dict, or pairs (name, tensor) such as model.named_parameters(). What is no tensor
        is left alone. Buffers count too: give model.state_dict() to have them.
    """
    pairs = list(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"broadcast_parameters wants pairs of name and tensor, got {pair!r:.80}")
        if isinstance(pair[1], torch.Tensor):
            tensors.append(pair)
    client = require()
    client.check_root(root_rank, prefix)
    own = [[name, _describe(tensor)] for name, tensor in tensors]
    text = json.dumps(own) if client.rank() == root_rank else None
    theirs = json.loads(broadcast_text(f"{prefix}list", text, root_rank))
    _check_same_list(own, theirs, root_rank, client.rank())
    for name, tensor in tensors:
        _broadcast_tensor(prefix + name, tensor, root_rank)


def _check_same_list(own: List[Any], theirs: List[Any], root: int, rank: int) -> None:
    for mine, other in zip(own, theirs):
        if mine != other:
            raise invalid(f"rank {rank} has {_say(mine)} where rank {root} has {_say(other)}: every "
                          "worker broadcasts the same tensors in the same order")
    if len(own) != len(theirs):
        raise invalid(f"rank {rank} broadcasts {len(own)} tensors, rank {root} {len(theirs)}")


def _say(entry: Any) -> str:
    name, what = entry
    return f"'{name}' ({what['dtype']} {what['shape']})"


def _pack(value: Any, where: str, tensors: List[torch.Tensor]) -> Any:
    """A value as JSON that keeps its Python type; tensors are put aside."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": _describe(value), "host": value.device.type == "cpu"}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__ if type(value) in (list, tuple) else "list":
                [_pack(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[_pack(key, where, tensors), _pack(item, f"{where}.{key}", tensors)]
                         for key, item in value.items()]}
    if hasattr(value, "item") and callable(value.item):  # a NumPy scalar
        return _pack(value.item(), where, tensors)
    raise invalid(f"broadcast_optimizer_state: {where} is a {type(value).__name__}, which can't be "
                  "sent; expected numbers, texts, tensors and lists or dicts of them")


def _unpack(packed: Any, tensors: List[torch.Tensor], hosts: List[bool]) -> Any:
    """What _pack wrote; tensors are made empty and listed, to be filled."""
    if packed is None or isinstance(packed, (bool, str)):
        return packed
    if "tensor" in packed:
        dtype = getattr(torch, packed["tensor"]["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise invalid(f"broadcast_optimizer_state: unknown dtype {packed['tensor']['dtype']!r}")
        tensors.append(torch.empty(packed["tensor"]["shape"], dtype=dtype))
        hosts.append(bool(packed["host"]))
        return tensors[-1]
    (kind, value), = packed.items()
    if kind == "int":
        return int(value)
    if kind == "float":
        return float.fromhex(value)
    if kind in ("list", "tuple"):
        items = [_unpack(item, tensors, hosts) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_unpack(key, tensors, hosts): _unpack(item, tensors, hosts) for key, item in value}
    raise invalid(f"broadcast_optimizer_state: unknown kind {kind!r}")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0,
                              prefix: str = "Parameter.") -> None:
    """Copies worker `root_rank`'s optimizer state and options (learning rates, betas, counters,
    moments) to all, exactly and with their types. Collective. No code travels: numbers, texts,
    tensors and lists or dicts of them do."""
    client = require()
    name = f"{prefix}optimizer"
    client.check_root(root_rank, name)
    is_root = client.rank() == root_rank
    own = optimizer.state_dict()
    tensors: List[torch.Tensor] = []
    hosts: List[bool] = []
    text = None
    if is_root:
        text = json.dumps(_pack({"type": type(optimizer).__name__, **own}, "state", tensors))
    text = broadcast_text(name, text, root_rank)
    if is_root:
        for i, tensor in enumerate(tensors):
            _broadcast_tensor(f"{name}.{i}", tensor, root_rank)
        return
    theirs = _unpack(json.loads(text), tensors, hosts)
    problem = _difference(optimizer, own, theirs)
    if problem:
        raise invalid(f"broadcast_optimizer_state: rank {client.rank()} {problem}, unlike rank "
                      f"{root_rank}")
    for i, tensor in enumerate(tensors):
        _broadcast_tensor(f"{name}.{i}", tensor, root_rank)
    _adopt(optimizer, theirs, {id(tensor): host for tensor, host in zip(tensors, hosts)})


def _difference(optimizer: torch.optim.Optimizer, own: Dict[str, Any], theirs: Dict[str, Any]) -> str:
    if theirs["type"] != type(optimizer).__name__:
        return f"has a {type(optimizer).__name__} and not a {theirs['type']}"
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (own, theirs)]
    if sizes[0] != sizes[1]:
        return f"has groups of {sizes[0]} parameters and not of {sizes[1]}"
    return ""


def _adopt(optimizer: torch.optim.Optimizer, theirs: Dict[str, Any], on_host: Dict[int, bool]) -> None:
    """Not by load_state_dict, which casts states to their parameter's dtype."""
    params = {}
    for group, other in zip(optimizer.param_groups, theirs["param_groups"]):
        params.update(zip(other["params"], group["params"]))
        for key in set(group) - set(other):
            del group[key]
        group.update({key: value for key, value in other.items() if key != "params"})

    def place(value: Any, param: Optional[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            stays = param is None or on_host[id(value)]
            return value if stays else value.to(param.device)
        if isinstance(value, dict):
            return {key: place(item, param) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(place(item, param) for item in value)
        return value

    if "method" in theirs:
        optimizer.adopt_state(theirs["method"])  # type: ignore[attr-defined]
    optimizer.state.clear()
    for key, value in theirs["state"].items():
        param = params.get(key)
        optimizer.state[key if param is None else param] = place(value, param)
