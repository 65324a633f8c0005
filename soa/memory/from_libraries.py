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
        members = [_derive_member(name, column.values) for name, column in values_of.items()]
        layout = Layout(members, storage="columns")
    separate = layout if layout.storage == "columns" else Layout(layout.columns, storage="columns")
    copied = {name for name, column in values_of.items() if column.copied or source.computed}
    columns: dict[str, Any] = {}
    for member in layout.columns:
        values, alignment = values_of[member.name].values, separate.alignment_of(member.name)
        views = _split_components(member, values)
        components = [_align(view, member.dtype, alignment) for view in views]
        realigned = any(new is not view for new, view in zip(components, views, strict=True))
        if realigned or (is_opaque(member.dtype) and not np.may_share_memory(views[0], values)):
            copied.add(member.name)
        columns[member.name] = components if member.kind == "eigen" else components[0]
    readonly = bool(copied) or any(column.locked for column in values_of.values())
    # None: it is read-only if the memory of a column is.
    collection = Collection.from_columns(separate, columns, readonly=readonly or None)
    if layout is not separate:
        collection, copied = collection.to(collection.device, layout).locked(), set(columns)
    collection.copied = tuple(name for name in columns if name in copied)
    return collection


# -- a column of any library -----------------------------------------------------------------------


def _values_by_name(
    source: NamedColumns, layout: Layout | None, fill: Mapping[str, Any]
) -> dict[str, _ColumnValues]:
    """Read the columns of the layout, or all columns if there is no layout.

    Raises CollectionError if the source lacks a column that the layout or `fill` names.
    """
    names = source.names if layout is None else list(layout.by_name)
    for name in (*names, *fill):
        require_column(name, source.names)
    dtypes = {} if layout is None else {member.name: member.dtype for member in layout.columns}
    return {
        name: _read_values(_Wanted(name, fill.get(name), dtypes.get(name)), source.column(name))
        for name in names
    }


@dataclass(frozen=True)
class _Wanted:
    """A column to read: its name, the value for its nulls, and its dtype in the layout if any."""

    name: str
    fill: Any = None
    dtype: str | None = None


class _ColumnValues(NamedTuple):
    """A column's values: an array `(n, ...)`; for structs, a list of one array `(n,)` an entry."""

    values: Any
    copied: bool = False
    """Whether the values are a copy of the source's memory."""
    locked: bool = False
    """Whether the values must not be written."""


def _read_values(wanted: _Wanted, value: Any) -> _ColumnValues:
    """Read a column of any library as an array of NumPy or torch, in place if possible."""
    library = library_of(value)
    if library == "polars":
        return _read_arrow(wanted, value.to_arrow())
    if library == "pyarrow":
        return _read_arrow(wanted, value)
    if library == "pandas" and hasattr(value, "dtype"):
        return _read_pandas(wanted, value)
    if library == "awkward":
        return _read_awkward(wanted, value)
    if library == "h5py":
        return _read_array(wanted, _convert_column(wanted.name, lambda: value[()]), copied=True)
    if is_tensor(value) and str(value.layout) == "torch.strided":
        return _ColumnValues(value.detach())
    protocols = ("__cuda_array_interface__", "__dlpack__")
    if not isinstance(value, np.ndarray) and any(hasattr(value, name) for name in protocols):
        foreign = _convert_column(wanted.name, lambda: import_bytes(value))
        span = foreign.bytes.at(0, foreign.dtype, *foreign.shape)
        numpy_has_it = span.device.type == "cpu" and foreign.dtype != "bfloat16"
        return _ColumnValues(span.numpy() if numpy_has_it else span.tensor(), locked=span.readonly)
    return _read_array(wanted, value)


def _read_pandas(wanted: _Wanted, value: Any) -> _ColumnValues:
    """Read a pandas Series. If its memory is that of NumPy or Arrow, it is used in place."""
    if isinstance(value.dtype, np.dtype):
        return _read_array(wanted, value.to_numpy())
    array = getattr(value, "array", value)
    if hasattr(array, "sp_values"):  # a sparse array, which Arrow does not take
        return _read_array(wanted, np.asarray(array), copied=True)
    return _read_arrow(wanted, _to_arrow(array), copied=not hasattr(array.dtype, "pyarrow_dtype"))


