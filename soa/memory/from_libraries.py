"""Make a Collection of columns that other libraries hold: in place if possible, else by a copy.

`as_collection` does this and records which columns it copied. An Eigen column is a struct (Arrow)
or a record (Awkward) of its entries, row by row; or an array `(n, r)` or `(n, r, c)`, which is used
in place only in Fortran order. Lists that all have the same length count as such an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from soa.dtypes import DTYPES, dtype_name, is_opaque, numpy_dtype
from soa.errors import CollectionError, needs_extra
from soa.layout import DEFAULT_ALIGNMENT, Column, Kind, Layout
from soa.memory.collection import LAYOUT, Collection
from soa.memory.foreign import as_opaque, check_dtype, import_bytes
from soa.memory.named_columns import NamedColumns, library_of, named_columns, require_column
from soa.memory.span import Device, allocate, is_tensor
from soa.memory.to_libraries import to_numpy
from soa.options import BY_NAME, takes

# Our dtypes by Arrow's name of the same bytes. Arrow has no bfloat16, and its bool is one bit.
_ARROW_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}
_IN_PLACE = {
    _ARROW_NAMES.get(dtype, dtype): dtype
    for dtype in (*DTYPES, "uint64")
    if dtype not in ("bool", "bfloat16")
}
_ONE_KIND = "a row is a number, a list or a struct of numbers"


@takes(CollectionError, layout=LAYOUT.or_none, fill=BY_NAME.or_none)
def as_collection(
    data: Any, layout: Layout | None = None, *, fill: Mapping[str, Any] | None = None
) -> Collection:
    """Make a collection of `data`, in place where its memory can be bound as it is.

    `data`: a Collection; a dict of columns (NumPy, torch, CuPy, JAX and others with DLPack,
    Arrow, Awkward, pandas, polars, h5py); a structured array; an Arrow table or record batch; an
    Awkward array of flat records; a DataFrame of pandas or polars; a LazyFrame, a
    RecordBatchReader or an Arrow dataset, which are read; a group or compound dataset of h5py; an
    .npz file. A dictionary or category of numbers is decoded. Scalars are single values of a dict.

    With `layout`, such as `session.layout("jets")`, its columns are looked up by name and the
    others ignored; for a `buffer` layout all are copied. Without it every column is taken, as a
    `columns` layout. `fill` has values for missing elements, by column.

    `Collection.copied` names the columns that had to be copied because of chunks, gaps between
    elements, booleans as bits, filled values, files, or too little alignment. A collection with
    copied columns is read-only, because a write to it would not reach `data`. Memory that Arrow,
    Awkward or JAX share is read-only too. uint8 of zeros and ones is accepted for a bool column. A
    CollectionError names the column and what to do.

    Examples
    --------
    >>> jets = as_collection({"pt": np.ones(3, np.float32), "eta": np.zeros(3, np.float32)})
    >>> jets.n, jets.copied
    (3, ())
    """
    if isinstance(data, Collection):
        if layout is None or layout == data.layout:
            return data
        data = to_numpy(data)
    source = named_columns(data)
    values_of = _values_by_name(source, layout, fill or {})
    if layout is None:
        members = [_member_of(name, column.values) for name, column in values_of.items()]
        layout = Layout(members, 1, "columns")
    separate = layout if layout.storage == "columns" else Layout(layout.columns, 1, "columns")
    copied = {name for name, column in values_of.items() if column.copied or source.computed}
    columns: dict[str, Any] = {}
    for member in layout.columns:
        values, alignment = values_of[member.name].values, separate.alignment_of(member.name)
        views = _components(member, values)
        components = [_aligned(view, member.dtype, alignment) for view in views]
        if any(new is not old for new, old in zip(components, views, strict=True)):
            copied.add(member.name)
        if is_opaque(member.dtype) and not np.may_share_memory(views[0], values):
            copied.add(member.name)
        columns[member.name] = components if member.kind == "eigen" else components[0]
    locked = bool(copied) or any(column.locked for column in values_of.values())
    collection = Collection.from_columns(separate, columns, readonly=locked or None)
    if layout is not separate:
        collection, copied = collection.to(collection.device, layout).locked(), set(columns)
    collection.copied = tuple(name for name in columns if name in copied)
    return collection


# -- a column of any library -----------------------------------------------------------------------


def _values_by_name(
    source: NamedColumns, layout: Layout | None, fill: Mapping[str, Any]
) -> dict[str, _Found]:
    """The values of the layout's columns, or without a layout of all columns. CollectionError if
    the source lacks a column of the layout or of `fill`."""
    for name in (*([] if layout is None else layout.by_name), *fill):
        require_column(name, source.names)
    names = source.names if layout is None else list(layout.by_name)
    dtypes = {} if layout is None else {member.name: member.dtype for member in layout.columns}
    return {
        name: _values(_Wanted(name, fill.get(name), dtypes.get(name)), source.column(name))
        for name in names
    }


@dataclass(frozen=True)
class _Wanted:
    """A column that is looked for: the value for its nulls, and the dtype of the layout if any."""

    name: str
    fill: Any = None
    dtype: str | None = None


class _Found(NamedTuple):
    """A column's values: one array `(n, ...)`, or a list with an array `(n,)` for each entry of a
    struct, row by row."""

    values: Any
    copied: bool = False
    """Whether their memory is not that of the source."""
    locked: bool = False
    """Whether the values must not be written."""


def _values(wanted: _Wanted, value: Any) -> _Found:
    """The values as an array of NumPy or torch, in place if possible."""
    library = library_of(value)
    if library == "polars":
        return _arrow(wanted, value.to_arrow())
    if library == "pyarrow":
        return _arrow(wanted, value)
    if library == "pandas" and hasattr(value, "dtype"):
        return _pandas(wanted, value)
    if library == "awkward":
        return _awkward(wanted, value)
    if library == "h5py":
        return _array(wanted, _naming(wanted.name, lambda: value[()]), copied=True)
    if is_tensor(value) and str(value.layout) == "torch.strided":
        return _Found(value.detach())
    protocols = ("__cuda_array_interface__", "__dlpack__")
    if not isinstance(value, np.ndarray) and any(hasattr(value, name) for name in protocols):
        foreign = _naming(wanted.name, lambda: import_bytes(value))
        span = foreign.bytes.at(0, foreign.dtype, *foreign.shape)
        numpy_has_it = span.device.type == "cpu" and foreign.dtype != "bfloat16"
        return _Found(span.numpy() if numpy_has_it else span.tensor(), locked=span.readonly)
    return _array(wanted, value)


def _pandas(wanted: _Wanted, value: Any) -> _Found:
    """The values of a Series of pandas. One of NumPy or Arrow is used in place."""
    if isinstance(value.dtype, np.dtype):
        return _array(wanted, value.to_numpy())
    array = getattr(value, "array", value)
    if hasattr(array, "sp_values"):  # a sparse array, which Arrow does not take
        return _array(wanted, np.asarray(array), copied=True)
    return _arrow(wanted, _to_arrow(array), copied=not hasattr(array.dtype, "pyarrow_dtype"))


def _to_arrow(values: Any) -> Any:
    """The values as an Arrow array."""
    with needs_extra("data", CollectionError):
        import pyarrow as pa

    return pa.array(values)


def _nested(row: Any) -> Any:
    """An array of several axes as lists of arrays, which Arrow takes; any other value as it is."""
    if isinstance(row, np.ndarray) and row.ndim > 1:
        return [_nested(inner) for inner in row]
    return row


def _array(wanted: _Wanted, value: Any, copied: bool = False) -> _Found:
    """The values of a NumPy array, or of what NumPy can read. `copied`: whether `value` is a copy
    already."""
    name, array = wanted.name, value
    if not isinstance(value, np.ndarray):
        array, copied = _naming(name, lambda: np.asarray(value)), True
    if array.dtype == object and (array.ndim == 0 or len(array)):  # pandas and HDF5 have such lists
        lists = _naming(name, lambda: _to_arrow([_nested(row) for row in array]))
        return _arrow(wanted, lists, copied=True)
    if np.ma.is_masked(array):
        count = int(np.ma.getmaskarray(array).sum())
        array, copied = array.filled(_filling(wanted, array.dtype, count)), True
    array = np.ma.getdata(array)
    if not array.dtype.isnative:
        array, copied = array.astype(array.dtype.newbyteorder("=")), True
    return _Found(array, copied, not array.flags.writeable)


def _check_lengths(name: str, counts: Any) -> None:
    """Raise CollectionError for lists of different lengths: they are not vectors."""
    if not len(counts):
        return
    low, high = min(counts), max(counts)
    if low != high:
        raise CollectionError(
            f"column {name!r} is jagged (lists of {low} to {high} items), but a vector has the "
            "same number in every row: use from_jagged if the collection is jagged in the model; "
            "where each item is a row, flatten it first"
        )


def _filling(wanted: _Wanted, dtype: np.dtype[Any], missing: int) -> Any:
    """The number in place of nulls. Raises CollectionError if none was given."""
    name, fill = wanted.name, wanted.fill
    if fill is None:
        trees = ", or float('nan') for boosted trees" if dtype.kind == "f" else ""
        raise CollectionError(
            f"column {name!r} has nulls (missing values: {missing}), and a column needs a value in "
            f"every row: give one, as_collection(…, fill={{{name!r}: 0}}){trees}; or drop those "
            "rows"
        )
    value = _naming(name, lambda: dtype.type(fill))
    if dtype.kind in "biu" and value != fill:
        raise CollectionError(f"column {name!r} is {dtype}, which cannot hold fill={fill!r}")
    return value


def _arrow(wanted: _Wanted, array: Any, copied: bool = False) -> _Found:
    """The values of an Arrow array. Arrow shares its buffers, so they are read-only."""
    import pyarrow as pa

    name = wanted.name
    if isinstance(array, pa.ChunkedArray):
        copied = copied or array.num_chunks > 1
        array = _joined(array)
    if not isinstance(array, pa.Array) or not array.is_cpu:
        raise CollectionError(
            f"column {name!r} is a {type(array).__name__}, not an Arrow array of the CPU"
        )
    plain = plain_arrow(array)
    copied = copied or (plain is not array and not isinstance(array, pa.ExtensionArray))
    array, kind = plain, plain.type
    if pa.types.is_struct(kind):
        entries = [_arrow(wanted, entry, copied) for entry in array.flatten()]
        values = [entry.values for entry in entries]
        return _Found(values, any(entry.copied for entry in entries), locked=True)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _arrow_lists(wanted, array, copied)
    if str(kind) not in (*_IN_PLACE, "bool"):
        raise CollectionError(_no_numbers(wanted, kind))
    bits = pa.types.is_boolean(kind)
    dtype = np.dtype("bool" if bits else _IN_PLACE[str(kind)])
    if array.null_count:
        array = array.fill_null(_filling(wanted, dtype, array.null_count).item())
        copied = True
    if bits:
        return _Found(array.to_numpy(zero_copy_only=False), copied=True, locked=True)
    return _Found(_buffer(array, 1, dtype, len(array)), copied, locked=True)


def _no_numbers(wanted: _Wanted, kind: Any) -> str:
    """The message for an Arrow type that cannot be a column: which, and what to do."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return (
            f"column {wanted.name!r} is a category of {kind.value_type}: give the codes that the "
            "model was trained with (pandas: column.cat.codes), as integers"
        )
    if pa.types.is_nested(kind):
        advice = _ONE_KIND
    elif pa.types.is_temporal(kind):
        advice = "look at the same bytes as integers with view('int64') or view('int32')"
    elif wanted.dtype is None or is_opaque(wanted.dtype):
        advice = f"cast it to one of {', '.join(DTYPES)}"
    else:
        advice = f"cast it to {wanted.dtype}"
    return f"column {wanted.name!r} is {kind}: {advice}"


