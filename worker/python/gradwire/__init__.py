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

import atexit
import ctypes
import enum
import os
import threading
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy

from . import _library

__all__ = [
    "Code", "GradwireError", "Handle", "barrier", "broadcast", "declare", "end_step", "init",
    "is_initialized", "load_state_dict", "local_rank", "local_size", "poll", "push_pull",
    "push_pull_async", "rank", "shutdown", "size", "state_dict", "stats", "synchronize", "version",
]

_DTYPES = {"float32": 1, "float16": 2, "float64": 4, "int8": 5, "uint8": 6, "int32": 7, "int64": 8}
_AVERAGE, _SUM = 1, 2
_STATE_VERSION = 1


class Code(enum.IntEnum):
    """What went wrong. The numbers are those of gradwire.h."""

    INVALID_ARGUMENT = 1
    CORRUPT_DATA = 2
    BUFFER_TOO_SMALL = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    TIMEOUT = 6
    INTERNAL = 7


class GradwireError(RuntimeError):
    """An error of Gradwire.

    code: a Code.
    exit_code: what a program that ends with it should exit with: 2 configuration, 3 not started in
        time, 4 stalled, 5 peer lost, else 1.
    """

    def __init__(self, code: Code, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_code

    def __reduce__(self) -> Tuple[Any, ...]:
        return (GradwireError, (self.code, str(self), self.exit_code))


def _invalid(message: str, exit_code: int = 1) -> GradwireError:
    return GradwireError(Code.INVALID_ARGUMENT, message, exit_code)


class _Declared(NamedTuple):
    id: int
    shape: Tuple[int, ...]
    dtype: numpy.dtype
    op: int


class Handle:
    """One push-pull under way; for poll and synchronize."""

    def __init__(self, client: "_Client", name: str, source: numpy.ndarray,
                 target: numpy.ndarray, out: numpy.ndarray) -> None:
        self.name = name
        self._client = client
        # The library reads and writes these until it is done; `out` is the caller's.
        self._source: Optional[numpy.ndarray] = source
        self._target: Optional[numpy.ndarray] = target
        self._out = out
        self._c_handle = _library.Handle()
        self._lock = threading.Lock()
        self._error: Optional[GradwireError] = None
        self._done = False

    def _complete(self, timeout_ms: int) -> None:
        """Waits and copies the result to where the caller wants it, once."""
        client = self._client
        client.check_process()
        with self._lock:
            if not self._done:
                status = client.native.gradwire_wait(client.pointer(), self._c_handle, timeout_ms)
                error = client.error_of(status)
                if error is not None and not client.is_complete(self):
                    raise error  # it can be waited for again
                if error is None and self._target is not self._out:
                    self._out[...] = self._target
                self._error = error
                self._done = True
                self._source = self._target = None
                client.forget(self)
        if self._error is not None:
            raise self._error


class _Client:
    """The connection of this process."""

    def __init__(self, config: Optional[str], settings: List[str], rank_: int) -> None:
        try:
            self.native = _library.load()
        except _library.LibraryNotFound as error:
            raise GradwireError(Code.NOT_FOUND, str(error), exit_code=2) from None
        self.process = os.getpid()
        self.tensors: Dict[str, _Declared] = {}
        self.pending: Dict[str, Handle] = {}
        self.lock = threading.Lock()  # one declaration at a time
        self._pointer: Optional[int] = None
        texts = (ctypes.c_char_p * len(settings))(*[_encode(text, "a setting") for text in settings])
        place = ctypes.c_void_p()
        path = None if config is None else os.fsencode(config)
        status = self.native.gradwire_init(path, texts, len(settings), rank_, ctypes.byref(place))
        self.check(status, started=False)
        self._pointer = place.value

    def pointer(self) -> int:
        if self._pointer is None:
            raise _invalid("the client is shut down")
        return self._pointer

    def check_process(self) -> None:
        """Before anything that locks: another thread may have held a lock at the fork."""
        if self.process != os.getpid():
            raise _invalid(
                f"gradwire.init was called in process {self.process}, and process {os.getpid()} was "
                "forked from it: connections and threads did not come along. Call gradwire in the "
                "process that called init; workers of a data loader need none")

    def error_of(self, status: int, started: bool = True) -> Optional[GradwireError]:
        if status == 0:
            return None
        text = self.native.gradwire_last_error().decode("utf-8", "replace")
        return GradwireError(Code(status), text,
                             self.native.gradwire_exit_code(status, int(started)))

    def check(self, status: int, started: bool = True) -> None:
        error = self.error_of(status, started)
        if error is not None:
            raise error

    def is_complete(self, handle: Handle) -> bool:
        return bool(self.native.gradwire_poll(self.pointer(), handle._c_handle))

    def forget(self, handle: Handle) -> None:
        if self.pending.get(handle.name) is handle:
            del self.pending[handle.name]

    def declare(self, batch: List[Tuple[str, Tuple[int, ...], numpy.dtype, int, Optional[int]]]
                ) -> None:
        """Name, shape, dtype, op and priority of each; those that are known must be the same."""
        with self.lock:
            fresh = []
            for name, shape, dtype, op, priority in batch:
                known = self.tensors.get(name)
                if known is None:
                    fresh.append((name, shape, dtype, op, priority))
                else:
                    _check_same(name, known, shape, dtype, op)
            if not fresh:
                return
            entries = (_library.Tensor * len(fresh))()
            ids = (ctypes.c_uint32 * len(fresh))()
            keep = []  # a structure doesn't hold what its pointers point to
            for i, (name, shape, dtype, op, priority) in enumerate(fresh):
                extents = (ctypes.c_uint64 * len(shape))(*shape)
                text = _encode(name, "a tensor's name")
                keep += [extents, text]
                if priority is None:
                    priority = -(len(self.tensors) + i)  # what is declared first goes first
                entries[i] = _library.Tensor(text, extents, len(shape), _DTYPES[dtype.name], op,
                                             priority)
            self.check(self.native.gradwire_declare(self.pointer(), entries, len(fresh), ids))
            for (name, shape, dtype, op, _), number in zip(fresh, ids):
                self.tensors[name] = _Declared(number, shape, dtype, op)

    def push_pull(self, name: str, array: numpy.ndarray, op: int, priority: Optional[int],
                  out: Optional[numpy.ndarray]) -> Handle:
        known = self.tensors.get(name)
        if known is None:
            self.declare([(name, array.shape, array.dtype, op, priority)])
            known = self.tensors[name]
        else:
            _check_same(name, known, array.shape, array.dtype, op)
        last = self.pending.get(name)
        if last is not None and self.is_complete(last):
            try:
                last._complete(-1)  # nobody has asked for its result yet
            except GradwireError:
                pass  # whoever asks later gets it
        is_in_place = out is array
        source = _packed(array)
        if out is None:
            out = numpy.empty(array.shape, array.dtype)
        if is_in_place:
            target = source
        else:
            target = out if _is_packed(out) else numpy.empty(out.shape, out.dtype)
        handle = Handle(self, name, source, target, out)
        status = self.native.gradwire_push_pull(
            self.pointer(), known.id, source.ctypes.data, target.ctypes.data, source.nbytes,
            ctypes.byref(handle._c_handle))
        self.check(status)
        self.pending[name] = handle
        return handle

    def close(self, orderly: bool) -> None:
        """Ends the connection; without order what is in flight is given up."""
        pointer, error = self.pointer(), None
        if orderly:
            error = self.error_of(self.native.gradwire_close(pointer))
            for handle in list(self.pending.values()):
                if self.is_complete(handle):
                    try:
                        handle._complete(-1)
                    except GradwireError:
                        pass  # whoever asks for it gets it
        self._pointer = None
        self.native.gradwire_free(pointer)
        if error is not None:
            # Something may still be read: these arrays are never given back then.
            _kept.extend(self.pending.values())
            raise error


_client: Optional[_Client] = None
_kept: List[Handle] = []


def _require() -> _Client:
    if _client is None:
        raise _invalid("gradwire is not initialized: call gradwire.init() first")
    _client.check_process()
    return _client


def _encode(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}, expected a str")
    if "\0" in text:
        raise _invalid(f"{what} has a zero byte in it: {text!r}")
    return text.encode("utf-8")


def _is_packed(array: numpy.ndarray) -> bool:
    return bool(array.flags.c_contiguous and array.flags.aligned)


def _packed(array: numpy.ndarray) -> numpy.ndarray:
    return array if _is_packed(array) else array.copy(order="C")


def _check_array(array: Any, name: Optional[str], what: str) -> str:
    """The name, once both are usable."""
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f"{what} of {name!r} is a {type(array).__name__}, expected a numpy.ndarray")
    if name is None:
        raise _invalid("a NumPy array has no name of its own: give name=..., the same on every "
                       "worker and in every round")
    _encode(name, "a tensor's name")
    return name