def _to_arrow(values: Any) -> Any:
    """Convert values to an Arrow array."""
    with needs_extra("data", CollectionError):
        import pyarrow as pa

    return pa.array(values)


def _as_nested_lists(row: Any) -> Any:
    """Convert an array of several axes to lists of arrays, which Arrow takes; keep other values."""
    if isinstance(row, np.ndarray) and row.ndim > 1:
        return [_as_nested_lists(inner) for inner in row]
    return row


def _read_array(wanted: _Wanted, value: Any, copied: bool = False) -> _ColumnValues:
    """Read a NumPy array, or what NumPy can make one of. `copied`: `value` is a copy already."""
    name, array = wanted.name, value
    if not isinstance(value, np.ndarray):
        array, copied = _convert_column(name, lambda: np.asarray(value)), True
    if array.dtype == object and (array.ndim == 0 or len(array)):  # pandas and HDF5 have such lists
        lists = _convert_column(name, lambda: _to_arrow([_as_nested_lists(row) for row in array]))
        return _read_arrow(wanted, lists, copied=True)
    if np.ma.is_masked(array):
        count = int(np.ma.getmaskarray(array).sum())
        array, copied = array.filled(_fill_value(wanted, array.dtype, count)), True
    array = np.ma.getdata(array)
    if not array.dtype.isnative:
        array, copied = array.astype(array.dtype.newbyteorder("=")), True
    return _ColumnValues(array, copied, locked=not array.flags.writeable)


def _require_one_length(name: str, counts: Any) -> None:
    """Raise CollectionError if the lists of a column have different lengths (`counts`)."""
    if not len(counts):
        return
    low, high = min(counts), max(counts)
    if low != high:
        raise CollectionError(
            f"column {name!r} is jagged (lists of {low} to {high} items), but a vector has the "
            "same number in every row: use from_jagged if the collection is jagged in the model; "
            "where each item is a row, flatten it first"
        )


def _fill_value(wanted: _Wanted, dtype: np.dtype[Any], missing: int) -> Any:
    """Return the number that replaces nulls, as `dtype`; raise CollectionError if there is none.

    `missing` is how many nulls there are, for the message.
    """
    name, fill = wanted.name, wanted.fill
    if fill is None:
        trees = ", or float('nan') for boosted trees" if dtype.kind == "f" else ""
        raise CollectionError(
            f"column {name!r} has nulls (missing values: {missing}), and a column needs a value in "
            f"every row: give one, as_collection(…, fill={{{name!r}: 0}}){trees}; or drop those "
            "rows"
        )
    value = _convert_column(name, lambda: dtype.type(fill))
    if dtype.kind in "biu" and value != fill:
        raise CollectionError(f"column {name!r} is {dtype}, which cannot hold fill={fill!r}")
    return value


def _read_arrow(wanted: _Wanted, array: Any, copied: bool = False) -> _ColumnValues:
    """Read an Arrow array. The values are read-only, since Arrow shares its buffers."""
    import pyarrow as pa

    name = wanted.name
    if isinstance(array, pa.ChunkedArray):
        copied = copied or array.num_chunks > 1
        array = _join_chunks(array)
    if not isinstance(array, pa.Array) or not array.is_cpu:
        raise CollectionError(
            f"column {name!r} is a {type(array).__name__}, not an Arrow array of the CPU"
        )
    plain = plain_arrow(array)
    copied = copied or (plain is not array and not isinstance(array, pa.ExtensionArray))
    array, kind = plain, plain.type
    if pa.types.is_struct(kind):
        entries = [_read_arrow(wanted, entry, copied) for entry in array.flatten()]
        values = [entry.values for entry in entries]
        return _ColumnValues(values, any(entry.copied for entry in entries), locked=True)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _read_arrow_lists(wanted, array, copied)
    if str(kind) not in (*_IN_PLACE, "bool"):
        raise CollectionError(_type_message(wanted, kind))
    as_bits = pa.types.is_boolean(kind)
    dtype = np.dtype("bool" if as_bits else _IN_PLACE[str(kind)])
    if array.null_count:
        array = array.fill_null(_fill_value(wanted, dtype, array.null_count).item())
        copied = True
    if as_bits:
        return _ColumnValues(array.to_numpy(zero_copy_only=False), copied=True, locked=True)
    return _ColumnValues(_view_buffer(array, dtype, len(array)), copied, locked=True)


