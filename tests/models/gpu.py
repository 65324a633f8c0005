"""Memory and streams of a GPU, by the CUDA driver alone: NVIDIA's, or the emulated one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

driver = ctypes.CDLL("libcuda.so.1")


def ask(function: str, *arguments: Any) -> None:
    """Calls a function of the driver, which must succeed."""
    code = getattr(driver, function)(*arguments)
    assert code == 0, (function, code)


def turn_to(device: int) -> None:
    """Makes a device the current one of this thread."""
    ask("cuInit", 0)
    context = ctypes.c_void_p()
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask("cuCtxPushCurrent_v2", context)


def room(values: np.ndarray[Any, Any]) -> int:
    """The address of new memory for these values, on the current device."""
    address = ctypes.c_size_t()
    ask("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(values.nbytes))
    return address.value


def new_stream() -> int:
    """A stream of the current device, that does not wait for the default stream."""
    stream = ctypes.c_void_p()
    ask("cuStreamCreate", ctypes.byref(stream), 1)
    return int(stream.value or 0)


def copy_in(to: int, values: np.ndarray[Any, Any], stream: int) -> None:
    """Begins a copy to a GPU, in a stream."""
    size, address = ctypes.c_size_t(values.nbytes), ctypes.c_void_p(values.ctypes.data)
    ask("cuMemcpyHtoDAsync_v2", ctypes.c_size_t(to), address, size, ctypes.c_void_p(stream))


def copy_out(values: np.ndarray[Any, Any], of: int, stream: int) -> None:
    """Begins a copy from a GPU into `values`, in a stream."""
    size, address = ctypes.c_size_t(values.nbytes), ctypes.c_void_p(values.ctypes.data)
    ask("cuMemcpyDtoHAsync_v2", address, ctypes.c_size_t(of), size, ctypes.c_void_p(stream))


def synchronise(stream: int) -> None:
    """Waits for all that was begun in a stream."""
    ask("cuStreamSynchronize", ctypes.c_void_p(stream))
