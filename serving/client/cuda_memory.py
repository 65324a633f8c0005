"""GPU memory that another process may open, with three calls of the CUDA runtime.

Two existing ways were not usable. tritonclient's `cuda_shared_memory` makes the same calls, but
needs cuda-python, an additional dependency. torch's `UntypedStorage._share_cuda_` gives the handle
of a whole segment of its allocator with an offset. It counts the users of the memory in a file
that only torch itself counts down (torch/csrc/StorageSharing.cpp), so memory shared with Triton
would never be freed; and memory in torch's expandable segments has no such handle. Therefore
regions are allocated here, and columns in any memory are copied into them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from serving.errors import ServingError
from soa.memory import import_bytes

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; its content is never interpreted here."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaMemory:
    """`size` bytes on a GPU, allocated with cudaMalloc. Raises ServingError.

    `tensor`: the whole memory, as bytes. Another process of this host opens it by `handle`. The
    owner must call `free`, but only after that process has closed the memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        runtime = cuda_runtime()
        address, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _check(runtime.cudaMalloc(ctypes.byref(address), size), f"{size} bytes on {device}")
            self._address = address
            try:
                code = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address)
                _check(code, f"memory on {device} for another process")
                imported = import_bytes(address.value, size, str(device))
                self.tensor: torch.Tensor = imported.bytes.tensor()
            except BaseException:
                self.free()
                raise
        self.handle = bytes(handle)

    def free(self) -> None:
        with torch.cuda.device(self.device):
            cuda_runtime().cudaFree(self._address)


def require_cuda(device: torch.device) -> torch.device:
    """The device with its index; raises ServingError if torch has no such GPU."""
    what = f"CUDA shared memory on {device}"
    if torch.version.cuda is None:
        raise ServingError(f"{what}: this torch was built without CUDA: use shared_memory='system'")
    if not torch.cuda.is_available():
        raise ServingError(f"{what}: torch finds no GPU here: use shared_memory='system'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ServingError(f"{what}: there are {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", index)


@cache
def cuda_runtime() -> Any:
    """The CUDA runtime that torch has loaded, found by the name of its library."""
    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return bind_runtime(ctypes.CDLL(name))
    except OSError as error:
        raise ServingError(f"CUDA shared memory needs {name}: {error}") from None


def bind_runtime(library: Any) -> Any:
    """Set the signatures of the functions used, as in cuda_runtime_api.h."""
    pointer = ctypes.c_void_p
    for name, arguments, result in (
        ("cudaMalloc", (ctypes.POINTER(pointer), ctypes.c_size_t), ctypes.c_int),
        ("cudaFree", (pointer,), ctypes.c_int),
        ("cudaIpcGetMemHandle", (ctypes.POINTER(_Handle), pointer), ctypes.c_int),
        ("cudaGetLastError", (), ctypes.c_int),
        ("cudaGetErrorString", (ctypes.c_int,), ctypes.c_char_p),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def _check(code: int, what: str) -> None:
    if code:
        runtime = cuda_runtime()
        why = runtime.cudaGetErrorString(code).decode()
        runtime.cudaGetLastError()  # clears the error: torch would report it at its next call
        raise ServingError(f"no {what}: {why} (CUDA error {code})")
