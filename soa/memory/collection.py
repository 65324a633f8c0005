"""Collection: n elements in a Layout, on a device, in memory of its own or somebody else's.

The counterpart of CMSSW's `PortableCollection`. Everything that reads a collection reads it in
place: `collection["pt"]` is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from soa.dtypes import itemsize, numpy_dtype, torch_dtype
from soa.errors import CollectionError
from soa.layout import Column, Layout
from soa.memory.foreign import allocate, check_alignment, import_bytes, refuse_mask

_RAW = ("uint8", "|V1", "|S1")
"""What may be any column's bytes, as NumPy names it."""


class Collection:
    """`capacity` elements of `layout`, of which the first `n` are in use.

    The padded column length follows from `capacity`, as the size of a PortableCollection does.
    `Collection(layout, n)` owns zeroed memory; `wrap` and `from_columns` borrow memory and keep the
    exporting object alive; `from_arrays` copies values in.
    """

    def __init__(
        self,
        layout: Layout,
        n: int,
        device: str | torch.device = "cpu",
        *,
        capacity: int | None = None,
    ) -> None:
        n = _count(n)
        capacity = n if capacity is None else _count(capacity)
        if layout.storage == "buffer":
            buffer = allocate(layout.nbytes(capacity), layout.alignment, device)
            self._init(layout, n, capacity, _split(layout, capacity, buffer), buffer, False, None)
            return
        parts = {
            c.name: [
                allocate(_column_bytes(c, capacity), layout.alignment_of(c.name), device).view(
                    torch_dtype(c.dtype)
                )
                for _ in range(c.components)
            ]
            for c in layout.columns
        }
        self._init(layout, n, capacity, parts, None, False, None)

    def _init(
        self,
        layout: Layout,
        n: int,
        capacity: int,
        components: dict[str, list[torch.Tensor]],
        buffer: torch.Tensor | None,
        readonly: bool,
        owner: object,
    ) -> None:
        n = _count(n)
        if n > capacity:
            raise CollectionError(f"{n} elements in a collection with room for {capacity}")
        self.layout = layout
        self.n = n
        self.capacity = capacity
        self.readonly = readonly
        """No output is bound to it. torch has no read-only tensors: do not write to the views."""
        self.buffer = buffer
        """All bytes of a `buffer` layout, as a flat uint8 tensor; None for separate columns."""
        self._components = components
        self._owner = owner
        first = components[layout.columns[0].name][0]
        self.device: torch.device = first.device if buffer is None else buffer.device

    # -- construction over other memory ------------------------------------------------------

    @classmethod
    def wrap(
        cls,
        layout: Layout,
        memory: Any,
        n: int,
        *,
        capacity: int | None = None,
        nbytes: int | None = None,
        device: str | None = None,
        readonly: bool | None = None,
    ) -> Self:
        """A collection over existing memory of a `buffer` layout, without a copy.

        `memory` is an address (then `nbytes` and, on a GPU, `device` are needed) or any exporter
        that `soa.memory` accepts. It must hold at least `layout.nbytes(capacity)` bytes from an
        address aligned to `layout.alignment`: raw ones (uint8), or values of the dtype that every
        column has. Raises CollectionError otherwise.
        """
        if layout.storage != "buffer":
            raise CollectionError("this layout has separate columns: use Collection.from_columns")
        n = _count(n)
        capacity = n if capacity is None else _count(capacity)
        found = import_bytes(memory, nbytes, device)
        dtypes = list(dict.fromkeys(c.dtype for c in layout.columns))
        if found.dtype not in _RAW and dtypes != [found.dtype]:
            raise CollectionError(
                f"the memory holds {found.dtype}, the layout's columns are {_listed(dtypes)}: "
                "give it as raw bytes (uint8), if they are laid out as this layout says"
            )
        need = layout.nbytes(capacity)
        if found.tensor.numel() < need:
            raise CollectionError(
                f"memory of {found.tensor.numel()} bytes is too small: {capacity} elements of this "
                f"layout take {need} bytes"
            )
        buffer = found.tensor.narrow(0, 0, need)
        check_alignment(buffer, layout.alignment, "the buffer")
        self = cls.__new__(cls)
        self._init(
            layout,
            n,
            capacity,
            _split(layout, capacity, buffer),
            buffer,
            found.readonly if readonly is None else readonly,
            found.owner,
        )
        return self

    @classmethod
    def from_columns(
        cls,
        layout: Layout,
        columns: Mapping[str, Any],
        n: int | None = None,
        *,
        readonly: bool | None = None,
    ) -> Self:
        """A collection over separately allocated columns, without a copy.

        `columns[name]` is one exporter of `capacity` elements, or for an Eigen column a sequence
        of one exporter per component, in storage (column-major) order. Each must be of the column's
        dtype and aligned to `layout.alignment_of` it.
        """
        if layout.storage != "columns":
            raise CollectionError("this layout is one buffer: use Collection.wrap or from_arrays")
        _check_names(layout, columns)
        parts: dict[str, list[torch.Tensor]] = {}
        owners: list[object] = []
        locked = False
        for member in layout.columns:
            given = columns[member.name]
            pieces = list(given) if member.kind == "eigen" else [given]
            if len(pieces) != member.components:
                raise CollectionError(
                    f"column {member.name!r} needs {member.components} component arrays, "
                    f"found {len(pieces)}"
                )
            parts[member.name] = []
            for k, piece in enumerate(pieces):
                label = member.name if member.kind != "eigen" else f"{member.name}[{k}]"
                tensor, only_read, owner = _import_column(
                    label, member, piece, layout.alignment_of(member.name)
                )
                parts[member.name].append(tensor)
                owners.append(owner)
                locked = locked or only_read
        capacity = _common_length(layout, parts, 0 if n is None else _count(n))
        self = cls.__new__(cls)
        self._init(
            layout,
            capacity if n is None else n,
            capacity,
            parts,
            None,
            locked if readonly is None else readonly,
            owners,
        )
        if len({t.device for pieces in parts.values() for t in pieces}) > 1:
            raise CollectionError("the columns lie on different devices")
        return self

    @classmethod
    def from_arrays(
        cls,
        layout: Layout,
        arrays: Mapping[str, Any],
        n: int | None = None,
        device: str | torch.device = "cpu",
        *,
        capacity: int | None = None,
    ) -> Self:
        """A collection of its own memory, filled with a copy of `arrays`.

        Shapes: plain column `(n,)`, Eigen vector `(n, r)`, Eigen matrix `(n, r, c)`, scalar `()`.
        A dtype that differs from the column's is refused rather than converted.
        """
        _check_names(layout, arrays)
        tensors = {name: _as_tensor(name, value) for name, value in arrays.items()}
        if n is None:
            shapes = {
                c.name: tuple(tensors[c.name].shape) for c in layout.columns if c.kind != "scalar"
            }
            lengths = {shape[:1] for shape in shapes.values()}
            if len(lengths) > 1 or () in lengths:
                shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
                raise CollectionError(f"cannot tell n from columns of shapes {shown}")
            n = lengths.pop()[0] if lengths else 0
        self = cls(layout, n, device, capacity=capacity)
        for member in layout.columns:
            given = tensors[member.name]
            expected = () if member.kind == "scalar" else (n, *member.shape)
            if tuple(given.shape) != expected:
                raise CollectionError(
                    f"column {member.name!r} has shape {tuple(given.shape)}, needed {expected}"
                )
            if given.dtype != torch_dtype(member.dtype):
                raise CollectionError(
                    f"column {member.name!r} is {str(given.dtype).removeprefix('torch.')}, the "
                    f"layout says {member.dtype}: convert it first"
                )
            try:
                self._fill(member, given)
            except RuntimeError as error:  # torch's: a sparse tensor, or one without memory
                reason = str(error).splitlines()[0]
                raise CollectionError(f"column {member.name!r}: {reason}") from None
        return self

    def _fill(self, member: Column, values: torch.Tensor) -> None:
        if member.kind != "eigen":
            self[member.name].copy_(values)
            return
        flat = values.reshape(self.n, member.components)
        for i in range(member.components):
            piece = self._components[member.name][member.component_of(i)]
            piece.narrow(0, 0, self.n).copy_(flat[:, i])

    # -- views -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        """The n elements in use, as a view: `(n,)`, `(n, r)`, `(n, r, c)`; a scalar is `()`.

        An Eigen column of a `columns` layout has no single view: use `component`.
        """
        member = self.layout[name]
        pieces = self._components[name]
        if member.kind == "scalar":
            return pieces[0][0]
        if member.kind == "column":
            return pieces[0].narrow(0, 0, self.n)
        if self.buffer is None:
            raise CollectionError(
                f"the components of {name!r} are separate arrays: read component({name!r}, k)"
            )
        block = self.matrix(name, 0, member.components).narrow(1, 0, self.n)
        if len(member.shape) == 1:
            return block.transpose(0, 1)
        rows, cols = member.shape
        return block.view(cols, rows, self.n).permute(2, 1, 0)

    def component(self, name: str, k: int = 0) -> torch.Tensor:
        """Physical column k of a member, `(capacity,)` ((1,) for a scalar), as a view."""
        return self._components[self.layout[name].name][k]

    def matrix(self, name: str, k: int, count: int) -> torch.Tensor:
        """`count` adjacent physical columns from component k of `name`, as one `(count, S)` view.

        S is the padded column length. They must be of one dtype and one buffer; that is what a
        `matrix` plan promises.
        """
        if self.buffer is None:
            raise CollectionError("separate columns are not a matrix")
        dtype = self.layout[name].dtype
        pitch = self.layout.pitch(name, self.capacity)
        start = self.layout.offsets(self.capacity)[name] + k * pitch
        flat = self.buffer.narrow(0, start, count * pitch).view(torch_dtype(dtype))
        return flat.view(count, pitch // itemsize(dtype))

    def numpy(self, name: str) -> np.ndarray[Any, Any]:
        """A column as a NumPy view; CPU collections only."""
        if self.device.type != "cpu":
            raise CollectionError(f"the collection lies on {self.device}: NumPy reads CPU memory")
        numpy_dtype(self.layout[name].dtype)
        array: np.ndarray[Any, Any] = self[name].numpy()
        if self.readonly:
            array = array.view()
            array.flags.writeable = False
        return array

    def rows(self, n: int) -> Self:
        """The same memory with n elements in use."""
        other = type(self).__new__(type(self))
        other._init(
            self.layout, n, self.capacity, self._components, self.buffer, self.readonly, self
        )
        return other

    def to(self, device: str | torch.device) -> Collection:
        """A copy on another device, in memory of its own."""
        other = Collection(self.layout, self.n, device, capacity=self.capacity)
        if self.buffer is not None and other.buffer is not None:
            other.buffer.copy_(self.buffer)
            return other
        for name, pieces in self._components.items():
            for mine, theirs in zip(pieces, other._components[name], strict=True):
                theirs.copy_(mine)
        return other

    @property
    def data_ptr(self) -> int:
        """Address of the buffer; raises CollectionError for separate columns."""
        if self.buffer is None:
            raise CollectionError("separate columns have one address each: component(...)")
        return self.buffer.data_ptr()

    def memory(self) -> list[torch.Tensor]:
        """Every piece of memory the collection covers: the buffer, or each physical column."""
        if self.buffer is not None:
            return [self.buffer]
        return [piece for pieces in self._components.values() for piece in pieces]

    def __repr__(self) -> str:
        names = ", ".join(c.name for c in self.layout.columns)
        return f"Collection(n={self.n}, capacity={self.capacity}, {self.device}, [{names}])"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _column_bytes(member: Column, capacity: int) -> int:
    return (1 if member.kind == "scalar" else capacity) * itemsize(member.dtype)


def _split(layout: Layout, capacity: int, buffer: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Views of each physical column of a buffer, padding left out."""
    offsets = layout.offsets(capacity)
    return {
        c.name: [
            buffer.narrow(
                0,
                offsets[c.name] + k * layout.pitch(c.name, capacity),
                _column_bytes(c, capacity),
            ).view(torch_dtype(c.dtype))
            for k in range(c.components)
        ]
        for c in layout.columns
    }


