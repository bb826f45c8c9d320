"""An adaptive method of the library, with its state of every tensor (docs/methods.md)."""

from __future__ import annotations

import ctypes
import weakref
from typing import Optional

from . import _library
from ._client import Client, Code, Handle, encode, invalid


class MethodState:
    """gradwire_optimizer: a method over declared float32 tensors, which are named by their ids.

    Places are addresses of packed floats. Threads: send and update for different tensors; everything
    else alone. It ends with its client.
    """

    def __init__(self, client: Client, method: Optional[str]) -> None:
        """method: such as "lans(beta1=0.95)"; None: the job's own setting.
        Errors: NOT_FOUND, INVALID_ARGUMENT, with what does not go together."""
        self._client = client
        self._native = client.native
        self._pointer: Optional[int] = None
        place = ctypes.c_void_p()
        text = None if method is None else encode(method, "a method")
        client.check(self._native.gradwire_optimizer_create(client.pointer(), text,
                                                            ctypes.byref(place)))
        self._pointer = place.value
        this = weakref.ref(self)

        def free(_: bool) -> None:
            state = this()
            if state is not None:
                state.free()

        client.before_close.append(free)

    def free(self) -> None:
        """Later calls are refused."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._native.gradwire_optimizer_free(pointer)

    __del__ = free

    def _open(self) -> int:
        self._client.check_process()
        if self._pointer is None:
            raise invalid("the client is shut down, and the state of its method with it: save it before")
        return self._pointer

    def text(self) -> str:
        """The method with all its parameters."""
        return self._native.gradwire_optimizer_method(self._open()).decode()

    def value(self, name: str) -> float:
        """A number of gradwire_optimizer_get_value."""
        number = ctypes.c_double()
        self._client.check(self._native.gradwire_optimizer_get_value(
            self._open(), name.encode(), ctypes.byref(number)))
        return number.value

    def add(self, tensor: int, name: str, decays: bool) -> None:
        """name: under which its state is saved."""
        self._client.check(self._native.gradwire_optimizer_add(
            self._open(), tensor, encode(name, "a tensor's name"), int(decays)))

    def send(self, tensor: int, gradient: int, count: int) -> None:
        """Turns a gradient into what is pushed, in place."""
        self._client.check(self._native.gradwire_optimizer_send(self._open(), tensor, gradient, count))

    def update(self, handle: Handle, pulled: int, rate: float, parameters: int, count: int) -> None:
        """Brings what a complete push-pull has pulled into the parameters."""
        self._client.check(self._native.gradwire_optimizer_update(
            self._open(), handle._c_handle, pulled, rate, parameters, count))

    def cancel(self, tensor: int) -> None:
        """There will be no update, if one was sent."""
        self._client.check(self._native.gradwire_optimizer_cancel(self._open(), tensor))

    def end_step(self) -> None:
        """Once everything was sent."""
        self._client.check(self._native.gradwire_optimizer_end_step(self._open()))

    def save(self) -> bytes:
        count = ctypes.c_size_t(0)
        buffer = ctypes.create_string_buffer(0)
        status = self._native.gradwire_optimizer_save(self._open(), buffer, ctypes.byref(count))
        if status == Code.BUFFER_TOO_SMALL:
            buffer = ctypes.create_string_buffer(count.value)
            status = self._native.gradwire_optimizer_save(self._open(), buffer, ctypes.byref(count))
        self._client.check(status)
        return ctypes.string_at(buffer, count.value)

    def load(self, saved: bytes) -> None:
        self._client.check(self._native.gradwire_optimizer_load(self._open(), saved, len(saved)))
