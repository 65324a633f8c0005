"""Collection: n elements in a Layout, on a device, in owned or borrowed memory.

The counterpart of CMSSW's `PortableCollection`. Columns are read in place: `collection["pt"]` is a
NumPy view, `collection.tensor("pt")` a torch tensor over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from soa.dtypes import dtype_name, is_opaque, itemsize
from soa.errors import CollectionError
from soa.layout import Column, Layout
from soa.memory.foreign import (
    as_opaque,
    broadcast_values,
    check_alignment,
    check_dtype,
    import_bytes,
    import_columns,
    numbers_of,
    shape_error,
    values_of,
)
from soa.memory.span import Array, Device, Span, allocate, allocate_columns, split_buffer
from soa.options import BY_NAME, COUNT, Accepted, of_type, takes
from soa.text import join_words

if TYPE_CHECKING:
    import torch

_RAW_DTYPES = ("uint8", "opaque1", "|S1")
"""Memory that has one of these dtypes is taken as raw bytes, for columns of any dtype."""
_COLUMNS_SHOWN = 20
LAYOUT = of_type("a Layout, such as session.layout(NAME)", Layout)
COLLECTION = Accepted("a Collection", lambda value: isinstance(value, Collection))


class Collection:
    """`capacity` elements of `layout`, of which the first `n` are in use.

    The padded column length follows from `capacity`, as the size of a PortableCollection does.
    `Collection(layout, n)` owns zeroed memory; `wrap` and `from_columns` borrow memory and keep the
    exporting object alive; `from_arrays` copies values in. torch is imported only for GPU memory
    and by functions that return torch tensors.

    Examples
    --------
    >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
    >>> jets = Collection(layout, 3)
    >>> jets["pt"][:] = [50, 40, 30]
    >>> jets["pt"]
    array([50., 40., 30.], dtype=float32)
    """

    @takes(CollectionError, layout=LAYOUT)
    def __init__(
        self,
        layout: Layout,
        n: int,
        device: str | torch.device = "cpu",
        *,
        capacity: int | None = None,
    ) -> None:
        n = _require_count(n)
        capacity = n if capacity is None else _require_count(capacity)
        if layout.storage == "buffer":
            buffer = allocate(layout.nbytes(capacity), layout.alignment, device)
            self._set_memory(layout, n, capacity, split_buffer(layout, capacity, buffer), buffer)
            return
        self._set_memory(layout, n, capacity, allocate_columns(layout, capacity, device))

    @classmethod
    def _from_spans(
        cls,
        layout: Layout,
        n: int,
        capacity: int,
        columns: dict[str, list[Span]],
        buffer: Span | None = None,
    ) -> Self:
        """Make a collection over memory that exists; the arguments are those of `_set_memory`."""
        collection = cls.__new__(cls)
        collection._set_memory(layout, n, capacity, columns, buffer)
        return collection

    def _set_memory(
        self,
        layout: Layout,
        n: int,
        capacity: int,
        columns: dict[str, list[Span]],
        buffer: Span | None = None,
    ) -> None:
        """Set all attributes.

        `columns` has the physical columns of each member. `buffer` is the memory in which all of
        them lie; None if they are separate.
        """
        n = _require_count(n)
        if n > capacity:
            raise CollectionError(f"{n} elements in a collection with room for {capacity}")
        self.layout = layout
        self.n = n
        self.capacity = capacity
        self._columns = columns
        self._buffer = buffer
        self._first_span = columns[layout.columns[0].name][0] if buffer is None else buffer
        self.device: Device = self._first_span.device
        self.start = 0
        """The first row of a window, counted in the collection that it belongs to; else 0."""
        self.copied: tuple[str, ...] = ()
        """Columns that `as_collection` had to copy; changes here do not reach their source."""
        self._parent: Self | None = None

    @property
    def readonly(self) -> bool:
        """Whether the memory is read-only, so that no output can be bound to it.

        torch does not know this: do not write to the tensors of a read-only collection.
        """
        return self._first_span.readonly

    # -- construction over other memory ------------------------------------------------------

    @classmethod
    @takes(CollectionError, layout=LAYOUT)
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
        """Make a collection over existing memory of a `buffer` layout, without a copy.

        `memory` is an address (then `nbytes` and, on a GPU, `device` are needed) or any exporter
        that `import_bytes` accepts. It must hold at least `layout.nbytes(capacity)` bytes from an
        address aligned to `layout.alignment`: either raw bytes (uint8), or values of one dtype if
        every column has that dtype. Raises CollectionError otherwise.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> memory = np.zeros(layout.nbytes(100) + 128, np.uint8)
        >>> start = -memory.ctypes.data % 128  # the first aligned byte
        >>> jets = Collection.wrap(layout, memory[start : start + layout.nbytes(100)], 100)
        >>> jets["pt"][:] = 50
        >>> bool(memory.any())
        True
        """
        if layout.storage != "buffer":
            raise CollectionError(
                "this layout has separate columns: use Collection.from_columns or as_collection"
            )
        n = _require_count(n)
        capacity = n if capacity is None else _require_count(capacity)
        foreign = import_bytes(memory, nbytes, device)
        dtypes = list(dict.fromkeys(member.dtype for member in layout.columns))
        if foreign.dtype not in _RAW_DTYPES and dtypes != [foreign.dtype]:
            raise CollectionError(
                f"the memory holds {foreign.dtype}, the layout's columns are {join_words(dtypes)}: "
                "give it as raw bytes (uint8), if they are laid out as this layout says"
            )
        needed_bytes = layout.nbytes(capacity)
        if foreign.bytes.nbytes < needed_bytes:
            raise CollectionError(
                f"memory of {foreign.bytes.nbytes} bytes is too small: {capacity} elements of this "
                f"layout take {needed_bytes} bytes"
            )
        buffer = foreign.bytes.first(needed_bytes)
        if readonly is not None:
            buffer = buffer._replace(readonly=readonly)
        check_alignment(buffer, layout.alignment, "the buffer")
        return cls._from_spans(layout, n, capacity, split_buffer(layout, capacity, buffer), buffer)

    @classmethod
    @takes(CollectionError, layout=LAYOUT, columns=BY_NAME)
    def from_columns(
        cls,
        layout: Layout,
        columns: Mapping[str, Any],
        n: int | None = None,
        *,
        readonly: bool | None = None,
    ) -> Self:
        """Make a collection over separately allocated columns, without a copy.

        `columns[name]` is one exporter of `capacity` elements, or for an Eigen column a sequence
        of one exporter per component, in storage (column-major) order. Each exporter must have the
        column's dtype and be aligned to `layout.alignment_of(name)`.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")], storage="columns")
        >>> pt, eta = np.ones(3, np.float32), np.zeros(3, np.float32)
        >>> jets = Collection.from_columns(layout, {"pt": pt, "eta": eta})
        >>> pt[0] = 50
        >>> jets["pt"]
        array([50.,  1.,  1.], dtype=float32)
        """
        if layout.storage != "columns":
            raise CollectionError(
                "this layout is one buffer: use Collection.wrap or from_arrays; to bind separate "
                "columns, write storage: columns in the model's config"
            )
        spans_of = import_columns(layout, columns)
        capacity = _common_length(layout, spans_of)
        if capacity is None:  # there are scalars only
            capacity = 0 if n is None else _require_count(n)
        all_spans = [span for spans in spans_of.values() for span in spans]
        if len({span.device for span in all_spans}) > 1:
            raise CollectionError("the columns lie on different devices")
        is_readonly = any(span.readonly for span in all_spans) if readonly is None else readonly
        for name, spans in spans_of.items():
            spans_of[name] = [span._replace(readonly=is_readonly) for span in spans]
        return cls._from_spans(layout, capacity if n is None else n, capacity, spans_of)

    @classmethod
    @takes(CollectionError, layout=LAYOUT, arrays=BY_NAME)
    def from_arrays(
        cls,
        layout: Layout,
        arrays: Mapping[str, Any],
        n: int | None = None,
        device: str | torch.device = "cpu",
        *,
        capacity: int | None = None,
    ) -> Self:
        """Make a collection that owns its memory, and fill it with a copy of `arrays`.

        Shapes: plain column `(n,)`, Eigen vector `(n, r)`, Eigen matrix `(n, r, c)`, scalar `()`.
        A dtype that differs from the column's is refused rather than converted.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> pt, eta = np.ones(3, np.float32), np.zeros(3, np.float32)
        >>> Collection.from_arrays(layout, {"pt": pt, "eta": eta}).n
        3
        """
        values = values_of(layout, arrays)
        if n is None:
            n = _common_rows(layout, values)
        self = cls(layout, n, device, capacity=capacity)
        for member in layout.columns:
            column = values[member.name]
            expected = () if member.kind == "scalar" else (self.n, *member.shape)
            if tuple(column.shape) != expected:
                raise shape_error(member, column, expected)
            check_dtype(member, dtype_name(column.dtype), repr(member.name))
            self.fill(member.name, column)
        return self

    def fill(self, name: str, values: Array | torch.Tensor) -> None:
        """Copy values into a member: `(n, ...)` (more rows are ignored), or `()` for a scalar.

        Values are converted to the column's dtype. CollectionError for another shape, for values
        that are no numbers, and if the memory is read-only.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> jets = Collection(layout, 3)
        >>> jets.fill("pt", np.array([50, 40, 30]))
        >>> jets["pt"]
        array([50., 40., 30.], dtype=float32)
        """
        member = self.layout[name]
        n = 1 if member.kind == "scalar" else self.n
        numbers: Any = numbers_of(member, values)
        if self.readonly:
            raise CollectionError(f"column {name!r} is read-only")
        if is_opaque(member.dtype):
            rows = as_opaque(member, numbers)[:n]
            self.span(name).first(n).raw().store(rows.view(np.uint8))
            return
        try:
            rows = numbers if member.kind == "scalar" else numbers[:n]
            flat = rows.reshape(n, member.components)
        except (IndexError, ValueError, RuntimeError):
            needed = () if member.kind == "scalar" else (n, *member.shape)
            raise shape_error(member, numbers, needed) from None
        for i in range(member.components):
            self.span(name, member.component_of(i)).first(n).store(flat[:, i])

    @takes(CollectionError, source=COLLECTION)
    def copy_from(
        self, source: Collection, components: Iterable[tuple[str, int]] | None = None
    ) -> None:
        """Copy the rows in use from another collection of the same layout.

        `components` are physical columns (name, component); by default all are copied. Padding and
        the other rows are not changed. If a GPU takes part, the copy is made in stream order.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> source, jets = Collection(layout, 3), Collection(layout, 3)
        >>> source["pt"][:] = [50, 40, 30]
        >>> jets.copy_from(source)
        >>> jets["pt"]
        array([50., 40., 30.], dtype=float32)
        """
        if source.layout.columns != self.layout.columns:
            raise CollectionError("the source has other columns: copy it to a collection like it")
        if source.n > self.capacity:
            raise CollectionError(
                f"{source.n} elements to copy, into a collection with room for {self.capacity}"
            )
        if components is None:
            components = (
                (member.name, k) for member in self.layout.columns for k in range(member.components)
            )
        for name, k in components:
            n = 1 if self.layout[name].kind == "scalar" else source.n
            copied = source.span(name, k).first(n)
            self.span(name, k).first(n).copy_from(copied, non_blocking=True)

    # -- views -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array:
        """Return the n elements in use as a NumPy view: `collection["pt"][:] = values` writes them.

        Shapes: `(n,)`, `(n, r)` or `(n, r, c)`; a scalar is `()`. The view is read-only if the
        collection is. Raises CollectionError for memory of a GPU, and for an Eigen column of a
        `columns` layout, which has no single view (use `component`, or `to_numpy` for a copy);
        LayoutError for bfloat16.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), eigen("p4", "float32", 4)])
        >>> jets = Collection(layout, 3)
        >>> jets["pt"].shape, jets["p4"].shape
        ((3,), (3, 4))
        """
        array = self._dense_span(name).numpy()
        rows = array[..., : self.n] if array.ndim else array
        return rows.transpose()  # in storage order, the rows come last

    def __setitem__(self, name: str, values: Any) -> None:
        """Copy values into the n elements in use: one value for all, or as many as there are.

        Values are converted to the column's dtype. CollectionError for another shape, for values
        that an integer or bool column cannot hold, and if the memory is read-only.

        Examples
        --------
        >>> jets = Collection(Layout([column("pt", "float32")]), 3)
        >>> jets["pt"] = [50, 40, 30]
        >>> jets["pt"]
        array([50., 40., 30.], dtype=float32)
        """
        member = self.layout[name]
        shape = () if member.kind == "scalar" else (self.n, *member.shape)
        self.fill(name, broadcast_values(member, values, shape))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a torch tensor over a column, on any device, with the shape of `collection[name]`.

        For an opaque column it holds the bytes, `(n, size)`.

        Examples
        --------
        >>> jets = Collection(Layout([eigen("p4", "float32", 4)]), 3)
        >>> jets.tensor("p4")[:, 0] = 50
        >>> jets["p4"][0]
        array([50.,  0.,  0.,  0.], dtype=float32)
        """
        tensor = self._dense_span(name).tensor()
        if is_opaque(self.layout[name].dtype):
            return tensor if self.layout[name].kind == "scalar" else tensor[: self.n]
        if tensor.dim() == 0:
            return tensor
        return tensor.narrow(-1, 0, self.n).permute(*reversed(range(tensor.dim())))

    def _dense_span(self, name: str) -> Span:
        """Return the memory of a member as one span, in the order in which it is stored.

        The shape is `()` for a scalar and `(capacity,)` for a plain column. For an Eigen column of
        shape (r, c) it is (c, r, S), where S is the padded column length. Raises CollectionError
        for an Eigen column whose components are separate.
        """
        member = self.layout[name]
        if member.kind != "eigen":
            span = self.span(name)
            return span if member.kind == "column" else span.at(0, span.dtype)
        if self._buffer is None:
            raise CollectionError(
                f"the components of {name!r} are separate arrays: read component({name!r}, k)"
            )
        run = self.run(name, 0, member.components)
        return run.at(0, run.dtype, *reversed(member.shape), run.shape[1])

    def component(self, name: str, k: int = 0) -> Array:
        """Return physical column k of a member as a NumPy view: `(capacity,)`; `(1,)` for a scalar.

        Raises as `[...]` does for memory of a GPU and for bfloat16; `span(name, k).tensor()` is a
        torch tensor over the same memory.

        Examples
        --------
        >>> jets = Collection(Layout([eigen("p4", "float32", 4)]), 3)
        >>> jets.component("p4", 3)
        array([0., 0., 0.], dtype=float32)
        """
        return self.span(name, k).numpy()

    def span(self, name: str, k: int = 0) -> Span:
        """Return the memory of physical column k of a member, without its padding."""
        components = self._columns[self.layout[name].name]
        try:
            return components[k]
        except (IndexError, TypeError):
            raise CollectionError(
                f"column {name!r} has no component {k!r}: it has 0 to {len(components) - 1}"
            ) from None

    @takes(CollectionError, k=COUNT, count=COUNT)
    def run(self, name: str, k: int, count: int) -> Span:
        """Return `count` adjacent physical columns, from component k of `name` on, as one span.

        Its shape is `(count, S)`, where S is the padded column length. The columns must have one
        dtype and lie in one buffer, as in a `matrix` plan. Raises CollectionError if the buffer has
        fewer columns.

        Examples
        --------
        >>> jets = Collection(Layout([eigen("p4", "float32", 4)]), 3)
        >>> jets.run("p4", 0, 4).shape
        (4, 32)
        """
        if self._buffer is None:
            raise CollectionError("separate columns are not a matrix")
        dtype, capacity = self.layout[name].dtype, self.whole.capacity
        pitch = self.layout.pitch(name, capacity)
        offset = self.layout.offsets(capacity)[name] + k * pitch
        if k < 0 or count < 0 or offset + count * pitch > self._buffer.nbytes:
            raise CollectionError(f"the buffer has no {count} columns from {name!r}[{k}] on")
        offset += self.start * itemsize(dtype)  # a window begins at row `start`
        return self._buffer.at(offset, dtype, count, pitch // itemsize(dtype))

    def spans(self) -> list[Span]:
        """Return each piece of memory of the collection: its buffer, or every physical column."""
        if self._buffer is not None and self._parent is None:
            return [self._buffer]
        return self._physical_columns()

    def _physical_columns(self) -> list[Span]:
        """Return all physical columns in the order of the layout."""
        return [span for spans in self._columns.values() for span in spans]

    def memory(self) -> list[torch.Tensor]:
        """Return the memory of `spans` as torch tensors."""
        return [span.tensor() for span in self.spans()]

    @property
    def buffer(self) -> torch.Tensor | None:
        """All bytes of a `buffer` layout, as a flat uint8 tensor; None for separate columns and for
        a window.

        Examples
        --------
        >>> Collection(Layout([column("pt", "float32")]), 100).buffer.shape
        torch.Size([512])
        """
        return None if self._buffer is None or self._parent else self._buffer.tensor()

    @property
    def data_ptr(self) -> int:
        """The address of the buffer. Raises CollectionError for separate columns and a window."""
        if self._buffer is None or self._parent is not None:
            raise CollectionError(
                "separate columns, and the columns of a window, have one address each: span(...)"
            )
        return self._buffer.address

    def locked(self) -> Self:
        """Return the same memory as a read-only collection, whose views are read-only, too."""
        buffer = None if self._buffer is None else self._buffer._replace(readonly=True)
        columns = {
            name: [span._replace(readonly=True) for span in spans]
            for name, spans in self._columns.items()
        }
        copy = self._from_spans(self.layout, self.n, self.capacity, columns, buffer)
        copy.start, copy.copied, copy._parent = self.start, self.copied, self._parent
        return copy

    def rows(self, n: int) -> Self:
        """Return a collection over the same memory of which the first n elements are in use.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> jets = Collection(layout, 0, capacity=100)
        >>> jets.rows(10)["pt"].shape
        (10,)
        """
        return self._view_part(n, self.capacity, self._columns, self._parent, self.start)

    def window(self, start: int, stop: int) -> Self:
        """Return a window: rows `start` up to `stop` (excluded) of the rows in use, without a copy.

        A window is bound like any collection, with collections or windows of the same row count. A
        start that is a multiple of `layout.row_step` can always be bound; any other start only if
        validation ran such windows (docs/howto/memory.md). The scalars are those of the collection.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> jets = Collection(layout, 100)
        >>> jets.window(32, 64)["pt"][:] = 50
        >>> int(jets["pt"].nonzero()[0][0])
        32
        """
        start, stop = _require_count(start), _require_count(stop)
        if not start <= stop <= self.n:
            raise CollectionError(f"rows {start} to {stop} of a collection with {self.n} in use")
        columns = {}
        for member in self.layout.columns:
            spans = self._columns[member.name]
            if member.kind != "scalar":
                offset = start * itemsize(member.dtype)
                spans = [span.at(offset, member.dtype, stop - start) for span in spans]
            columns[member.name] = spans
        return self._view_part(stop - start, stop - start, columns, self.whole, self.start + start)

    def _view_part(
        self, n: int, capacity: int, columns: dict[str, list[Span]], parent: Self | None, start: int
    ) -> Self:
        """Make a collection over a part of this one's memory, its `columns`.

        `parent` is the collection of which it is a window that begins at row `start`; None if it is
        no window.
        """
        part = self._from_spans(self.layout, n, capacity, columns, self._buffer)
        part.start, part.copied, part._parent = start, self.copied, parent
        return part

    @property
    def whole(self) -> Self:
        """The collection that this window belongs to; the collection itself if it is no window.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> Collection(layout, 100).window(32, 64).whole.n
        100
        """
        return self if self._parent is None else self._parent

    def to(self, device: str | torch.device, layout: Layout | None = None) -> Collection:
        """Copy the collection to a device. The copy owns its memory.

        Every byte is copied, also the padding. Of a window, and if the copy gets another `layout`
        of the same members, only the rows are copied.

        Examples
        --------
        >>> layout = Layout([column("pt", "float32"), column("eta", "float32")])
        >>> separate = Layout(layout.columns, storage="columns")
        >>> Collection(layout, 100).to("cpu", separate).layout.storage
        'columns'
        """
        moved = Collection(layout or self.layout, self.n, device, capacity=self.capacity)
        sources, copies = self._physical_columns(), moved._physical_columns()
        if layout is None and self._parent is None:
            sources, copies = self.spans(), moved.spans()
        for source, copy in zip(sources, copies, strict=True):
            copy.copy_from(source)
        return moved

    def __repr__(self) -> str:
        """Describe the collection in a line, and then each column with its first values."""
        notes = [f"Collection of {self.n:,} rows on {self.device}"]
        if self._parent is not None:
            notes.append(f"from row {self.start:,} of {self.whole.n:,}")
        if self.capacity > self.n:
            notes.append(f"room for {self.capacity:,}")
        if self.readonly:
            notes.append("read-only")
        if self.copied:
            notes.append(f"copied: {', '.join(self.copied)}")
        lines = [", ".join(notes)]
        for member in self.layout.columns[:_COLUMNS_SHOWN]:
            kind = f"{member.dtype}{list(member.shape) if member.shape else ''}"
            lines.append(f"  {member.name}  {kind}  {self._first_values_text(member)}".rstrip())
        not_shown = len(self.layout.columns) - _COLUMNS_SHOWN
        if not_shown > 0:
            lines.append(f"  and {not_shown} more columns")
        return "\n".join(lines)

    def _first_values_text(self, member: Column) -> str:
        """Return the first values of a member as text.

        It is empty for memory that NumPy cannot show as one array of numbers.
        """
        no_numbers = member.dtype == "bfloat16" or is_opaque(member.dtype)
        separate = member.kind == "eigen" and self._buffer is None
        if self.device.type != "cpu" or no_numbers or separate:
            return ""
        shown = np.array2string(self[member.name], precision=4, threshold=8, edgeitems=2)
        return " ".join(shown.split())


def _common_length(layout: Layout, spans_of: Mapping[str, list[Span]]) -> int | None:
    """Return the number of elements that each column has; None if all members are scalars.

    Raises CollectionError if columns have different numbers.
    """
    lengths_of = {
        member.name: {span.shape[0] for span in spans_of[member.name]}
        for member in layout.columns
        if member.kind != "scalar"
    }
    lengths = set[int]().union(*lengths_of.values())
    if len(lengths) > 1:
        shown = ", ".join(f"{name} {sorted(numbers)}" for name, numbers in lengths_of.items())
        raise CollectionError(f"columns of different lengths: {shown}")
    return lengths.pop() if lengths else None


def _common_rows(layout: Layout, values: Mapping[str, Any]) -> int:
    """Return the number of rows that each array has; 0 if all members are scalars.

    Raises CollectionError if arrays have different numbers.
    """
    shapes = {
        member.name: tuple(values[member.name].shape)
        for member in layout.columns
        if member.kind != "scalar"
    }
    lengths = {shape[:1] for shape in shapes.values()}
    if len(lengths) > 1 or () in lengths:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise CollectionError(f"cannot tell n from columns of shapes {shown}")
    return int(lengths.pop()[0]) if lengths else 0


def _require_count(value: Any) -> int:
    """Return a number of elements as a plain int; raise CollectionError if it is none.

    NumPy's integers are accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CollectionError(f"a number of elements must be an integer, found {value!r}")
    if value < 0:
        raise CollectionError(f"a collection cannot have {value} elements")
    return int(value)