def _check_dtype(dtype: numpy.dtype, name: str) -> None:
    if dtype.name not in _DTYPES:
        raise _invalid(f"tensor '{name}' is {dtype.name}, expected one of {', '.join(_DTYPES)}")
    if not dtype.isnative:
        raise _invalid(f"tensor '{name}' is {dtype.name} in the other byte order ('{dtype.str}'); "
                       "convert it first")


def _check_same(name: str, known: _Declared, shape: Tuple[int, ...], dtype: numpy.dtype,
                op: int) -> None:
    if known.shape != shape:
        raise _invalid(f"tensor '{name}' has shape {list(shape)}, it was declared with "
                       f"{list(known.shape)}")
    if known.dtype != dtype:
        raise _invalid(f"tensor '{name}' is {dtype.name}, it was declared as {known.dtype.name}")
    if known.op != op:
        words = {_AVERAGE: "an average", _SUM: "a sum"}
        raise _invalid(f"tensor '{name}' is wanted as {words[op]}, it was declared as "
                       f"{words[known.op]}")


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
    global _client
    if _client is not None and _client.process == os.getpid():
        raise _invalid("gradwire is initialized already: call gradwire.shutdown() first")
    if rank is not None and rank < 0:
        raise _invalid(f"rank is {rank}, expected 0 or more", exit_code=2)
    texts = []
    for key, value in (settings or {}).items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        texts.append(f"{key}={value}")
    _client = _Client(None if config is None else os.fspath(config), texts,
                      -1 if rank is None else int(rank))