def _joined(array: Any) -> Any:
    """The chunks of an Arrow array as one; each may have a dictionary of its own."""
    return array.chunk(0) if array.num_chunks == 1 else array.unify_dictionaries().combine_chunks()


def plain_arrow(array: Any) -> Any:
    """An Arrow array of numbers in the plainest form: several chunks become one array, a dictionary
    or runs of numbers are decoded. A tensor of fixed shape becomes nested lists of fixed size, in
    place unless its dimensions are permuted. Any other array is returned as it is."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = _joined(array)
    kind = array.type
    if pa.types.is_dictionary(kind) and str(kind.value_type) in (*_IN_PLACE, "bool"):
        return array.dictionary_decode()
    if pa.types.is_run_end_encoded(kind):
        import pyarrow.compute as pc

        return pc.run_end_decode(array)
    if getattr(kind, "extension_name", "") != "arrow.fixed_shape_tensor":
        return array
    return _tensors_as_lists(array)


def _tensors_as_lists(array: Any) -> Any:
    """An Arrow array of tensors of fixed shape as nested lists of fixed size."""
    import pyarrow as pa

    kind, lists = array.type, array.storage
    shape = tuple(kind.shape)
    values = lists.values.slice(lists.offset * math.prod(shape), len(lists) * math.prod(shape))
    if kind.permutation is not None:
        order = [0, *(1 + axis for axis in kind.permutation)]
        places = np.arange(len(values)).reshape(len(lists), *shape).transpose(order)
        values, shape = values.take(pa.array(places.ravel())), places.shape[1:]
    for size in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    mask = lists.is_null() if lists.null_count else None
    return pa.FixedSizeListArray.from_arrays(values, shape[0], mask=mask)


def _arrow_lists(wanted: _Wanted, array: Any, copied: bool) -> _Found:
    """Lists of one length as vectors. With `fill`, each element of a null list has that value."""
    valid = None
    if array.null_count:
        if wanted.fill is None:
            raise CollectionError(
                f"column {wanted.name!r} has no list in {array.null_count} rows: drop these rows, "
                "put lists there, or give the value of their elements (fill)"
            )
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        array = array.drop_null()
    width = _width(wanted.name, array)
    inner = _arrow(wanted, array.flatten(), copied)
    if isinstance(inner.values, list):
        raise CollectionError(f"column {wanted.name!r} has lists of structs: {_ONE_KIND}")
    lists = inner.values.reshape(len(array), width, *inner.values.shape[1:])
    if valid is None:
        return inner._replace(values=lists)
    value = _filling(wanted, lists.dtype, int((~valid).sum()))
    filled = np.full((len(valid), *lists.shape[1:]), value, lists.dtype)
    filled[valid] = lists
    return _Found(filled, copied=True, locked=True)


def _width(name: str, lists: Any) -> int:
    """The number of entries that every one of Arrow's lists has; CollectionError if they differ.
    No list is null."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(lists.type):
        return int(lists.type.list_size)
    offset_dtype = np.int64 if pa.types.is_large_list(lists.type) else np.int32
    counts = np.diff(_buffer(lists, 1, offset_dtype, len(lists) + 1))
    _check_lengths(name, counts)
    return int(counts[0]) if len(counts) else 0


