"""Columns that other libraries hold, as a Collection: in place where they can, else copied.

`as_collection` is the one way in, and says which columns it copied. An Eigen column is a struct (Arrow) or a record (Awkward)
of its entries, row by row: `e0, e1, ...` of a vector, `e0_0, e0_1, ...` of a matrix; or an array
`(n, r)` or `(n, r, c)`, of which only Fortran's order has each entry as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from soa.dtypes import DTYPES, dtype_name, is_opaque
from soa.errors import CollectionError
from soa.layout import DEFAULT_ALIGNMENT, Column, Layout
from soa.memory.collection import Collection
from soa.memory.foreign import as_opaque, check_dtype, import_bytes
from soa.memory.outgoing import to_numpy
from soa.memory.span import Array, Device, allocate, is_tensor

if TYPE_CHECKING:
    import awkward as ak
    import pyarrow as pa
    import torch

# Arrow's types of the same bytes, by its names. It has no bfloat16, and its bool is one bit.
_ARROW_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}
_IN_PLACE = [_ARROW_NAMES.get(d, d) for d in (*DTYPES, "uint64") if d not in ("bool", "bfloat16")]


def as_collection(
    data: Any, layout: Layout | None = None, *, fill: Mapping[str, Any] | None = None
) -> Collection:
    """`data` as a collection, in place where its memory can be bound as it is.

    `data`: a Collection; a dict of columns (NumPy, torch, CuPy, JAX and whatever else speaks DLPack,
    Arrow, Awkward, pandas, polars, h5py); a structured array; an Arrow table or record batch; an
    Awkward array of flat records; a DataFrame of pandas or polars; a group or compound dataset of
    h5py; an .npz file. Scalars are single values of a dict.

    With `layout` (a model's: `session.layout("jets")`) its columns are looked up by name and the
    others left alone; a `buffer` layout takes a copy of all. Without, every column is taken, each in
    memory of its own. `fill` has a value by column for what is missing there.

    `Collection.copied` names the columns that had to be copied: chunks, gaps between elements, bits
    for booleans, filled values, files, an alignment that is not there. Such a collection is
    read-only, as what is written to it would not reach `data`; so is memory that Arrow, Awkward or
    JAX share. uint8 of zeros and ones is a bool column. CollectionError names the column, and what
    to do.
    """
    if isinstance(data, Collection):
        if layout is None or layout == data.layout:
            return data
        data = to_numpy(data)
    source = _source(data)
    wanted = source.names if layout is None else [c.name for c in layout.columns]
    for name in (*wanted, *(fill or ())):
        if name not in source.names:
            raise CollectionError(
                f"no column {name!r}, there are: {', '.join(map(str, source.names))}"
            )
    found = {
        name: _values(name, source.column(name), (fill or {}).get(name)) for name in wanted
    }
    if layout is None:
        layout = Layout([_member_of(name, each) for name, each in found.items()], 1, "columns")
    parts = {c.name: _parts(c, found[c.name]) for c in layout.columns}
    lengths = {c.name: len(parts[c.name].parts[0]) for c in layout.columns if c.kind != "scalar"}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise CollectionError(f"columns of different lengths: {shown}")
    if layout.storage == "buffer":
        made = _in_one_buffer(layout, parts, max(lengths.values(), default=0))
        made.copied = tuple(parts)
    else:
        made, moved = _in_columns(layout, parts)
        every = (c.name for c in layout.columns)
        made.copied = tuple(n for n in every if source.loads or parts[n].copied or n in moved)
    made.readonly = made.readonly or bool(made.copied)
    return made


# -- what is there -------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Columns by name. `loads`: each is read from a file, into new memory."""

    names: Sequence[Any]
    column: Callable[[Any], Any]
    loads: bool = False


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _source(data: Any) -> _Source:
    library = _library(data)
    if library == "polars" and hasattr(data, "columns"):
        data, library = data.to_arrow(), "pyarrow"
    if library == "pyarrow" and hasattr(data, "schema"):
        return _once(_Source(data.schema.names, data.column))
    if library == "pandas" and hasattr(data, "columns"):
        return _once(_Source(list(data.columns), data.__getitem__))
    if library == "awkward" and data.fields:
        return _Source(data.fields, data.__getitem__)
    if isinstance(data, Mapping):
        return _Source(list(data), data.__getitem__, library in ("h5py", "numpy"))
    if names := getattr(getattr(data, "dtype", None), "names", None):  # of a structured array
        return _Source(names, data.__getitem__, library == "h5py")
    raise CollectionError(
        f"a {type(data).__name__} has no columns with names: give a dict of columns, a structured "
        "array, a table or flat records; one buffer is Collection.wrap(layout, memory, n)"
    )


def _once(source: _Source) -> _Source:
    twice = [name for i, name in enumerate(source.names) if name in source.names[:i]]
    if twice:
        raise CollectionError(f"two columns are called {twice[0]!r}: rename one")
    return source


class _Found(NamedTuple):
    """A column's values: an array `(n, ...)`, or those of each entry of a struct, row by row."""

    values: Any
    copied: bool = False
    locked: bool = False
    """Whether nobody may write there."""


def _values(name: str, value: Any, fill: Any) -> _Found:
    """A column of whatever library as NumPy's or torch's array, in place where that can be."""
    library, copied = _library(value), False
    if library == "polars":
        value, library = value.to_arrow(), "pyarrow"
    elif library == "pandas":
        if isinstance(value.dtype, np.dtype):
            value = value.to_numpy()
        elif hasattr(value.array, "__arrow_array__"):
            copied, library = not hasattr(value.dtype, "pyarrow_dtype"), "pyarrow"
            value = value.array.__arrow_array__()
    if library == "pyarrow":
        return _arrow(name, value, fill, copied)
    if library == "awkward":
        return _awkward(name, value, fill)
    if library == "h5py":
        return _array(name, _named(name, lambda: value[()]), fill, copied=True)
    if is_tensor(value) and str(value.layout) == "torch.strided":
        return _Found(value.detach())
    exporters = ("__cuda_array_interface__", "__dlpack__")
    if not isinstance(value, np.ndarray) and any(hasattr(value, each) for each in exporters):
        found = _named(name, lambda: import_bytes(value))
        span = found.bytes.at(0, found.dtype, *found.shape)
        numpy = span.device.type == "cpu" and found.dtype != "bfloat16"
        return _Found(span.numpy() if numpy else span.tensor(), locked=span.readonly)
    return _array(name, value, fill)


def _array(name: str, value: Any, fill: Any, copied: bool = False) -> _Found:
    array = value if isinstance(value, np.ndarray) else _named(name, lambda: np.asarray(value))
    copied = copied or array is not value
    if array.dtype.hasobject:
        raise CollectionError(
            f"column {name!r} holds Python objects, such as strings or lists: a column has one "
            "number for each element"
        )
    if isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array):
            count = int(np.ma.count_masked(array))
            array, copied = array.filled(_filling(name, fill, array.dtype, count)), True
        array = np.ma.getdata(array)
    if not array.dtype.isnative:
        array, copied = array.astype(array.dtype.newbyteorder("=")), True
    return _Found(array, copied, not array.flags.writeable)


