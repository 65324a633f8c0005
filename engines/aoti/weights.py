"""Weights beside the code: one flat file that every process of a node maps read-only.

With the constants inside the library, each process pays for a private copy of them. `weights.bin`
holds each tensor's memory at a multiple of 64 bytes; `weights.txt` says where, one line a tensor,
after a first line `soa-weights 1`::

    NAME DTYPE ITEMSIZE OFFSET NDIM SIZES... STRIDES...

The native runner reads both (engines/native/artifact.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from soa.dtypes import DTYPES

BINARY, INDEX, FORMAT = "weights.bin", "weights.txt", "soa-weights 1"
_ALIGNMENT = 64


def writable(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every tensor is of a dtype and kind that the format holds."""
    return all(
        str(t.dtype).removeprefix("torch.") in DTYPES and t.layout == torch.strided
        for t in tensors.values()
    )


def write_weights(tensors: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Write CPU tensors, each in its own strides; returns the files written."""
    lines = [FORMAT]
    at = 0
    with (folder / BINARY).open("wb") as out:
        for name, tensor in tensors.items():
            at += out.write(b"\0" * (-at % _ALIGNMENT))
            numbers = [tensor.itemsize, at, tensor.ndim, *tensor.shape, *tensor.stride()]
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(" ".join([name, dtype, *map(str, numbers)]))
            at += out.write(_memory(tensor))
    (folder / INDEX).write_text("\n".join(lines) + "\n")
    return [BINARY, INDEX]


def _memory(tensor: torch.Tensor) -> bytes:
    """The bytes from a tensor's first element to its last, whatever its strides."""
    if tensor.numel() == 0:
        return b""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
    return flat.contiguous().view(torch.uint8).numpy().tobytes()