def is_initialized() -> bool:
    """True between init and shutdown, in the process that called init."""
    return _client is not None and _client.process == os.getpid()


def shutdown() -> None:
    """Waits for what is in flight and says goodbye to the servers. Does nothing if there is no
    connection. A program that ends without it leaves the job too, but without word of errors."""
    global _client
    if _client is None:
        return
    _client.check_process()
    client, _client = _client, None
    client.close(orderly=True)


@atexit.register
def _leave() -> None:
    global _client
    if _client is not None and _client.process == os.getpid():
        client, _client = _client, None
        client.close(orderly=False)


def rank() -> int:
    """This worker's number, from 0."""
    client = _require()
    return client.native.gradwire_rank(client.pointer())


def size() -> int:
    """How many workers the job has."""
    client = _require()
    return client.native.gradwire_size(client.pointer())


def local_rank() -> int:
    """This worker's number on its host, as the launcher told; 0 if it did not."""
    client = _require()
    return client.native.gradwire_local_rank(client.pointer())


def local_size() -> int:
    """How many workers the host has, as the launcher told; 1 if it did not."""
    client = _require()
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
    client = _require()
    batch = []
    for name, tensor in tensors.items():
        _encode(name, "a tensor's name")
        dtype = numpy.dtype(tensor.dtype)
        _check_dtype(dtype, name)
        own = priority.get(name) if isinstance(priority, Mapping) else priority
        batch.append((name, tuple(int(n) for n in tensor.shape), dtype,
                      _AVERAGE if average else _SUM, own))
    client.declare(batch)


def push_pull_async(array: numpy.ndarray, average: bool = True, name: Optional[str] = None, *,
                    priority: Optional[int] = None, out: Optional[numpy.ndarray] = None) -> Handle:
    """Begins what push_pull does and returns at once.

    Neither `array` nor `out` may be written to until the handle is synchronized (an array that is
    not contiguous is copied at once).
    """
    client = _require()
    if isinstance(array, numpy.generic):
        array = numpy.asarray(array)  # one number, as mean() gives
    name = _check_array(array, name, "the array")
    _check_dtype(array.dtype, name)
    if out is not None:
        _check_array(out, name, "out")
        if out.shape != array.shape or out.dtype != array.dtype:
            raise _invalid(f"tensor '{name}': out is {out.dtype.name} of shape {list(out.shape)}, "
                           f"expected {array.dtype.name} of {list(array.shape)}")
        if not out.flags.writeable:
            raise _invalid(f"tensor '{name}': out can't be written to")
    return client.push_pull(name, array, _AVERAGE if average else _SUM, priority, out)


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
    client = handle._client
    client.check_process()
    return handle._done or client.is_complete(handle)


