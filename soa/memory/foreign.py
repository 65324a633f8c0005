"""Memory that somebody else owns, seen as bytes without a copy.

Accepted: an address with a size, anything with the buffer protocol (bytes, mmap, memoryview),
NumPy, torch, and any exporter of `__cuda_array_interface__`, `__array_interface__` or DLPack. The
tensor that comes back keeps the exporter alive; an address must be kept alive by the caller.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from soa.errors import CollectionError


@dataclass(frozen=True)
class Bytes:
    """A flat uint8 tensor over foreign memory; `owner` keeps that memory alive.

    `dtype` and `shape` are what the exporter says of it. A dtype that no column has keeps its
    exporter's own name (`>f4` for big-endian numbers), so that it equals none of ours.
    """

    tensor: torch.Tensor
    readonly: bool
    owner: object
    dtype: str
    shape: tuple[int, ...]


def import_bytes(memory: Any, nbytes: int | None = None, device: str | None = None) -> Bytes:
    """View `memory` as bytes on its own device; raises CollectionError if that takes a copy."""
    found = _import(memory, nbytes, device)
    if device is not None and found.tensor.device.type != torch.device(device).type:
        raise CollectionError(
            f"this {type(memory).__name__} lies on {found.tensor.device}, not on {device}: "
            "wrap it where it lies, then copy it with Collection.to"
        )
    return found


def _import(memory: Any, nbytes: int | None, device: str | None) -> Bytes:
    if isinstance(memory, ctypes.c_void_p):
        memory = memory.value or 0
    if isinstance(memory, int | np.integer) and not isinstance(memory, bool):
        return _from_integer(int(memory), nbytes, device or "cpu")
    # NumPy sees the scalar's (or the pointer's own) few bytes as memory: never what is meant.
    if isinstance(memory, bool | np.generic | ctypes._SimpleCData | ctypes._Pointer):
        raise CollectionError(
            f"a {type(memory).__name__} is a value, not memory: give an array, or an address as "
            "an int with nbytes="
        )
    if isinstance(memory, torch.Tensor):
        return _from_tensor(memory.detach(), False, memory)
    if hasattr(memory, "__cuda_array_interface__"):
        return _from_cuda_interface(memory, device)
    if hasattr(memory, "__array_interface__"):
        return _from_array(np.asarray(memory), memory)
    if hasattr(memory, "__dlpack__"):
        return _from_dlpack(memory)
    try:
        return _from_array(np.asarray(memoryview(memory)), memory)
    except (TypeError, ValueError, BufferError):
        raise CollectionError(
            f"cannot view a {type(memory).__name__} as memory: give an address, or an object with "
            "the buffer protocol, __array_interface__, __cuda_array_interface__ or DLPack"
        ) from None


def _from_integer(address: int, nbytes: int | None, device: str) -> Bytes:
    if nbytes is None:
        raise CollectionError(f"address {address:#x} comes without a size: give nbytes=")
    if address < 0 or nbytes < 0:
        raise CollectionError(f"{nbytes} bytes at address {address:#x} are no memory")
    tensor = _from_address(address, nbytes, device)
    return Bytes(tensor, False, None, "uint8", (nbytes,))


def _from_tensor(tensor: torch.Tensor, readonly: bool, owner: object) -> Bytes:
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise CollectionError(
            "a sparse, quantized, nested, conjugated or negated tensor does not hold its values as "
            "they are: give a plain one"
        )
    if not tensor.is_contiguous():
        raise CollectionError(
            f"memory with strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)} is not "
            "contiguous: a collection wraps memory as it lies, it does not copy"
        )
    if tensor.numel():
        flat = tensor.view(-1).view(torch.uint8)
    else:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Bytes(flat, readonly, owner, dtype, tuple(tensor.shape))


def _from_array(array: np.ndarray[Any, Any], owner: object) -> Bytes:
    refuse_mask(array if owner is None else owner)
    if array.dtype.hasobject:
        raise CollectionError("an array of Python objects holds references, not values")
    if not array.flags.c_contiguous:
        raise CollectionError(
            f"array with strides {array.strides} bytes for shape {array.shape} is not contiguous: "
            "a collection wraps memory as it lies, it does not copy"
        )
    # By address, since torch.from_numpy warns about read-only arrays that we never write.
    address = array.__array_interface__["data"][0]
    owners = (owner, array)
    tensor = _from_address(address, array.nbytes, "cpu", owners)
    return Bytes(tensor, not array.flags.writeable, owners, str(array.dtype), array.shape)


def refuse_mask(array: object) -> None:
    """Raise CollectionError for a NumPy array with missing values, which would become numbers."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise CollectionError("the array has masked values: fill them first (array.filled(value))")


