"""Span: the address, dtype, shape and device of dense memory.

A span needs no torch. `numpy` and `tensor` give views of the same bytes and keep them alive.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from soa.dtypes import is_opaque, itemsize, numpy_dtype, torch_dtype
from soa.errors import CollectionError
from soa.layout import DEFAULT_ALIGNMENT, Layout

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


class Device(str):
    """A device by its name in torch: "cpu", or "cuda:1" (also an AMD GPU). "cuda" is "cuda:0".

    torch accepts it for any device argument, and it equals the torch.device of that name.
    """

    __slots__ = ()

    def __new__(cls, name: str | torch.device = "cpu") -> Device:
        """Make a device of a name. CollectionError if it has another form than "cuda:1"."""
        if isinstance(name, Device):
            return name
        text = str(name)
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
            raise CollectionError(f"{text!r} is no device: use cpu, cuda or cuda:<index>")
        return super().__new__(cls, {"cpu:0": "cpu", "cuda": "cuda:0"}.get(text, text))

    @property
    def type(self) -> str:
        """The kind of device, such as "cpu" or "cuda"."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # as torch.device.index
        """The number of the GPU; None for a CPU."""
        number = self.partition(":")[2]
        return int(number) if number else None

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other if isinstance(other, str) else str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


CPU = Device("cpu")


