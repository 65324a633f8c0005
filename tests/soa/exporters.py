"""Objects that support exactly one protocol for sharing memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class OnlyDLPack:
    """DLPack only, as in a library that torch does not know."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """DLPack before version 1.0: `__dlpack__` takes only a stream."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._array.__dlpack__(stream=stream)


class OnlyArrayInterface:
    """`__array_interface__` only."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class OnlyCudaArrayInterface:
    """`__cuda_array_interface__` only, over the memory of a torch tensor."""

    def __init__(self, tensor: torch.Tensor, readonly: bool = False) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            **tensor.__cuda_array_interface__,
            "data": (tensor.data_ptr(), readonly),
        }


def aligned(nbytes: int, alignment: int = 128, shift: int = 0) -> Array:
    """Zeroed bytes that begin `shift` bytes after a multiple of `alignment`."""
    raw = np.zeros(nbytes + shift + alignment, np.uint8)
    start = -raw.ctypes.data % alignment + shift
    return raw[start : start + nbytes]


def aligned_array(values: Any, dtype: str, alignment: int = 128, shift: int = 0) -> Array:
    """A copy of `values` that begins `shift` bytes after a multiple of `alignment`."""
    source = np.asarray(values, dtype)
    array = aligned(source.nbytes, alignment, shift).view(dtype).reshape(source.shape)
    array[...] = source
    return array
