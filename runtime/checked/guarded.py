"""Memory between two pages that nobody may touch: who reads or writes past an end is killed.

Poison shows what was written; a read past the end shows nowhere, until the user's buffer happens to
end where their process has no more memory.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Literal

import torch

from soa.dtypes import itemsize, torch_dtype
from soa.layout import Layout
from soa.memory import Collection

Side = Literal["front", "back"]

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)


def guarded_collection(layout: Layout, n: int, capacity: int, side: Side) -> Collection:
    """A collection in CPU memory whose start ("front") or end ("back") touches a forbidden page.

    At the back there may be a gap of less than the alignment where columns are separate.
    """
    if layout.storage == "buffer":
        memory = guarded_bytes(layout.nbytes(capacity), layout.alignment, side)
        return Collection.wrap(layout, memory, n, capacity=capacity)
    columns: dict[str, list[torch.Tensor] | torch.Tensor] = {}
    for member in layout.columns:
        rows = 1 if member.kind == "scalar" else capacity
        pieces = [
            guarded_bytes(
                rows * itemsize(member.dtype), layout.alignment_of(member.name), side
            ).view(torch_dtype(member.dtype))
            for _ in range(member.components)
        ]
        columns[member.name] = pieces if member.kind == "eigen" else pieces[0]
    return Collection.from_columns(layout, columns, n)


def guarded_bytes(nbytes: int, alignment: int, side: Side) -> torch.Tensor:
    """`nbytes` zeroed bytes, aligned; the tensor keeps the mapping alive."""
    room = -(-nbytes // _PAGE) * _PAGE
    mapping = mmap.mmap(-1, room + 2 * _PAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    base = whole.data_ptr()
    for page in (base, base + _PAGE + room):
        if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    start = _PAGE if side == "front" else _PAGE + (room - nbytes) // alignment * alignment
    return whole.narrow(0, start, nbytes)
