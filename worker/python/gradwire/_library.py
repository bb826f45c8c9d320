"""Finds libgradwire.so and says what its functions take."""

from __future__ import annotations

import ctypes
import os
import pathlib
import sysconfig
from typing import List

ABI_VERSION = 1
# The file to load instead of looking for one. Not GRADWIRE_...: every process of a job refuses
# variables of that prefix that are no settings.
VARIABLE = "LIBGRADWIRE"
_FILE_NAMES = ("libgradwire.so.0", "libgradwire.so")


class Tensor(ctypes.Structure):
    """gradwire_tensor."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("num_dimensions", ctypes.c_uint32),
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("priority", ctypes.c_int32),
    ]


class Handle(ctypes.Structure):
    """gradwire_handle."""

    _fields_ = [("tensor", ctypes.c_uint32), ("generation", ctypes.c_uint64)]


class Range(ctypes.Structure):
    """gradwire_range."""

    _fields_ = [("offset", ctypes.c_uint64), ("count", ctypes.c_uint64)]


class Stats(ctypes.Structure):
    """gradwire_stats."""

    _fields_ = [
        ("sent_bytes", ctypes.c_uint64),
        ("received_bytes", ctypes.c_uint64),
        ("raw_push_bytes", ctypes.c_uint64),
        ("raw_pull_bytes", ctypes.c_uint64),
        ("nonfinite_units", ctypes.c_uint64),
        ("resent_pushes", ctypes.c_uint64),
        ("reconnects", ctypes.c_uint64),
    ]


_CLIENT = ctypes.c_void_p
_OPTIMIZER = ctypes.c_void_p
_SIGNATURES = {
    "gradwire_version": (ctypes.c_char_p, []),
    "gradwire_last_error": (ctypes.c_char_p, []),
    "gradwire_init": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p),
                                     ctypes.c_size_t, ctypes.c_int64, ctypes.POINTER(_CLIENT)]),
    "gradwire_close": (ctypes.c_int, [_CLIENT]),
    "gradwire_free": (None, [_CLIENT]),
    "gradwire_rank": (ctypes.c_uint32, [_CLIENT]),
    "gradwire_size": (ctypes.c_uint32, [_CLIENT]),
    "gradwire_local_rank": (ctypes.c_uint32, [_CLIENT]),
    "gradwire_local_size": (ctypes.c_uint32, [_CLIENT]),
    "gradwire_declare": (ctypes.c_int, [_CLIENT, ctypes.POINTER(Tensor), ctypes.c_size_t,
                                        ctypes.POINTER(ctypes.c_uint32)]),
    "gradwire_push_pull": (ctypes.c_int, [_CLIENT, ctypes.c_uint32, ctypes.c_void_p,
                                          ctypes.c_void_p, ctypes.c_size_t,
                                          ctypes.POINTER(Handle)]),
    "gradwire_poll": (ctypes.c_int, [_CLIENT, Handle]),
    "gradwire_wait": (ctypes.c_int, [_CLIENT, Handle, ctypes.c_int64]),
    "gradwire_was_nonfinite": (ctypes.c_int, [_CLIENT, Handle]),
    "gradwire_nonfinite_ranks": (ctypes.c_size_t, [_CLIENT, Handle,
                                                   ctypes.POINTER(ctypes.c_uint32),
                                                   ctypes.c_size_t]),
    "gradwire_set_learning_rate": (ctypes.c_int, [_CLIENT, ctypes.POINTER(ctypes.c_uint32),
                                                  ctypes.c_size_t, ctypes.c_double]),
    "gradwire_set_loss_scale": (ctypes.c_int, [_CLIENT, ctypes.c_double]),
    "gradwire_end_step": (ctypes.c_int, [_CLIENT]),
    "gradwire_broadcast": (ctypes.c_int, [_CLIENT, ctypes.c_char_p, ctypes.c_void_p,
                                          ctypes.c_size_t, ctypes.c_uint32]),
    "gradwire_barrier": (ctypes.c_int, [_CLIENT]),
    "gradwire_save_state": (ctypes.c_int, [_CLIENT, ctypes.c_void_p,
                                           ctypes.POINTER(ctypes.c_size_t)]),
    "gradwire_load_state": (ctypes.c_int, [_CLIENT, ctypes.c_char_p, ctypes.c_size_t]),
    "gradwire_plan": (ctypes.c_int, [_CLIENT, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]),
    "gradwire_get_stats": (ctypes.c_int, [_CLIENT, ctypes.POINTER(Stats)]),
    "gradwire_get_value": (ctypes.c_int, [_CLIENT, ctypes.c_char_p,
                                          ctypes.POINTER(ctypes.c_double)]),
    "gradwire_active_ranges": (ctypes.c_int, [_CLIENT, Handle, ctypes.POINTER(Range),
                                              ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]),
    "gradwire_optimizer_create": (ctypes.c_int, [_CLIENT, ctypes.c_char_p,
                                                 ctypes.POINTER(_OPTIMIZER)]),
    "gradwire_optimizer_free": (None, [_OPTIMIZER]),
    "gradwire_optimizer_method": (ctypes.c_char_p, [_OPTIMIZER]),
    "gradwire_optimizer_add": (ctypes.c_int, [_OPTIMIZER, ctypes.c_uint32, ctypes.c_char_p,
                                              ctypes.c_int]),
    "gradwire_optimizer_send": (ctypes.c_int, [_OPTIMIZER, ctypes.c_uint32, ctypes.c_void_p,
                                               ctypes.c_size_t]),
    "gradwire_optimizer_update": (ctypes.c_int, [_OPTIMIZER, Handle, ctypes.c_void_p,
                                                 ctypes.c_double, ctypes.c_void_p,
                                                 ctypes.c_size_t]),
    "gradwire_optimizer_cancel": (ctypes.c_int, [_OPTIMIZER, ctypes.c_uint32]),
    "gradwire_optimizer_end_step": (ctypes.c_int, [_OPTIMIZER]),
    "gradwire_optimizer_save": (ctypes.c_int, [_OPTIMIZER, ctypes.c_void_p,
                                               ctypes.POINTER(ctypes.c_size_t)]),
    "gradwire_optimizer_load": (ctypes.c_int, [_OPTIMIZER, ctypes.c_char_p, ctypes.c_size_t]),
    "gradwire_optimizer_get_value": (ctypes.c_int, [_OPTIMIZER, ctypes.c_char_p,
                                                    ctypes.POINTER(ctypes.c_double)]),
    "gradwire_exit_code": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
}


class LibraryNotFound(Exception):
    """There is no library that can be used; the text says where it was looked for."""


def _places() -> List[str]:
    """What to try, first the nearest. A name without a folder is left to the system's loader."""
    package = pathlib.Path(__file__).resolve().parent
    folders = [package]
    checkout = package.parents[2]
    if (checkout / "worker" / "capi" / "gradwire.h").is_file():
        folders.append(checkout / "build" / "release" / "lib")
    # Installed as PREFIX/lib/pythonX/.../gradwire, with the library in PREFIX/lib or below it.
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for parent in package.parents:
        if parent.name in ("lib", "lib64"):
            folders += [parent, parent / multiarch] if multiarch else [parent]
            break
    places = [str(folder / name) for folder in folders for name in _FILE_NAMES]
    return places + [_FILE_NAMES[0]]


def load() -> ctypes.CDLL:
    """The library.  Raises LibraryNotFound."""
    given = os.environ.get(VARIABLE)
    tried = []
    for place in [given] if given else _places():
        if os.sep in place and not os.path.exists(place):
            tried.append(f"{place} (not there)")
            continue
        try:
            library = ctypes.CDLL(place)
            version = library.gradwire_abi_version
        except OSError as error:
            tried.append(f"{place} ({error})")
            continue
        except AttributeError:
            tried.append(f"{place} (it is another library)")
            continue
        version.restype = ctypes.c_uint32
        version.argtypes = []
        if version() != ABI_VERSION:
            tried.append(f"{place} (has interface {version()}, expected {ABI_VERSION})")
            continue
        missing = [name for name in _SIGNATURES if not hasattr(library, name)]
        if missing:
            tried.append(f"{place} (lacks {', '.join(missing)}: it is older than this package)")
            continue
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        return library
    where = "\n  ".join(tried)
    hint = (f"{VARIABLE} names it" if given
            else f"build it (see README.md), or name the file in {VARIABLE}")
    raise LibraryNotFound(f"found no libgradwire.so that can be used: {hint}. Looked at:\n  {where}")