def _filling(name: str, fill: Any, dtype: np.dtype[Any], missing: int) -> Any:
    if fill is None:
        raise CollectionError(
            f"column {name!r} has {missing} missing values (nulls), and a column has a value in "
            f"every place: say which, as_collection(…, fill={{{name!r}: 0}}), or drop those rows"
        )
    value = _named(name, lambda: dtype.type(fill))
    if dtype.kind in "biu" and value != fill:
        raise CollectionError(f"column {name!r} is {dtype}, which has no {fill!r} to fill in")
    return value


def _arrow(name: str, array: Any, fill: Any, copied: bool = False) -> _Found:
    """Arrow's values; it shares its buffers freely and never writes to them."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        copied = copied or array.num_chunks > 1
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if not isinstance(array, pa.Array):
        raise CollectionError(f"column {name!r} is a {type(array).__name__}, not an Arrow array")
    if not array.is_cpu:
        raise CollectionError(f"column {name!r} lies on a GPU: give it as CuPy or torch columns")
    if isinstance(array, pa.StructArray):
        entries = [_arrow(name, part, fill, copied) for part in array.flatten()]
        return _Found([e.values for e in entries], any(e.copied for e in entries), True)
    if array.null_count and str(array.type) in (*_IN_PLACE, "bool"):
        kind = np.dtype(array.type.to_pandas_dtype())
        array = array.fill_null(_filling(name, fill, kind, array.null_count).item())
        copied = True
    if pa.types.is_fixed_size_list(array.type) and not array.null_count:
        inner = _arrow(name, array.flatten(), fill, copied)
        rows = (len(array), array.type.list_size)
        return inner._replace(values=inner.values.reshape(*rows, *inner.values.shape[1:]))
    if pa.types.is_boolean(array.type):
        return _Found(array.to_numpy(zero_copy_only=False), True, True)
    if str(array.type) not in _IN_PLACE:
        raise CollectionError(f"column {name!r} is {array.type}: {_arrow_advice(array.type)}")
    return _Found(array.to_numpy(), copied, True)


def _arrow_advice(kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_nested(kind):
        return "a column has one value for each element; flatten it first"
    if pa.types.is_temporal(kind):
        return "look at the same bytes as integers with view('int64') or view('int32')"
    return f"cast it to one of bool, {', '.join(_IN_PLACE)}"


def _awkward(name: str, array: ak.Array, fill: Any) -> _Found:
    """Awkward's values; it too shares its buffers freely."""
    import awkward as ak

    content: Any = ak.materialize(array).layout
    if isinstance(content, ak.contents.RecordArray):
        entries = [_awkward(name, array[field], fill) for field in content.fields]
        return _Found([e.values for e in entries], any(e.copied for e in entries), True)
    if not content.purelist_isregular or content.is_union:
        kind = type(content).__name__
        how = ": flatten it first (ak.flatten)" if content.purelist_depth > 1 else ""
        what = "jagged " if how else ""
        raise CollectionError(f"column {name!r} is {what}({kind}){how}")
    if content.is_option:
        return _array(name, ak.to_numpy(array), fill, copied=True)._replace(locked=True)
    copied = content.is_indexed
    if copied:
        content = ak.to_packed(content)
    if content.is_list:
        return _array(name, ak.to_numpy(array), fill, copied)._replace(locked=True)
    if not content.is_numpy:
        raise CollectionError(f"column {name!r} is a {type(content).__name__}: not numbers")
    return _values(name, content.data, fill)._replace(copied=copied, locked=True)