def _type_message(wanted: _Wanted, kind: Any) -> str:
    """Return the message about an Arrow type that cannot be a column, with what to do."""
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


def _join_chunks(array: Any) -> Any:
    """Join the chunks of an Arrow array to one array; each may have a dictionary of its own."""
    return array.chunk(0) if array.num_chunks == 1 else array.unify_dictionaries().combine_chunks()


def plain_arrow(array: Any) -> Any:
    """Return an Arrow array of numbers in its plainest form.

    Several chunks become one array; a dictionary, or runs, of numbers are decoded. Tensors of fixed
    shape become nested lists of fixed size, in place unless their dimensions are permuted. Any
    other array is returned as it is.
    """
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = _join_chunks(array)
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
    """Convert an Arrow array of tensors of fixed shape to nested lists of fixed size."""
    import pyarrow as pa

    kind, lists = array.type, array.storage
    shape = tuple(kind.shape)
    values = lists.values.slice(lists.offset * math.prod(shape), len(lists) * math.prod(shape))
    if kind.permutation is not None:  # take the values in the order of the permuted axes
        order = [0, *(1 + axis for axis in kind.permutation)]
        indices = np.arange(len(values)).reshape(len(lists), *shape).transpose(order)
        values, shape = values.take(pa.array(indices.ravel())), indices.shape[1:]
    for size in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    mask = lists.is_null() if lists.null_count else None
    return pa.FixedSizeListArray.from_arrays(values, shape[0], mask=mask)


def _read_arrow_lists(wanted: _Wanted, array: Any, copied: bool) -> _ColumnValues:
    """Read lists that all have the same length as one array `(n, width, ...)`.

    With `wanted.fill`, a null list becomes one whose elements have that value.
    """
    valid = None  # which lists are not null, if some are
    if array.null_count:
        if wanted.fill is None:
            raise CollectionError(
                f"column {wanted.name!r} has no list in {array.null_count} rows: drop these rows, "
                "put lists there, or give the value of their elements (fill)"
            )
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        array = array.drop_null()
    width = _common_width(wanted.name, array)
    inner = _read_arrow(wanted, array.flatten(), copied)
    if isinstance(inner.values, list):
        raise CollectionError(f"column {wanted.name!r} has lists of structs: {_ONE_KIND}")
    lists = inner.values.reshape(len(array), width, *inner.values.shape[1:])
    if valid is None:
        return inner._replace(values=lists)
    value = _fill_value(wanted, lists.dtype, int((~valid).sum()))
    filled = np.full((len(valid), *lists.shape[1:]), value, lists.dtype)
    filled[valid] = lists
    return _ColumnValues(filled, copied=True, locked=True)


def _common_width(name: str, lists: Any) -> int:
    """Return the number of entries that each of Arrow's lists has; no list may be null.

    Raises CollectionError if the lists have different lengths.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(lists.type):
        return int(lists.type.list_size)
    offset_dtype = np.int64 if pa.types.is_large_list(lists.type) else np.int32
    counts = np.diff(_view_buffer(lists, offset_dtype, len(lists) + 1))
    _require_one_length(name, counts)
    return int(counts[0]) if len(counts) else 0


def _view_buffer(array: Any, dtype: Any, count: int) -> Any:
    """View `count` values of an Arrow array, or offsets of lists, as a NumPy array.

    Arrow's own `to_numpy` would import pandas.
    """
    buffer, dtype = array.buffers()[1], np.dtype(dtype)  # buffer 0 says which values are null
    if buffer is None or not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, count, array.offset * dtype.itemsize)


def drop_empty_mask(content: Any) -> Any:
    """Return an Awkward content without its mask of missing values, if no value is missing."""
    if not content.is_option or content.is_indexed or content.mask_as_bool(False).any():
        return content
    return content.content[: content.length]


def _read_awkward(wanted: _Wanted, array: Any) -> _ColumnValues:
    """Read an Awkward array. The values are read-only, since Awkward shares its buffers."""
    import awkward as ak

    content = drop_empty_mask(ak.materialize(array).layout)
    if content.is_numpy:
        return _read_values(wanted, content.data)._replace(locked=True)
    copied = content.is_option or content.is_indexed
    return _read_arrow(wanted, ak.to_arrow(ak.Array(content), extensionarray=False), copied)


def _convert_column(name: str, convert: Callable[[], Any]) -> Any:
    """Return the result of `convert`; its errors become a CollectionError that names the column."""
    try:
        return convert()
    except (CollectionError, OverflowError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None


# -- convert columns to what a layout asks for -----------------------------------------------------


def _derive_member(name: Any, values: Any) -> Column:
    """Derive a layout's member from values. Raises LayoutError if no member can hold them."""
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


