"""Gradwire for Python: averages NumPy arrays over the workers of a job.

    import gradwire
    gradwire.init()
    gradwire.broadcast(weights, root=0, name="weights")
    for step in range(steps):
        gradient = gradwire.push_pull(compute_gradient(), name="weights")
        gradwire.end_step()
    gradwire.shutdown()

init, declare, broadcast, barrier and the first push_pull of a name are collective: every worker calls
them in the same order. All errors of a job are GradwireError.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any, Dict, Mapping, Optional, Union

import numpy

from . import _library
from ._changes import WatchCompression
from ._client import (AVERAGE, DTYPES, SUM, Code, Declaration, GradwireError, Handle, Memory, connect,
                      current, disconnect, encode, invalid, require, set_learning_rate,
                      set_loss_scale)

__all__ = [
    "Code", "GradwireError", "Handle", "barrier", "broadcast", "declare", "end_step", "init",
    "is_initialized", "load_state_dict", "local_rank", "local_size", "plan", "poll", "push_pull",
    "push_pull_async", "rank", "set_learning_rate", "set_loss_scale", "shutdown", "size", "state_dict",
    "stats", "synchronize", "version",
]

_NUMPY_DTYPES = tuple(name for name in DTYPES if name != "bfloat16")  # NumPy has no such
_STATE_VERSION = 2


def _is_packed(array: numpy.ndarray) -> bool:
    return bool(array.flags.c_contiguous and array.flags.aligned)


def _packed(array: numpy.ndarray) -> numpy.ndarray:
    return array if _is_packed(array) else array.copy(order="C")


def _check_array(array: Any, name: Optional[str], what: str) -> str:
    """The name, once both are usable."""
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f"{what} of {name!r} is a {type(array).__name__}, expected a numpy.ndarray")
    if name is None:
        raise invalid("a NumPy array has no name of its own: give name=..., the same on every "
                       "worker and in every round")
    encode(name, "a tensor's name")
    return name


def _check_dtype(dtype: numpy.dtype, name: str) -> None:
    if dtype.name not in _NUMPY_DTYPES:
        raise invalid(f"tensor '{name}' is {dtype.name}, expected one of {', '.join(_NUMPY_DTYPES)}")
    if not dtype.isnative:
        raise invalid(f"tensor '{name}' is {dtype.name} in the other byte order ('{dtype.str}'); "
                       "convert it first")


def version() -> str:
    """The library's version, such as "0.1.0"."""
    try:
        return _library.load().gradwire_version().decode()
    except _library.LibraryNotFound as error:
        raise GradwireError(Code.NOT_FOUND, str(error), exit_code=2) from None


def init(config: Union[str, "os.PathLike[str]", None] = None,
         settings: Optional[Mapping[str, Any]] = None, rank: Optional[int] = None) -> None:
    """Connects to the job's servers and waits until every process is there.

    config: the YAML file; None: GRADWIRE_CONFIG, else defaults and environment.
    settings: values over file and environment, as {"partition.bytes": "1MiB"}.
    rank: this worker's number; None: from the environment, as launchers set it.
    """
    if rank is not None and rank < 0:
        raise invalid(f"rank is {rank}, expected 0 or more", exit_code=2)
    texts = []
    for key, value in (settings or {}).items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        texts.append(f"{key}={value}")
    connect(None if config is None else os.fspath(config), texts, -1 if rank is None else int(rank))


def is_initialized() -> bool:
    """True between init and shutdown, in the process that called init."""
    client = current()
    return client is not None and client.process == os.getpid()


def shutdown() -> None:
    """Waits for what is in flight and says goodbye to the servers. Does nothing if there is no
    connection. A program that ends without it leaves the job too, but without word of errors."""
    disconnect()


def rank() -> int:
    """This worker's number, from 0."""
    return require().rank()


def size() -> int:
    """How many workers the job has."""
    return require().size()


def local_rank() -> int:
    """This worker's number on its host, as the launcher told; 0 if it did not."""
    client = require()
    return client.native.gradwire_local_rank(client.pointer())


def local_size() -> int:
    """How many workers the host has, as the launcher told; 1 if it did not."""
    client = require()
    return client.native.gradwire_local_size(client.pointer())