def _named(name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives; its errors name the column."""
    try:
        return make()
    except (CollectionError, OverflowError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None


# -- as a layout wants it ------------------------------------------------------------------------


class _Parts(NamedTuple):
    """A member's physical columns, in the order of storage."""

    parts: list[Any]
    copied: bool
    locked: bool


def _member_of(name: str, found: _Found) -> Column:
    """The member that values are, where no layout says it."""
    if isinstance(found.values, list):
        raise CollectionError(
            f"column {name!r} has several entries an element: give the layout that says "
            "which Eigen object they are"
        )
    dtype = dtype_name(found.values.dtype)
    if dtype not in (*DTYPES, "uint64") and not is_opaque(dtype):
        raise CollectionError(
            f"column {name!r} is {dtype}: convert it to one of {', '.join(DTYPES)}"
        )
    shape = tuple(found.values.shape[1:])
    if found.values.ndim == 0:
        return Column(str(name), dtype, "scalar")
    return Column(str(name), dtype, "eigen" if shape else "column", shape)


def _parts(member: Column, found: _Found) -> _Parts:
    """Values as the physical columns of a member, views still; CollectionError if they are not."""
    name, values, copied = member.name, found.values, found.copied
    if is_opaque(member.dtype) and not isinstance(values, list):
        rows = _named(name, lambda: as_opaque(member, values))
        return _Parts([rows], copied or not np.may_share_memory(rows, values), found.locked)
    if isinstance(values, list):
        if member.kind != "eigen" or len(values) != member.components:
            raise CollectionError(
                f"column {name!r} is {member.kind} {list(member.shape)} in the layout; the data has "
                f"a struct of {len(values)} for each element"
            )
        entries = values
    elif member.kind == "scalar":
        if values.shape not in ((), (1,)):
            raise CollectionError(
                f"{name!r} is a scalar of the collection, one value; found shape "
                f"{tuple(values.shape)}: in a dict, give it as one"
            )
        entries = [values.reshape(1)]
    else:
        if values.ndim == 0 or tuple(values.shape[1:]) != member.shape:
            raise CollectionError(
                f"column {name!r} is {member.kind} {list(member.shape)} in the layout; the data has "
                f"shape {tuple(values.shape)}"
            )
        entries = [values[(slice(None), *index)] for index in np.ndindex(*member.shape)]
    place = {
        member.component_of(i): _of_dtype(member, entry) for i, entry in enumerate(entries)
    }
    return _Parts([place[k] for k in range(member.components)], copied, found.locked)


def _of_dtype(member: Column, values: Any) -> Any:
    dtype = dtype_name(values.dtype)
    if (member.dtype, dtype) == ("bool", "uint8"):
        if len(values) and int(values.max()) > 1:
            raise CollectionError(
                f"column {member.name!r} is uint8 with other values than 0 and 1, and the layout "
                "says bool: compare it (!= 0), or write dtype: uint8 in the model's config"
            )
        if is_tensor(values):
            import torch

            return values.view(torch.bool)
        return values.view(np.bool_)
    check_dtype(member, dtype, repr(member.name))
    return values


def _in_columns(layout: Layout, found: Mapping[str, _Parts]) -> tuple[Collection, set[str]]:
    """The parts as separate columns, and the names of those that could not stay where they are."""
    moved: set[str] = set()
    pieces: dict[str, Any] = {}
    for member in layout.columns:
        alignment = layout.alignment_of(member.name)
        made = []
        for part in found[member.name].parts:
            if not _fits(part, alignment):
                moved.add(member.name)
                part = _aligned(part, member.dtype, alignment)
            made.append(part)
        pieces[member.name] = made if member.kind == "eigen" else made[0]
    locked = any(each.locked for each in found.values())
    return Collection.from_columns(layout, pieces, readonly=locked or None), moved


def _fits(part: Array | torch.Tensor, alignment: int) -> bool:
    if is_tensor(part):
        return part.is_contiguous() and (not part.numel() or part.data_ptr() % alignment == 0)
    return part.flags.c_contiguous and (not part.size or part.ctypes.data % alignment == 0)


def _aligned(part: Array | torch.Tensor, dtype: str, alignment: int) -> Array | torch.Tensor:
    """A copy in memory of its own."""
    device = Device(part.device) if is_tensor(part) else Device()
    nbytes, alignment = part.nbytes, max(alignment, DEFAULT_ALIGNMENT)
    span = allocate(nbytes, alignment, device).at(0, dtype, *part.shape)
    span.store(part)
    return span.tensor() if is_tensor(part) else span.numpy()


def _in_one_buffer(layout: Layout, found: Mapping[str, _Parts], n: int) -> Collection:
    every = (part for each in found.values() for part in each.parts)
    device = next((Device(part.device) for part in every if is_tensor(part)), Device())
    made = Collection(layout, n, device)
    for name, each in found.items():
        for k, part in enumerate(each.parts):
            made.span(name, k).store(part)
    return made
