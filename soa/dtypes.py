"""The element types of a column, by the names that torch and NumPy share.

Enumerations in CMSSW are stored as their underlying integer type; use that integer here.
"""

from __future__ import annotations

import numpy as np
import torch

from soa.errors import LayoutError

_TORCH: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

DTYPES: tuple[str, ...] = tuple(_TORCH)


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return torch_dtype(name).itemsize


def is_float(name: str) -> bool:
    return torch_dtype(name).is_floating_point


def torch_dtype(name: str) -> torch.dtype:
    try:
        return _TORCH[name]
    except KeyError:
        raise LayoutError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}") from None


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of the same bytes; NumPy has no bfloat16."""
    if name == "bfloat16":
        raise LayoutError("NumPy has no bfloat16: take the column as a torch tensor instead")
    torch_dtype(name)
    return np.dtype(name)


def name_of(dtype: torch.dtype) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutError(f"{dtype} cannot be a column: use one of {', '.join(DTYPES)}") from None