def synchronize(handle: Handle, timeout: Optional[float] = None) -> numpy.ndarray:
    """Waits for the push-pull and returns its result.

    timeout: seconds; None: the job's own deadline (timeouts.stall_stop). A TIMEOUT of the caller's
        own, shorter deadline ends nothing: the handle can be synchronized again.
    """
    handle._complete(-1 if timeout is None else max(0, int(timeout * 1000)))
    return handle._out


def end_step() -> None:
    """Ends a training step: what travels together and lacks members goes out without them. Call it
    once an iteration on every worker; phases such as the warm-up count these calls."""
    client = _require()
    client.check(client.native.gradwire_end_step(client.pointer()))


def broadcast(array: numpy.ndarray, root: int = 0, name: Optional[str] = None) -> numpy.ndarray:
    """Copies worker root's `array` into everybody's, byte for byte, whatever the compression.
    Collective. Any dtype but object; returns `array`."""
    client = _require()
    name = _check_array(array, name, "the array")
    if array.dtype.hasobject:
        raise _invalid(f"broadcast '{name}': an array of Python objects ({array.dtype}) can't be sent")
    if not 0 <= root < size():
        raise _invalid(f"broadcast '{name}': root is {root}, the job has {size()} workers")
    is_root = root == rank()
    if not is_root and not array.flags.writeable:
        raise _invalid(f"broadcast '{name}': the array can't be written to on rank {rank()}")
    packed = array if _is_packed(array) and array.flags.writeable else array.copy(order="C")
    client.check(client.native.gradwire_broadcast(
        client.pointer(), _encode(name, "a broadcast's name"), packed.ctypes.data, packed.nbytes,
        root))
    if packed is not array and not is_root:
        array[...] = packed
    return array


def barrier() -> None:
    """Waits until every worker has called it. Collective."""
    client = _require()
    client.check(client.native.gradwire_barrier(client.pointer()))


def state_dict() -> Dict[str, Any]:
    """What this worker must keep to go on after a restart: its residuals. Each rank saves its own,
    while nothing is in flight."""
    client = _require()
    _check_idle(client, "state_dict")
    count = ctypes.c_size_t(0)
    buffer = ctypes.create_string_buffer(0)
    while True:
        status = client.native.gradwire_save_state(client.pointer(), buffer, ctypes.byref(count))
        if status != Code.BUFFER_TOO_SMALL:
            break
        buffer = ctypes.create_string_buffer(count.value)
    client.check(status)
    return {"version": _STATE_VERSION, "rank": rank(), "size": size(),
            "residuals": ctypes.string_at(buffer, count.value)}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Takes what state_dict of the same rank gave, while nothing is in flight."""
    client = _require()
    _check_idle(client, "load_state_dict")
    missing = [key for key in ("version", "rank", "size", "residuals") if key not in state]
    if missing:
        raise _invalid(f"this is no state of gradwire: it lacks {', '.join(missing)}")
    if state["version"] != _STATE_VERSION:
        raise _invalid(f"the state has version {state['version']}, expected {_STATE_VERSION}")
    if (state["rank"], state["size"]) != (rank(), size()):
        raise _invalid(f"the state is of rank {state['rank']} of {state['size']}, this is rank "
                       f"{rank()} of {size()}")
    residuals = bytes(state["residuals"])
    client.check(client.native.gradwire_load_state(client.pointer(), residuals, len(residuals)))


def _check_idle(client: _Client, what: str) -> None:
    for handle in list(client.pending.values()):
        if not client.is_complete(handle):
            raise _invalid(f"{what} while tensor '{handle.name}' is in flight: synchronize it first")


def stats() -> Dict[str, int]:
    """Counts since init: sent_bytes and received_bytes on the wire, raw_push_bytes and raw_pull_bytes
    at the tensors' own dtypes, nonfinite_units, resent_pushes, reconnects."""
    client = _require()
    values = _library.Stats()
    client.check(client.native.gradwire_get_stats(client.pointer(), ctypes.byref(values)))
    return {name: getattr(values, name) for name, _ in _library.Stats._fields_}
