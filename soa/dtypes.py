"""The element types of a column, by the names that torch and NumPy share.

Enumerations in CMSSW are stored as their underlying integer type; use that integer here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from soa.errors import LayoutError

if TYPE_CHECKING:
    import torch

_BYTES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}

DTYPES: tuple[str, ...] = tuple(_BYTES)


def itemsize(name: str) -> int:
    """Bytes of one element; LayoutError for a name that is no dtype of a column."""
    try:
        return _BYTES[name]
    except KeyError:
        raise LayoutError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}") from None


def is_float(name: str) -> bool:
    itemsize(name)
    return "float" in name


def torch_dtype(name: str) -> torch.dtype:
    import torch

    itemsize(name)
    found: torch.dtype = getattr(torch, name)
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of the same bytes; NumPy has no bfloat16."""
    if name == "bfloat16":
        raise LayoutError("NumPy has no bfloat16: take the column as a torch tensor, .tensor(name)")
    itemsize(name)
    return np.dtype(name)
