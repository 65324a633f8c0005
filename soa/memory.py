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

from soa.errors import CollectionError


@dataclass(frozen=True)
class Bytes:
    """A flat uint8 tensor over foreign memory; `owner` keeps that memory alive."""

    tensor: torch.Tensor
    readonly: bool
    owner: object


def import_bytes(memory: Any, nbytes: int | None = None, device: str | None = None) -> Bytes:
    """View `memory` as bytes on its own device; raises CollectionError if that takes a copy."""
    if isinstance(memory, int):
        if nbytes is None:
            raise CollectionError(f"address {memory:#x} comes without a size: give nbytes=")
        return Bytes(_from_address(memory, nbytes, device or "cpu"), False, None)
    if isinstance(memory, torch.Tensor):
        return Bytes(_flat(memory.detach()), False, memory)
    if hasattr(memory, "__cuda_array_interface__"):
        readonly = bool(memory.__cuda_array_interface__["data"][1])
        return Bytes(_flat(torch.as_tensor(memory, device=device or "cuda")), readonly, memory)
    if hasattr(memory, "__array_interface__"):
        return _from_array_interface(np.asarray(memory), memory)
    if hasattr(memory, "__dlpack__"):
        return Bytes(_flat(torch.from_dlpack(memory)), False, memory)
    try:
        return _from_array_interface(np.frombuffer(memory, np.uint8), memory)
    except (TypeError, ValueError, BufferError):
        raise CollectionError(
            f"cannot view a {type(memory).__name__} as memory: give an address, or an object with "
            "the buffer protocol, __array_interface__, __cuda_array_interface__ or DLPack"
        ) from None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise CollectionError(
            f"memory with strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)} is not "
            "contiguous: a collection wraps memory as it lies, it does not copy"
        )
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


def _from_array_interface(array: np.ndarray[Any, Any], owner: object) -> Bytes:
    if not array.flags.c_contiguous:
        raise CollectionError(
            f"array with strides {array.strides} bytes for shape {array.shape} is not contiguous: "
            "a collection wraps memory as it lies, it does not copy"
        )
    # By address, since torch.from_numpy warns about read-only arrays that we never write.
    tensor = _from_address(array.__array_interface__["data"][0], array.nbytes, "cpu")
    return Bytes(tensor, not array.flags.writeable, (owner, array))


class _CudaMemory:
    """An address on a GPU in the form that torch imports."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _from_address(address: int, nbytes: int, device: str) -> torch.Tensor:
    if nbytes < 0:
        raise CollectionError(f"memory of {nbytes} bytes")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise CollectionError(f"null address for {nbytes} bytes")
    if torch.device(device).type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaMemory(address, nbytes), device=device)


def allocate(nbytes: int, alignment: int, device: str | torch.device) -> torch.Tensor:
    """Zeroed bytes whose address is a multiple of `alignment`."""
    raw = torch.zeros(nbytes + alignment, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % alignment, nbytes)