def _buffer(array: Any, i: int, dtype: Any, count: int) -> Any:
    """Buffer `i` of an Arrow array as NumPy elements. Arrow's own to_numpy would import pandas."""
    buffer, dtype = array.buffers()[i], np.dtype(dtype)
    if buffer is None or not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, count, array.offset * dtype.itemsize)


def unmasked(content: Any) -> Any:
    """Awkward's content without its mask for missing values, if no value is missing."""
    if not content.is_option or content.is_indexed or content.mask_as_bool(False).any():
        return content
    return content.content[: content.length]


def _awkward(wanted: _Wanted, array: Any) -> _Found:
    """The values of an Awkward array. Awkward shares its buffers, so they are read-only."""
    import awkward as ak

    content = unmasked(ak.materialize(array).layout)
    if content.is_numpy:
        return _values(wanted, content.data)._replace(locked=True)
    copied = content.is_option or content.is_indexed
    return _arrow(wanted, ak.to_arrow(ak.Array(content), extensionarray=False), copied)


def _naming(name: str, convert: Callable[[], Any]) -> Any:
    """The result of `convert`; if that raises an error, a CollectionError that names the column."""
    try:
        return convert()
    except (CollectionError, OverflowError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None


# -- convert columns to what a layout asks for -----------------------------------------------------


def _member_of(name: Any, values: Any) -> Column:
    """Derive the member for values without a layout; LayoutError if no member can hold them."""
    if isinstance(values, list):
        raise CollectionError(
            f"column {name!r} has several entries an element: give the layout that says "
            "which Eigen object they are"
        )
    shape = tuple(values.shape[1:])
    kind: Kind = "eigen" if shape else "column"
    if values.ndim == 0:
        kind = "scalar"
    return Column(str(name), dtype_name(values.dtype), kind, shape)


def _components(member: Column, values: Any) -> list[Any]:
    """Values as a member's physical columns in storage order, as views if possible."""
    if is_opaque(member.dtype) and not isinstance(values, list):
        return [_naming(member.name, lambda: as_opaque(member, values))]
    entries = _entries(member, values)
    by_component = {
        member.component_of(i): _of_dtype(member, entry) for i, entry in enumerate(entries)
    }
    return [by_component[k] for k in range(member.components)]


def _entries(member: Column, values: Any) -> list[Any]:
    """The entries of a member of numbers, row by row, each `(n,)`; of a scalar, `(1,)`.
    CollectionError if the values do not have the member's shape."""
    if isinstance(values, list):
        if member.kind != "eigen" or len(values) != member.components:
            raise _unlike_layout(member, f"a struct of {len(values)} an element")
        return values
    if member.kind == "scalar":
        if values.shape not in ((), (1,)):
            raise _unlike_layout(member, f"shape {tuple(values.shape)}, not one value")
        return [values.reshape(1)]
    if member.kind == "eigen":
        values = _as_eigen(member, values)
    if values.ndim == 0 or tuple(values.shape[1:]) != member.shape:
        raise _unlike_layout(member, f"shape {tuple(values.shape)}")
    return [values[(slice(None), *index)] for index in np.ndindex(*member.shape)]


def _unlike_layout(member: Column, found: str) -> CollectionError:
    """The error about values of another shape than the layout says."""
    shape = f" {list(member.shape)}" if member.shape else ""
    return CollectionError(
        f"column {member.name!r} is {member.kind}{shape} in the layout; found {found}"
    )


def _as_eigen(member: Column, values: Any) -> Any:
    """Values for an Eigen column. Those without rows get the member's shape, because empty lists
    have none; rows of more than two axes, such as images with channels, become vectors."""
    no_rows = isinstance(values, np.ndarray) and values.shape[:1] == (0,)
    if no_rows and (0 in values.shape[1:] or values.dtype.hasobject):
        dtype = numpy_dtype(member.dtype) if values.dtype.hasobject else values.dtype
        return np.zeros((0, *member.shape), dtype)
    if values.ndim > 3 and member.shape == (math.prod(values.shape[1:]),):
        return values.reshape(len(values), -1)
    return values


def _of_dtype(member: Column, values: Any) -> Any:
    """Values of the member's dtype. Bytes that are all 0 or 1 are accepted as bool."""
    dtype = dtype_name(values.dtype)
    if (member.dtype, dtype) != ("bool", "uint8"):
        check_dtype(member, dtype, repr(member.name))
        return values
    if len(values) and int(values.max()) > 1:
        raise CollectionError(
            f"column {member.name!r} is uint8 with other values than 0 and 1, and the layout "
            "says bool: compare it (!= 0), or write dtype: uint8 in the model's config"
        )
    if is_tensor(values):
        import torch

        return values.view(torch.bool)
    return values.view(np.bool_)


def _aligned(column: Any, dtype: str, alignment: int) -> Any:
    """The column itself if it is dense and aligned, else an aligned copy."""
    dense = column.is_contiguous() if is_tensor(column) else column.flags.c_contiguous
    address = column.data_ptr() if is_tensor(column) else column.ctypes.data
    if dense and (not len(column) or address % alignment == 0):
        return column
    device = Device(column.device) if is_tensor(column) else Device()
    span = allocate(column.nbytes, max(alignment, DEFAULT_ALIGNMENT), device)
    span = span.at(0, dtype, *column.shape)
    span.store(column)
    return span.tensor() if is_tensor(column) else span.numpy()