def declare(tensors: Mapping[str, Any], average: bool = True,
            priority: Union[int, Mapping[str, int], None] = None) -> None:
    """Declares tensors together, before their first use. Collective.

    tensors: name to an array, or to anything else with `shape` and `dtype`.
    priority: higher goes first; one for all, or by name. None: in the order of the mapping, front
        layers first.
    Small tensors that are declared together travel together: such a tensor leaves when all are
    there or at end_step, so push them with push_pull_async, call end_step, and then synchronize.
    """
    client = require()
    batch = []
    for name, tensor in tensors.items():
        encode(name, "a tensor's name")
        dtype = numpy.dtype(tensor.dtype)
        _check_dtype(dtype, name)
        own = priority.get(name) if isinstance(priority, Mapping) else priority
        batch.append(Declaration(name, tuple(int(n) for n in tensor.shape), dtype.name,
                                 AVERAGE if average else SUM, own))
    client.declare(batch)


def push_pull_async(array: numpy.ndarray, average: bool = True, name: Optional[str] = None, *,
                    priority: Optional[int] = None, out: Optional[numpy.ndarray] = None) -> Handle:
    """Begins what push_pull does and returns at once.

    Neither `array` nor `out` may be written to until the handle is synchronized (an array that is
    not contiguous is copied at once).
    """
    client = require()
    if isinstance(array, numpy.generic):
        array = numpy.asarray(array)  # one number, as mean() gives
    name = _check_array(array, name, "the array")
    _check_dtype(array.dtype, name)
    if out is not None:
        _check_array(out, name, "out")
        if out.shape != array.shape or out.dtype != array.dtype:
            raise invalid(f"tensor '{name}': out is {out.dtype.name} of shape {list(out.shape)}, "
                           f"expected {array.dtype.name} of {list(array.shape)}")
        if not out.flags.writeable:
            raise invalid(f"tensor '{name}': out can't be written to")
    source = _packed(array)
    if out is array:
        target = source
    elif out is None:
        target = out = numpy.zeros(array.shape, array.dtype)  # a filter may leave some as it is
    else:
        target = out if _is_packed(out) else numpy.array(out, order="C")

    def finish() -> None:
        if target is not out:
            out[...] = target

    tensor = Declaration(name, array.shape, array.dtype.name, AVERAGE if average else SUM, priority)
    return client.push_pull(tensor, Memory(source.ctypes.data, target.ctypes.data, source.nbytes,
                                           (source, target), out, finish))


def push_pull(array: numpy.ndarray, average: bool = True, name: Optional[str] = None, *,
              priority: Optional[int] = None, out: Optional[numpy.ndarray] = None
              ) -> numpy.ndarray:
    """The average (or sum) of every worker's `array`.

    name: which tensor it is, the same on every worker and in every round; the array itself may be
        another object each time. Its first use declares it, which is collective.
    out: where the result goes: None: a fresh array; `array` itself: in place.
    A round in which some worker's values are not finite gives NaN everywhere.
    """
    return synchronize(push_pull_async(array, average, name, priority=priority, out=out))


def poll(handle: Handle) -> bool:
    """True once synchronize would return at once."""
    return handle.poll()


def synchronize(handle: Handle, timeout: Optional[float] = None) -> numpy.ndarray:
    """Waits for the push-pull and returns its result.

    timeout: seconds; None: the job's own deadline (timeouts.stall_stop). A TIMEOUT of the caller's
        own, shorter deadline ends nothing: the handle can be synchronized again.
    """
    return handle.wait(timeout)


def end_step() -> None:
    """Ends a training step: what travels together and lacks members goes out without them. Call it
    once an iteration on every worker; phases such as the warm-up count these calls."""
    client = require()
    client.check(client.native.gradwire_end_step(client.pointer()))


def broadcast(array: numpy.ndarray, root: int = 0, name: Optional[str] = None) -> numpy.ndarray:
    """Copies worker root's `array` into everybody's, byte for byte, whatever the compression.
    Collective. Any dtype but object; returns `array`."""
    client = require()
    name = _check_array(array, name, "the array")
    if array.dtype.hasobject:
        raise invalid(f"broadcast '{name}': an array of Python objects ({array.dtype}) can't be sent")
    client.check_root(root, name)
    is_root = root == client.rank()
    if not is_root and not array.flags.writeable:
        raise invalid(f"broadcast '{name}': the array can't be written to on rank {client.rank()}")
    packed = array if _is_packed(array) and array.flags.writeable else array.copy(order="C")
    client.broadcast(name, packed.ctypes.data, packed.nbytes, root)
    if packed is not array and not is_root:
        array[...] = packed
    return array