class Span(NamedTuple):
    """Borrowed memory: `shape` elements of `dtype`, row by row without gaps.

    `owner` is an object that keeps the memory alive. For memory of torch, it is a flat uint8 tensor
    that covers the memory.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    device: Device = CPU
    readonly: bool = False
    owner: object = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def at(self, offset: int, dtype: str, *shape: int) -> Span:
        """Return a span of `shape` elements of `dtype`, `offset` bytes after this one's start."""
        return Span(self.address + offset, dtype, shape, self.device, self.readonly, self.owner)

    def first(self, n: int) -> Span:
        """Return the span of the first n elements, for a span of one dimension."""
        return Span(self.address, self.dtype, (n,), self.device, self.readonly, self.owner)

    def raw(self) -> Span:
        """Return the whole memory as a span of uint8."""
        return self.at(0, "uint8", self.nbytes)

    def numpy(self) -> Array:
        """Return a NumPy view of the memory, read-only if the span is.

        Raises CollectionError for memory of a GPU, and LayoutError for bfloat16, which NumPy does
        not have.
        """
        if self.device.type != "cpu":
            raise CollectionError(
                f"the memory lies on {self.device}, and NumPy reads CPU memory: use .tensor(...), "
                "or .to('cpu') for a copy"
            )
        dtype = numpy_dtype(self.dtype)
        array = np.asarray(Export(self, dtype.str)) if self.nbytes else np.empty(self.shape, dtype)
        if self.readonly:
            array.flags.writeable = False
        return array

    def store(self, values: Array | torch.Tensor) -> None:
        """Copy values of the span's shape into the memory, converted to its dtype."""
        if self.device.type == "cpu" and not is_tensor(values):
            self.numpy()[...] = values
            return
        _require_torch(self.device)
        import torch

        self.tensor().copy_(torch.as_tensor(values))

    def copy_from(self, source: Span, *, non_blocking: bool = False) -> None:
        """Copy the bytes of `source`, a span of the same size, into this memory.

        If either lies on a GPU, torch copies the bytes in stream order; with `non_blocking`, this
        does not wait for the copy.
        """
        if self.nbytes != source.nbytes:
            raise CollectionError(f"{source.nbytes} bytes to copy, into {self.nbytes}")
        if self.device.type == source.device.type == "cpu":
            ctypes.memmove(self.address, source.address, source.nbytes)
        else:
            self.raw().tensor().copy_(source.raw().tensor(), non_blocking=non_blocking)

    def tensor(self) -> torch.Tensor:
        """Return a torch tensor over the memory.

        For an opaque dtype, its last dimension holds the bytes of an element. torch has no
        read-only tensors: do not write to it if the span is read-only.
        """
        _require_torch(self.device)
        import torch

        if is_opaque(self.dtype):
            return self.at(0, "uint8", *self.shape, itemsize(self.dtype)).tensor()
        dtype = torch_dtype(self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        return self._bytes_in_torch().view(dtype).view(self.shape)

    def _bytes_in_torch(self) -> torch.Tensor:
        """Return the memory, which must not be empty, as a flat uint8 tensor.

        This is a part of the owner if the owner is a tensor that covers the memory.
        """
        import torch

        if isinstance(self.owner, torch.Tensor):
            start = self.address - self.owner.data_ptr()
            if start + self.nbytes <= self.owner.numel():
                return self.owner.narrow(0, start, self.nbytes)
        if self.device.type == "cpu":
            return torch.from_numpy(np.asarray(Export(self.raw(), "|u1")))
        # This is a window of a matrix, whose last row ends after the owner. No run reads there.
        exporter = Export(self.raw(), "|u1", "__cuda_array_interface__")
        return torch.as_tensor(exporter, device=str(self.device))


class Export:
    """Exports a span to NumPy, or from a GPU to torch, and keeps the span's owner alive.

    `typestr` is the type of the elements in NumPy's notation, such as `<f4`; `protocol` is the
    attribute that the importer reads. The memory is exported as writable, since torch refuses other
    memory.
    """

    def __init__(self, span: Span, typestr: str, protocol: str = "__array_interface__") -> None:
        self.owner = span.owner
        data = (span.address, False)
        interface = {"shape": span.shape, "typestr": typestr, "data": data, "version": 3}
        setattr(self, protocol, interface)


def torch_drives_gpus() -> bool:
    """Import torch and return whether it is built for GPUs, even if it sees none."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.version.cuda or torch.version.hip)


def _require_torch(device: str | torch.device) -> None:
    """Raise CollectionError if the device is a GPU and no torch that is built for GPUs is here."""
    if device is not CPU and Device(device).type == "cuda" and not torch_drives_gpus():
        raise CollectionError(
            f"torch allocates, copies and views memory of {device}, and no torch that is built for "
            "GPUs is here: bind memory of your own (Collection.wrap or from_columns)"
        )


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a torch tensor. This does not import torch: it would be already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def span_of(tensor: torch.Tensor) -> Span:
    """Return the span of a tensor, which must be contiguous and have a column's dtype."""
    import torch

    return Span(
        tensor.data_ptr(),
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        Device(tensor.device),
        readonly=False,
        owner=tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor,
    )


def allocate(nbytes: int, alignment: int, device: str | torch.device = CPU) -> Span:
    """Allocate zeroed bytes at a multiple of `alignment`, and return their span.

    This allocates `alignment` bytes more and skips those before the first multiple, of which there
    are `-address % alignment`. Raises CollectionError if there is not enough memory.
    """
    if str(device).partition(":")[0] == "cpu":
        try:
            array = np.zeros(nbytes + alignment, np.uint8)
        except (MemoryError, OverflowError, ValueError):  # which one depends on the size
            raise CollectionError(f"no memory for {nbytes} bytes") from None
        address = array.ctypes.data
        return Span(address + -address % alignment, "uint8", (nbytes,), owner=array)
    _require_torch(device)
    import torch

    try:
        flat = torch.zeros(nbytes + alignment, dtype=torch.uint8, device=str(device))
    except (RuntimeError, AssertionError) as error:  # no such device, or it has too little memory
        reason = str(error).splitlines()[0]
        raise CollectionError(f"{nbytes} bytes on device {str(device)!r}: {reason}") from None
    return span_of(flat.narrow(0, -flat.data_ptr() % alignment, nbytes))


def allocate_columns(
    layout: Layout, capacity: int, device: str | torch.device = CPU
) -> dict[str, list[Span]]:
    """Allocate zeroed memory for each physical column of a `columns` layout, by member."""
    spans: dict[str, list[Span]] = {}
    for member in layout.columns:
        rows = 1 if member.kind == "scalar" else capacity
        alignment = max(layout.alignment_of(member.name), DEFAULT_ALIGNMENT)
        spans[member.name] = [
            allocate(rows * itemsize(member.dtype), alignment, device).at(0, member.dtype, rows)
            for _ in range(member.components)
        ]
    return spans


def split_buffer(layout: Layout, capacity: int, buffer: Span) -> dict[str, list[Span]]:
    """Return the physical columns of a buffer by member, each without its padding."""
    offsets = layout.offsets(capacity)
    spans: dict[str, list[Span]] = {}
    for member in layout.columns:
        rows = 1 if member.kind == "scalar" else capacity
        offset, pitch = offsets[member.name], layout.pitch(member.name, capacity)
        spans[member.name] = [
            buffer.at(offset + k * pitch, member.dtype, rows) for k in range(member.components)
        ]
    return spans