def _from_cuda_interface(memory: Any, device: str | None) -> Bytes:
    address, readonly = memory.__cuda_array_interface__["data"]
    if device is None:
        # Without an index torch takes the current GPU, and would copy from another one.
        known = hasattr(memory, "__dlpack_device__")
        device = f"cuda:{memory.__dlpack_device__()[1]}" if known else "cuda"
    try:
        tensor = torch.as_tensor(memory, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CollectionError(f"torch cannot import this GPU memory: {error}") from None
    if tensor.numel() and tensor.data_ptr() != address:
        raise CollectionError(f"this memory does not lie on {device}: say which GPU (device=)")
    return _from_tensor(tensor, bool(readonly), memory)


class _FlagReader:
    """Hands a DLPack exporter to torch, and keeps the flags that torch ignores."""

    # struct DLManagedTensorVersioned (dlpack.h): version 2 * uint32, manager_ctx, deleter, flags
    FLAGS_AT = 24
    NAME = b"dltensor_versioned"
    READ_ONLY = 1
    IS_COPIED = 2

    def __init__(self, exporter: Any) -> None:
        self.exporter = exporter
        self.flags = 0

    def __dlpack_device__(self) -> Any:
        return self.exporter.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self.exporter.__dlpack__(**how)
        arguments = (ctypes.py_object, ctypes.c_char_p)
        is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(
            ("PyCapsule_IsValid", ctypes.pythonapi)
        )
        pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, *arguments)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        if is_valid(capsule, self.NAME):  # the older "dltensor" has no flags
            at = pointer_of(capsule, self.NAME) + self.FLAGS_AT
            self.flags = ctypes.c_uint64.from_address(at).value
        return capsule


def _from_dlpack(memory: Any) -> Bytes:
    reader = _FlagReader(memory)
    try:
        tensor = torch.utils.dlpack.from_dlpack(reader)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise CollectionError(
            f"this {type(memory).__name__} does not export its memory by DLPack: {error}"
        ) from None
    if reader.flags & reader.IS_COPIED:
        raise CollectionError(f"this {type(memory).__name__} exports a copy of its memory")
    return _from_tensor(tensor, bool(reader.flags & reader.READ_ONLY), memory)


class _At:
    """An address in the forms that NumPy and torch import; it holds the memory's owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.interface = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _OnCpu(_At):
    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.interface


class _OnCuda(_At):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


def _from_address(
    address: int, nbytes: int, device: str, owner: object | None = None
) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise CollectionError(f"null address for {nbytes} bytes")
    if torch.device(device).type != "cpu":
        return _from_cuda_interface(_OnCuda(address, nbytes, owner), device).tensor
    # The tensor holds the array, which holds what it was made from, which holds the owner: a view
    # of a collection outlives it.
    return torch.from_numpy(np.asarray(_OnCpu(address, nbytes, owner)))


def check_alignment(tensor: torch.Tensor, alignment: int, what: str) -> None:
    """Raise CollectionError unless the tensor's address is a multiple of `alignment`."""
    if tensor.numel() and tensor.data_ptr() % alignment:
        raise CollectionError(
            f"{what} at address {tensor.data_ptr():#x} is misaligned: {alignment}-byte alignment "
            f"needed, found {tensor.data_ptr() % alignment} bytes past it; allocate aligned "
            "memory, or declare a smaller alignment in the layout"
        )


def allocate(nbytes: int, alignment: int, device: str | torch.device) -> torch.Tensor:
    """Zeroed bytes whose address is a multiple of `alignment`."""
    raw = torch.zeros(nbytes + alignment, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % alignment, nbytes)