def barrier() -> None:
    """Waits until every worker has called it. Collective."""
    client = require()
    client.check(client.native.gradwire_barrier(client.pointer()))


def state_dict() -> Dict[str, Any]:
    """What this worker must keep so that the job can go on after a restart: residuals of workers and
    servers, rounds and the step, and the plan. Collective, at the same step on every rank, while
    nothing is in flight. Each rank saves its own: {"version", "rank", "size", "plan", "state"}."""
    client = require()
    client.check_idle("state_dict")
    return {"version": _STATE_VERSION, "rank": rank(), "size": size(), "plan": plan(),
            "state": _read(client, client.native.gradwire_save_state)}


def _read(client: Client, function: Any) -> bytes:
    """What a function of the library writes that wants a buffer of the right size."""
    count = ctypes.c_size_t(0)
    buffer = ctypes.create_string_buffer(0)
    while True:
        status = function(client.pointer(), buffer, ctypes.byref(count))
        if status != Code.BUFFER_TOO_SMALL:
            break
        buffer = ctypes.create_string_buffer(count.value)
    client.check(status)
    return ctypes.string_at(buffer, count.value)


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Takes what state_dict gave on the same rank of a job of as many workers. Collective, while
    nothing is in flight, before or after tensors are declared.

    Residuals belong to tensors: another compressor takes them over if it has feedback, and rank 0
    warns of tensors that are compressed otherwise than they were.
    Errors: INVALID_ARGUMENT for what is no state of this version, or of another number of workers; the
    job may go on without it. CORRUPT_DATA for damaged bytes, INVALID_ARGUMENT for those of another
    rank or step; these end the job.
    """
    client = require()
    client.check_idle("load_state_dict")
    if not isinstance(state, Mapping):
        raise invalid(f"this is no state of gradwire but a {type(state).__name__}, expected what "
                      "state_dict() gave")
    if state.get("version", _STATE_VERSION) != _STATE_VERSION:
        raise invalid(f"the state has version {state['version']!r}, expected {_STATE_VERSION}: go on "
                      "without it, residuals begin at zero then")
    missing = [key for key in ("version", "rank", "size", "plan", "state") if key not in state]
    if missing:
        raise invalid(f"this is no state of gradwire: it lacks {', '.join(missing)}")
    if not isinstance(state["state"], bytes):
        raise invalid(f"the state is damaged: 'state' is a {type(state['state']).__name__}, expected "
                      "bytes")
    watch = WatchCompression(client, state["plan"], plan)
    client.check(client.native.gradwire_load_state(client.pointer(), state["state"],
                                                   len(state["state"])))
    watch.begin()


def plan() -> Dict[str, Any]:
    """What is sent together and how it is compressed, as declared so far: version, workers, servers,
    lanes and units. docs/python.md has the fields."""
    client = require()
    return json.loads(_read(client, client.native.gradwire_plan))


def stats() -> Dict[str, Union[int, float]]:
    """Counts since init: sent_bytes and received_bytes on the wire, raw_push_bytes and raw_pull_bytes
    at the tensors' own dtypes, nonfinite_units, resent_pushes, reconnects. And what compression is
    worth: compression_saves_ms and compression_costs_ms, each a step, and goodput, bytes a second.
    And how much communication computing can hide, means of the last 16 steps: step_ms, comm_ms,
    compute_ms, exposed_ms and ccr (docs/operations.md). And of the filter: interval, in how many
    steps a part is sent once (0 without a filter), held_back_units, held_back_nonfinite (elements
    that it left out)."""
    client = require()
    values = _library.Stats()
    client.check(client.native.gradwire_get_stats(client.pointer(), ctypes.byref(values)))
    known: Dict[str, Union[int, float]] = {
        name: getattr(values, name) for name, _ in _library.Stats._fields_}
    for name in ("compression_saves_ms", "compression_costs_ms", "goodput", "step_ms", "comm_ms",
                 "compute_ms", "exposed_ms", "ccr"):
        known[name] = client.value(name)
    for name in ("interval", "held_back_units", "held_back_nonfinite"):
        known[name] = int(client.value(name))
    return known