def _check_names(layout: Layout, given: Mapping[str, Any]) -> None:
    missing = [c.name for c in layout.columns if c.name not in given]
    unknown = [name for name in given if name not in layout.by_name]
    if missing or unknown:
        parts = [f"missing {missing}"] if missing else []
        parts += [f"unknown {unknown}"] if unknown else []
        raise CollectionError(f"columns do not match the layout: {', '.join(parts)}")


def _import_column(
    label: str, member: Column, piece: Any, alignment: int
) -> tuple[torch.Tensor, bool, object]:
    try:
        found = import_bytes(piece)
    except CollectionError as error:
        raise CollectionError(f"column {label!r}: {error}") from None
    if found.dtype != member.dtype:
        raise CollectionError(f"column {label!r} is {found.dtype}, the layout says {member.dtype}")
    tensor = found.tensor.view(torch_dtype(member.dtype))
    if member.kind == "scalar":
        if tensor.numel() != 1:
            raise CollectionError(f"scalar {label!r} has {tensor.numel()} values, needed 1")
    elif len(found.shape) != 1:
        raise CollectionError(f"column {label!r} has shape {found.shape}, needed one dimension")
    check_alignment(tensor, alignment, f"column {label!r}")
    return tensor, found.readonly, found.owner


def _common_length(
    layout: Layout, parts: Mapping[str, Sequence[torch.Tensor]], without_columns: int
) -> int:
    lengths = {
        c.name: {piece.numel() for piece in parts[c.name]}
        for c in layout.columns
        if c.kind != "scalar"
    }
    every = set().union(*lengths.values()) if lengths else {without_columns}
    if len(every) > 1:
        shown = ", ".join(f"{name} {sorted(found)}" for name, found in lengths.items())
        raise CollectionError(f"columns of different lengths: {shown}")
    return int(every.pop())


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        refuse_mask(value)
        array = np.asarray(value)
        if not array.flags.writeable:
            array = array.copy()  # torch.from_numpy warns otherwise; the values are copied anyway
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
    except (CollectionError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None


def _count(value: Any) -> int:
    """A number of elements as a plain int, also from NumPy's integers."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CollectionError(f"a number of elements must be an integer, found {value!r}")
    if value < 0:
        raise CollectionError(f"a collection cannot have {value} elements")
    return int(value)
