"""The connection of this process, for whatever holds numbers: NumPy arrays, torch tensors."""

from __future__ import annotations

import atexit
import ctypes
import enum
import os
import threading
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from . import _library

DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4, "int8": 5, "uint8": 6,
          "int32": 7, "int64": 8}
AVERAGE, SUM = 1, 2


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


def invalid(message: str, exit_code: int = 1) -> GradwireError:
    return GradwireError(Code.INVALID_ARGUMENT, message, exit_code)


class Declaration(NamedTuple):
    """A tensor before its first use; dtype is a key of DTYPES, priority None: in order."""

    name: str
    shape: Tuple[int, ...]
    dtype: str
    op: int
    priority: Optional[int]


class _Declared(NamedTuple):
    id: int
    shape: Tuple[int, ...]
    dtype: str
    op: int


class Memory(NamedTuple):
    """What a push-pull reads and writes.

    keep: what must stay alive meanwhile. result: what the caller gets. finish: called once, when the
    numbers are there, to put them where the caller wants them.
    """

    source: int
    target: int
    num_bytes: int
    keep: Any
    result: Any
    finish: Optional[Callable[[], None]] = None


class Handle:
    """One push-pull under way; for poll and synchronize.

    nonfinite: once it is synchronized, whether the result is NaN because some rank's numbers, or
        their sum, were not finite.
    nonfinite_ranks: whose numbers; empty if only the sum was not finite.
    """

    def __init__(self, client: "Client", name: str, memory: Memory) -> None:
        self.name = name
        self.nonfinite = False
        self.nonfinite_ranks: Tuple[int, ...] = ()
        self._client = client
        self._memory: Optional[Memory] = memory
        self._result = memory.result
        self._c_handle = _library.Handle()
        self._lock = threading.Lock()
        self._error: Optional[GradwireError] = None
        self._done = False

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Waits and puts the result where the caller wants it, once; gives it."""
        client = self._client
        client.check_process()
        with self._lock:
            if not self._done:
                timeout_ms = -1 if timeout is None else max(0, int(timeout * 1000))
                status = client.native.gradwire_wait(client.pointer(), self._c_handle, timeout_ms)
                error = client.error_of(status)
                if error is not None:
                    if not client.is_complete(self):
                        raise error  # it can be waited for again
                    # It may have completed after the time was over: what has come of it now counts.
                    error = client.error_of(client.native.gradwire_wait(
                        client.pointer(), self._c_handle, -1))
                if error is None and self._memory is not None and self._memory.finish is not None:
                    self._memory.finish()
                self.nonfinite, self.nonfinite_ranks = client.nonfinite_of(self)
                self._error = error
                self._done = True
                self._memory = None
                client.forget(self)
        if self._error is not None:
            raise self._error
        return self._result

    def poll(self) -> bool:
        """True once wait would return at once."""
        client = self._client
        client.check_process()
        return self._done or client.is_complete(self)

    def active_ranges(self) -> List[Tuple[int, int]]:
        """Which elements of the flattened tensor are sent in the step of this push-pull, as pairs of
        first element and count; the filter (compression.filter) holds the others back. Until the
        tensor is pushed again."""
        client = self._client
        client.check_process()
        return client.active_ranges_of(self)


class Client:
    """The connection of this process."""

    def __init__(self, config: Optional[str], settings: List[str], rank: int) -> None:
        try:
            self.native = _library.load()
        except _library.LibraryNotFound as error:
            raise GradwireError(Code.NOT_FOUND, str(error), exit_code=2) from None
        self.process = os.getpid()
        self.tensors: Dict[str, _Declared] = {}
        self.pending: Dict[str, Handle] = {}
        self.lock = threading.Lock()  # one declaration at a time
        # Called before the connection goes, with True for an orderly end.
        self.before_close: List[Callable[[bool], None]] = []
        self.after_declare: List[Callable[[], None]] = []
        self._pointer: Optional[int] = None
        texts = (ctypes.c_char_p * len(settings))(*[encode(text, "a setting") for text in settings])
        place = ctypes.c_void_p()
        path = None if config is None else os.fsencode(config)
        status = self.native.gradwire_init(path, texts, len(settings), rank, ctypes.byref(place))
        self.check(status, started=False)
        self._pointer = place.value

    def pointer(self) -> int:
        if self._pointer is None:
            raise invalid("the client is shut down")
        return self._pointer

    def check_process(self) -> None:
        """Before anything that locks: another thread may have held a lock at the fork."""
        if self.process != os.getpid():
            raise invalid(
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

    def rank(self) -> int:
        return self.native.gradwire_rank(self.pointer())

    def size(self) -> int:
        return self.native.gradwire_size(self.pointer())

    def is_complete(self, handle: Handle) -> bool:
        return bool(self.native.gradwire_poll(self.pointer(), handle._c_handle))

    def nonfinite_of(self, handle: Handle) -> Tuple[bool, Tuple[int, ...]]:
        """Of a complete handle: whether its result is not finite, and the ranks at fault."""
        if not self.native.gradwire_was_nonfinite(self.pointer(), handle._c_handle):
            return False, ()
        count = self.native.gradwire_nonfinite_ranks(self.pointer(), handle._c_handle, None, 0)
        ranks = (ctypes.c_uint32 * count)()
        self.native.gradwire_nonfinite_ranks(self.pointer(), handle._c_handle, ranks, count)
        return True, tuple(ranks)

    def active_ranges_of(self, handle: Handle) -> List[Tuple[int, int]]:
        count = ctypes.c_size_t()
        self.check(self.native.gradwire_active_ranges(
            self.pointer(), handle._c_handle, None, 0, ctypes.byref(count)))
        ranges = (_library.Range * count.value)()
        self.check(self.native.gradwire_active_ranges(
            self.pointer(), handle._c_handle, ranges, count.value, ctypes.byref(count)))
        return [(each.offset, each.count) for each in ranges]

    def value(self, name: str) -> float:
        """A number of gradwire_get_value."""
        number = ctypes.c_double()
        self.check(self.native.gradwire_get_value(self.pointer(), name.encode(),
                                                  ctypes.byref(number)))
        return number.value

    def forget(self, handle: Handle) -> None:
        if self.pending.get(handle.name) is handle:
            del self.pending[handle.name]

    def declare(self, batch: Sequence[Declaration]) -> None:
        """Declares together what is not known yet; what is known must be the same."""
        with self.lock:
            fresh = []
            for entry in batch:
                known = self.tensors.get(entry.name)
                if known is None:
                    fresh.append(entry)
                else:
                    _check_same(known, entry)
            if not fresh:
                return
            entries = (_library.Tensor * len(fresh))()
            ids = (ctypes.c_uint32 * len(fresh))()
            keep = []  # a structure doesn't hold what its pointers point to
            for i, entry in enumerate(fresh):
                extents = (ctypes.c_uint64 * len(entry.shape))(*entry.shape)
                text = encode(entry.name, "a tensor's name")
                keep += [extents, text]
                priority = entry.priority
                if priority is None:
                    priority = -(len(self.tensors) + i)  # what is declared first goes first
                entries[i] = _library.Tensor(text, extents, len(entry.shape), DTYPES[entry.dtype],
                                             entry.op, priority)
            self.check(self.native.gradwire_declare(self.pointer(), entries, len(fresh), ids))
            for entry, number in zip(fresh, ids):
                self.tensors[entry.name] = _Declared(number, entry.shape, entry.dtype, entry.op)
        for hook in self.after_declare:
            hook()

    def push_pull(self, tensor: Declaration, memory: Memory) -> Handle:
        """Declares the tensor if it is new, and begins; both arrays are packed and aligned."""
        known = self.tensors.get(tensor.name)
        if known is None:
            self.declare([tensor])
            known = self.tensors[tensor.name]
        else:
            _check_same(known, tensor)
        last = self.pending.get(tensor.name)
        if last is not None and self.is_complete(last):
            try:
                last.wait()  # nobody has asked for its result yet
            except GradwireError:
                pass  # whoever asks later gets it
        handle = Handle(self, tensor.name, memory)
        status = self.native.gradwire_push_pull(
            self.pointer(), known.id, memory.source, memory.target, memory.num_bytes,
            ctypes.byref(handle._c_handle))
        self.check(status)
        self.pending[tensor.name] = handle
        return handle

    def broadcast(self, name: str, place: int, num_bytes: int, root: int) -> None:
        self.check(self.native.gradwire_broadcast(
            self.pointer(), encode(name, "a broadcast's name"), place, num_bytes, root))

    def check_root(self, root: int, name: str) -> None:
        if not 0 <= root < self.size():
            raise invalid(f"broadcast '{name}': root is {root}, the job has {self.size()} workers")

    def check_idle(self, what: str) -> None:
        for handle in list(self.pending.values()):
            if not self.is_complete(handle):
                raise invalid(f"{what} while tensor '{handle.name}' is in flight: synchronize it "
                              "first")

    def close(self, orderly: bool) -> None:
        """Ends the connection; without order what is in flight is given up."""
        for hook in self.before_close:
            hook(orderly)
        pointer, error = self.pointer(), None
        if orderly:
            error = self.error_of(self.native.gradwire_close(pointer))
            for handle in list(self.pending.values()):
                if self.is_complete(handle):
                    try:
                        handle.wait()
                    except GradwireError:
                        pass  # whoever asks for it gets it
        self._pointer = None
        self.native.gradwire_free(pointer)
        if error is not None:
            # Something may still be read: these arrays are never given back then.
            _kept.extend(self.pending.values())
            raise error


_client: Optional[Client] = None
_kept: List[Handle] = []


def connect(config: Optional[str], settings: List[str], rank: int) -> None:
    """Makes the connection of this process."""
    global _client
    if _client is not None and _client.process == os.getpid():
        raise invalid("gradwire is initialized already: call gradwire.shutdown() first")
    _client = Client(config, settings, rank)


def current() -> Optional[Client]:
    """The connection that this process has made, or inherited by a fork, if any."""
    return _client


def require() -> Client:
    """The connection, or an error that says what to do."""
    if _client is None:
        raise invalid("gradwire is not initialized: call gradwire.init() first")
    _client.check_process()
    return _client


def disconnect() -> None:
    """Ends the connection in order, if there is one."""
    global _client
    if _client is None:
        return
    _client.check_process()
    client, _client = _client, None
    client.close(orderly=True)


def set_learning_rate(rate: float, names: Optional[Iterable[str]] = None) -> None:
    """The learning rate of these tensors' gradients, for push-pulls that begin afterwards; the same on
    every rank. With feedback `ef_lr` a tensor needs it before its first push.

    names: of declared tensors; None: of all that are declared by now.
    """
    client = require()
    ids = []
    for name in list(client.tensors) if names is None else names:
        if name not in client.tensors:
            raise invalid(f"learning rate of tensor '{name}', which is not declared")
        ids.append(client.tensors[name].id)
    client.check(client.native.gradwire_set_learning_rate(
        client.pointer(), (ctypes.c_uint32 * len(ids))(*ids), len(ids), rate))


def set_loss_scale(scale: float) -> None:
    """What the loss, and with it every gradient, is multiplied with, for push-pulls that begin
    afterwards; the same on every rank. Residuals follow it. 0: not given, as at first."""
    client = require()
    client.check(client.native.gradwire_set_loss_scale(client.pointer(), scale))


@atexit.register
def _leave() -> None:
    global _client
    if _client is not None and _client.process == os.getpid():
        client, _client = _client, None
        client.close(orderly=False)


def encode(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}, expected a str")
    if "\0" in text:
        raise invalid(f"{what} has a zero byte in it: {text!r}")
    return text.encode("utf-8")


def _check_same(known: _Declared, tensor: Declaration) -> None:
    name = tensor.name
    if known.shape != tensor.shape:
        raise invalid(f"tensor '{name}' has shape {list(tensor.shape)}, it was declared with "
                      f"{list(known.shape)}")
    if known.dtype != tensor.dtype:
        raise invalid(f"tensor '{name}' is {tensor.dtype}, it was declared as {known.dtype}")
    if known.op != tensor.op:
        words = {AVERAGE: "an average", SUM: "a sum"}
        raise invalid(f"tensor '{name}' is wanted as {words[tensor.op]}, it was declared as "
                      f"{words[known.op]}")
