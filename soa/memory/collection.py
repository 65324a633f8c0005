"""Collection: n elements in a Layout, on a device, in memory of its own or somebody else's.

The counterpart of CMSSW's `PortableCollection`. Everything that reads a collection reads it in
place: `collection["pt"]` is NumPy's view of it, `collection.tensor("pt")` torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from soa.dtypes import itemsize
from soa.errors import CollectionError
from soa.layout import Column, Layout
from soa.memory.foreign import check_alignment, import_bytes, refuse_mask
from soa.memory.span import Array, Device, Span, allocate, is_tensor

if TYPE_CHECKING:
    import torch

_RAW = ("uint8", "|V1", "|S1")
"""What may be any column's bytes, as NumPy names it."""


class Collection:
    """`capacity` elements of `layout`, of which the first `n` are in use.

    The padded column length follows from `capacity`, as the size of a PortableCollection does.
    `Collection(layout, n)` owns zeroed memory; `wrap` and `from_columns` borrow memory and keep the
    exporting object alive; `from_arrays` copies values in. torch is imported for GPU memory, and
    where a torch tensor is asked for.
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
            self._init(layout, n, capacity, _split(layout, capacity, buffer), buffer)
            return
        spans: dict[str, list[Span]] = {}
        for c in layout.columns:
            rows = 1 if c.kind == "scalar" else capacity
            nbytes, alignment = rows * itemsize(c.dtype), layout.alignment_of(c.name)
            spans[c.name] = [
                allocate(nbytes, alignment, device).at(0, c.dtype, rows)
                for _ in range(c.components)
            ]
        self._init(layout, n, capacity, spans, None)

    @classmethod
    def _over(cls, *memory: Any) -> Self:
        made = cls.__new__(cls)
        made._init(*memory)
        return made

    def _init(
        self,
        layout: Layout,
        n: int,
        capacity: int,
        columns: dict[str, list[Span]],
        whole: Span | None,
    ) -> None:
        n = _count(n)
        if n > capacity:
            raise CollectionError(f"{n} elements in a collection with room for {capacity}")
        self.layout = layout
        self.n = n
        self.capacity = capacity
        self._columns = columns
        self._whole = whole
        first = whole or columns[layout.columns[0].name][0]
        self.device: Device = first.device
        self.readonly: bool = first.readonly
        """No output is bound to such memory. torch would let you write to it: do not."""

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
        if found.bytes.nbytes < need:
            raise CollectionError(
                f"memory of {found.bytes.nbytes} bytes is too small: {capacity} elements of this "
                f"layout take {need} bytes"
            )
        buffer = found.bytes.first(need)
        if readonly is not None:
            buffer = buffer._replace(readonly=readonly)
        check_alignment(buffer, layout.alignment, "the buffer")
        return cls._over(layout, n, capacity, _split(layout, capacity, buffer), buffer)

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
        spans_of: dict[str, list[Span]] = {}
        for member in layout.columns:
            given = columns[member.name]
            pieces = list(given) if member.kind == "eigen" else [given]
            if len(pieces) != member.components:
                raise CollectionError(
                    f"column {member.name!r} needs {member.components} component arrays, "
                    f"found {len(pieces)}"
                )
            spans_of[member.name] = [
                _import_column(layout, member, k, piece) for k, piece in enumerate(pieces)
            ]
        lengths = {
            c.name: {span.shape[0] for span in spans_of[c.name]}
            for c in layout.columns
            if c.kind != "scalar"
        }
        every_length = set().union(*lengths.values()) or {0 if n is None else _count(n)}
        if len(every_length) > 1:
            shown = ", ".join(f"{name} {sorted(found)}" for name, found in lengths.items())
            raise CollectionError(f"columns of different lengths: {shown}")
        capacity = every_length.pop()
        every = [span for spans in spans_of.values() for span in spans]
        if len({span.device for span in every}) > 1:
            raise CollectionError("the columns lie on different devices")
        locked = any(span.readonly for span in every) if readonly is None else readonly
        for name, spans in spans_of.items():
            spans_of[name] = [span._replace(readonly=locked) for span in spans]
        return cls._over(layout, capacity if n is None else n, capacity, spans_of, None)

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
        values = {name: _as_values(name, value) for name, value in arrays.items()}
        if n is None:
            shapes = {
                c.name: tuple(values[c.name].shape) for c in layout.columns if c.kind != "scalar"
            }
            lengths = {shape[:1] for shape in shapes.values()}
            if len(lengths) > 1 or () in lengths:
                shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
                raise CollectionError(f"cannot tell n from columns of shapes {shown}")
            n = lengths.pop()[0] if lengths else 0
        self = cls(layout, n, device, capacity=capacity)
        for member in layout.columns:
            given = values[member.name]
            expected = () if member.kind == "scalar" else (self.n, *member.shape)
            if tuple(given.shape) != expected:
                raise CollectionError(
                    f"column {member.name!r} has shape {tuple(given.shape)}, needed {expected}"
                )
            dtype = str(given.dtype).removeprefix("torch.")
            if dtype != member.dtype:
                raise CollectionError(
                    f"column {member.name!r} is {dtype}, the layout says {member.dtype}: "
                    "convert it first"
                )
            try:
                self.fill(member.name, given)
            except RuntimeError as error:  # torch's: a sparse tensor, or one without memory
                reason = str(error).splitlines()[0]
                raise CollectionError(f"column {member.name!r}: {reason}") from None
        return self

    def fill(self, name: str, values: Array | torch.Tensor) -> None:
        """Copy values `(n, ...)` (more rows are left out), or `()` for a scalar, into a member.

        They are converted to the column's dtype.
        """
        member = self.layout[name]
        n = 1 if member.kind == "scalar" else self.n
        given: Any = values
        if not is_tensor(given) and self.device.type != "cpu":
            import torch

            given = torch.as_tensor(given)
        flat = (given if member.kind == "scalar" else given[:n]).reshape(n, member.components)
        for i in range(member.components):
            span = self.span(name, member.component_of(i)).first(n)
            if is_tensor(flat):
                span.tensor().copy_(flat[:, i])
            else:
                span.numpy()[...] = flat[:, i]

    def copy_from(
        self, source: Collection, components: Iterable[tuple[str, int]] | None = None
    ) -> None:
        """Copy the source's rows in use of physical columns (name, component), by default all.

        Both have one layout. Padding and other rows stay. With a GPU, in stream order.
        """
        if components is None:
            components = ((c.name, k) for c in self.layout.columns for k in range(c.components))
        for name, k in components:
            n = 1 if self.layout[name].kind == "scalar" else source.n
            given = source.span(name, k).first(n).tensor()
            self.span(name, k).first(n).tensor().copy_(given, non_blocking=True)

    # -- views -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array:
        """The n elements in use, as a NumPy view of CPU memory: `collection["pt"][:] = values`.

        `(n,)`, `(n, r)` or `(n, r, c)`; a scalar is `()`. It is read-only where the collection is.
        CollectionError for memory of a GPU, and for an Eigen column of a `columns` layout, which
        has no single view (use `component`); LayoutError for bfloat16.
        """
        array = self._dense(name).numpy()
        rows = array[..., : self.n] if array.ndim else array
        return rows.transpose()

    def tensor(self, name: str) -> torch.Tensor:
        """As `collection[name]`, as torch's view: on any device, of any dtype."""
        tensor = self._dense(name).tensor()
        if tensor.dim() == 0:
            return tensor
        return tensor.narrow(-1, 0, self.n).permute(*reversed(range(tensor.dim())))

    def _dense(self, name: str) -> Span:
        """A member in storage order, with its padding: `()`, `(capacity,)`, `(..., S)`."""
        member = self.layout[name]
        if member.kind != "eigen":
            span = self.span(name)
            return span if member.kind == "column" else span.at(0, span.dtype)
        if self._whole is None:
            raise CollectionError(
                f"the components of {name!r} are separate arrays: read component({name!r}, k)"
            )
        run = self.run(name, 0, member.components)
        return run.at(0, run.dtype, *reversed(member.shape), run.shape[1])

    def component(self, name: str, k: int = 0) -> torch.Tensor:
        """Physical column k of a member as torch's view: `(capacity,)`, or `(1,)` for a scalar."""
        return self.span(name, k).tensor()

    def span(self, name: str, k: int = 0) -> Span:
        """The memory of physical column k of a member, without its padding."""
        return self._columns[self.layout[name].name][k]

    def run(self, name: str, k: int, count: int) -> Span:
        """`count` adjacent physical columns from component k of `name`, as one `(count, S)` span.

        S is the padded column length. They must be of one dtype and one buffer; that is what a
        `matrix` plan promises.
        """
        if self._whole is None:
            raise CollectionError("separate columns are not a matrix")
        dtype = self.layout[name].dtype
        pitch = self.layout.pitch(name, self.capacity)
        start = self.layout.offsets(self.capacity)[name] + k * pitch
        return self._whole.at(start, dtype, count, pitch // itemsize(dtype))

    def spans(self) -> list[Span]:
        """Every piece of memory the collection covers: the buffer, or each physical column."""
        if self._whole is not None:
            return [self._whole]
        return [span for spans in self._columns.values() for span in spans]

    def memory(self) -> list[torch.Tensor]:
        """`spans` as torch's views."""
        return [span.tensor() for span in self.spans()]

    @property
    def buffer(self) -> torch.Tensor | None:
        """All bytes of a `buffer` layout, as a flat uint8 tensor; None for separate columns."""
        return None if self._whole is None else self._whole.tensor()

    @property
    def data_ptr(self) -> int:
        """Address of the buffer; raises CollectionError for separate columns."""
        if self._whole is None:
            raise CollectionError("separate columns have one address each: span(...)")
        return self._whole.address

    def rows(self, n: int) -> Self:
        """The same memory with n elements in use."""
        return self._over(self.layout, n, self.capacity, self._columns, self._whole)

    def to(self, device: str | torch.device) -> Collection:
        """A copy of every byte on another device, in memory of its own."""
        other = Collection(self.layout, self.n, device, capacity=self.capacity)
        for mine, theirs in zip(self.spans(), other.spans(), strict=True):
            if mine.device.type == theirs.device.type == "cpu":
                theirs.raw().numpy()[...] = mine.raw().numpy()
            else:
                theirs.raw().tensor().copy_(mine.raw().tensor())
        return other

    def __repr__(self) -> str:
        names = ", ".join(c.name for c in self.layout.columns)
        return f"Collection(n={self.n}, capacity={self.capacity}, {self.device}, [{names}])"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _split(layout: Layout, capacity: int, buffer: Span) -> dict[str, list[Span]]:
    """The physical columns of a buffer, padding left out."""
    offsets = layout.offsets(capacity)
    return {
        c.name: [
            buffer.at(
                offsets[c.name] + k * layout.pitch(c.name, capacity),
                c.dtype,
                1 if c.kind == "scalar" else capacity,
            )
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


def _import_column(layout: Layout, member: Column, k: int, piece: Any) -> Span:
    label = member.name if member.kind != "eigen" else f"{member.name}[{k}]"
    try:
        found = import_bytes(piece)
    except CollectionError as error:
        raise CollectionError(f"column {label!r}: {error}") from None
    if found.dtype != member.dtype:
        raise CollectionError(f"column {label!r} is {found.dtype}, the layout says {member.dtype}")
    count = found.bytes.nbytes // itemsize(member.dtype)
    if member.kind == "scalar":
        if count != 1:
            raise CollectionError(f"scalar {label!r} has {count} values, needed 1")
    elif len(found.shape) != 1:
        raise CollectionError(f"column {label!r} has shape {found.shape}, needed one dimension")
    check_alignment(found.bytes, layout.alignment_of(member.name), f"column {label!r}")
    return found.bytes.at(0, member.dtype, count)


def _as_values(name: str, value: Any) -> Array | torch.Tensor:
    if is_tensor(value):
        if str(value.layout) != "torch.strided":
            raise CollectionError(f"column {name!r} is a sparse tensor: give a dense one")
        return value.detach()
    try:
        refuse_mask(value)
        return np.asarray(value)
    except (CollectionError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None


def _count(value: Any) -> int:
    """A number of elements as a plain int, also from NumPy's integers."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CollectionError(f"a number of elements must be an integer, found {value!r}")
    if value < 0:
        raise CollectionError(f"a collection cannot have {value} elements")
    return int(value)