def _split_components(member: Column, values: Any) -> list[Any]:
    """Split values into a member's physical columns in storage order, as views if possible."""
    if is_opaque(member.dtype) and not isinstance(values, list):
        return [_convert_column(member.name, lambda: as_opaque(member, values))]
    entries = _split_entries(member, values)
    by_component = {
        member.component_of(i): _require_dtype(member, entry) for i, entry in enumerate(entries)
    }
    return [by_component[k] for k in range(member.components)]


def _split_entries(member: Column, values: Any) -> list[Any]:
    """Split the values of a member into its entries, row by row.

    Each is an array `(n,)`; that of a scalar is `(1,)`. Raises CollectionError if the values do not
    have the member's shape.
    """
    if isinstance(values, list):
        if member.kind != "eigen" or len(values) != member.components:
            raise _layout_error(member, f"a struct of {len(values)} an element")
        return values
    if member.kind == "scalar":
        if values.shape not in ((), (1,)):
            raise _layout_error(member, f"shape {tuple(values.shape)}, not one value")
        return [values.reshape(1)]
    if member.kind == "eigen":
        values = _adapt_eigen(member, values)
    if values.ndim == 0 or tuple(values.shape[1:]) != member.shape:
        raise _layout_error(member, f"shape {tuple(values.shape)}")
    return [values[(slice(None), *index)] for index in np.ndindex(*member.shape)]


def _layout_error(member: Column, found: str) -> CollectionError:
    """Return the error about values whose shape is not that of the layout."""
    shape = f" {list(member.shape)}" if member.shape else ""
    return CollectionError(
        f"column {member.name!r} is {member.kind}{shape} in the layout; found {found}"
    )


def _adapt_eigen(member: Column, values: Any) -> Any:
    """Adapt the shape of an Eigen column's values to the layout where this loses nothing.

    Values without rows get the member's shape, because empty lists have none. Rows of more than two
    axes, such as images with channels, become vectors if the layout says so.
    """
    no_rows = isinstance(values, np.ndarray) and values.shape[:1] == (0,)
    if no_rows and (0 in values.shape[1:] or values.dtype.hasobject):
        dtype = numpy_dtype(member.dtype) if values.dtype.hasobject else values.dtype
        return np.zeros((0, *member.shape), dtype)
    if values.ndim > 3 and member.shape == (math.prod(values.shape[1:]),):
        return values.reshape(len(values), -1)
    return values


def _require_dtype(member: Column, values: Any) -> Any:
    """Return values that have the member's dtype; uint8 of zeros and ones is viewed as bool.

    Raises CollectionError for values of another dtype.
    """
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


def _align(column: Any, dtype: str, alignment: int) -> Any:
    """Return the column itself if it is dense and aligned, or else an aligned copy."""
    dense = column.is_contiguous() if is_tensor(column) else column.flags.c_contiguous
    address = column.data_ptr() if is_tensor(column) else column.ctypes.data
    if dense and (not len(column) or address % alignment == 0):
        return column
    device = Device(column.device) if is_tensor(column) else Device()
    span = allocate(column.nbytes, max(alignment, DEFAULT_ALIGNMENT), device)
    span = span.at(0, dtype, *column.shape)
    span.store(column)
    return span.tensor() if is_tensor(column) else span.numpy()
