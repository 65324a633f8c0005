"""The element types of a column, by the names that torch and NumPy share.

Enumerations in CMSSW are stored as their underlying integer type; use that integer here. A model
can read the types in `DTYPES`. Columns of `uint64`, and of `opaque12` (12 bytes of unknown content:
a struct, a std::array), can be part of a collection, but no model reads them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from soa.errors import LayoutError

if TYPE_CHECKING:  # a program that only describes a layout needs neither NumPy nor torch
    import numpy as np
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
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}

DTYPES: tuple[str, ...] = tuple(name for name in _BYTES if name != "uint64")
"""The dtypes that a model can read."""
_LARGEST_OPAQUE = 1 << 24


def itemsize(name: str) -> int:
    """Return the bytes of one element; raise LayoutError if no column can have this dtype."""
    if name in _BYTES:
        return _BYTES[name]
    opaque = re.fullmatch(r"opaque([1-9][0-9]{0,7})", name)
    if opaque and int(opaque[1]) <= _LARGEST_OPAQUE:
        return int(opaque[1])
    raise LayoutError(
        f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}; or, for a column that no "
        f"model reads, uint64 or opaque<bytes> with up to {_LARGEST_OPAQUE} bytes"
    )


def is_opaque(name: str) -> bool:
    """Return whether elements of this dtype are bytes of unknown content, as `opaque12`."""
    return name.startswith("opaque")


def is_float(name: str) -> bool:
    """Return whether a dtype is a floating-point one; raise LayoutError if there is none such."""
    itemsize(name)
    return "float" in name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name. Raises LayoutError for an opaque dtype."""
    import torch

    itemsize(name)
    if is_opaque(name):
        raise LayoutError(f"torch has no {name}: look at its bytes")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of the same bytes: `V12` for opaque12. LayoutError for bfloat16."""
    import numpy as np

    if name == "bfloat16":
        raise LayoutError("NumPy has no bfloat16: take the column as a torch tensor, .tensor(name)")
    size = itemsize(name)
    return np.dtype(f"V{size}" if is_opaque(name) else name)


def dtype_name(dtype: object) -> str:
    """Return our name for a dtype of NumPy or torch.

    A dtype that no column can have, such as `>f4`, keeps the name that its library gives it.
    """
    import numpy as np

    if isinstance(dtype, np.dtype) and dtype.kind == "V" and dtype.subdtype is None:
        return f"opaque{dtype.itemsize}"
    return str(dtype).removeprefix("torch.")
