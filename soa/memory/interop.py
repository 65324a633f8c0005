"""Arrow and Awkward columns as a Collection and back, without a copy.

NumPy, CuPy, torch and whatever else speaks DLPack need nothing here: `Collection.wrap` and
`Collection.from_columns` take them; `collection["pt"]` is a NumPy array and
`collection.tensor("pt")` a torch tensor, and both export DLPack.

Both libraries keep each column in memory of its own, so the layout has `storage="columns"`. Both
also share their buffers freely and never write to them: what comes in is read-only.

An Eigen column is a struct (Arrow) or a record (Awkward) of its entries, row by row: `e0, e1, ...`
of a vector, `e0_0, e0_1, ...` of a matrix. A fixed-size list holds each element's entries together,
which no view turns into columns: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soa.dtypes import DTYPES
from soa.errors import CollectionError
from soa.layout import Column, Layout, column
from soa.memory.collection import Collection
from soa.memory.span import Array

if TYPE_CHECKING:
    import awkward as ak
    import pyarrow as pa

# Arrow's types of the same bytes, by its names. It has no bfloat16, and its bool is one bit.
_ARROW_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}
_IN_PLACE = [_ARROW_NAMES.get(d, d) for d in DTYPES if d not in ("bool", "bfloat16")]


def from_arrow(
    data: pa.Table | pa.RecordBatch | Mapping[str, pa.Array], layout: Layout | None = None
) -> Collection:
    """A read-only collection over Arrow columns, without a copy.

    With `layout` (a model's, of `columns` storage), its columns are looked up by name and the
    others left alone; this is where Eigen columns come from. Without, every column is taken.
    A slice starts at any element, so the alignment is 1, each column's own element; a layout that
    asks for more takes whole buffers, which pyarrow aligns to 64, and few slices. Raises
    CollectionError for nulls, several chunks, and types that are not one number per element.
    """
    import pyarrow as pa

    given = _arrow_columns(data)

    def values_of(name: str, array: pa.Array) -> Any:
        if isinstance(array, pa.StructArray):
            _refuse_nulls(name, array)
            # `field` keeps the slice that the struct is of its children, and ignores its nulls.
            return [_arrow_values(name, array.field(i)) for i in range(array.type.num_fields)]
        return _arrow_values(name, array)

    return _collect(given, values_of, layout)


def to_arrow(collection: Collection, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """The n elements in use of a CPU collection as an Arrow record batch, without a copy.

    The batch keeps the memory alive, and sees what is written to it later. Raises CollectionError
    for scalars, bool and bfloat16, which Arrow cannot hold in place.
    """
    import pyarrow as pa

    arrays: dict[str, pa.Array] = {}
    for member, parts in _exported(collection, columns):
        if member.dtype == "bool":
            raise CollectionError(
                f"column {member.name!r}: Arrow has no bool of a byte; leave it out (columns=)"
            )
        made = [pa.array(part) for part in parts]
        eigen = member.kind == "eigen"
        arrays[member.name] = (
            pa.StructArray.from_arrays(made, names=_entry_names(member)) if eigen else made[0]
        )
    return pa.RecordBatch.from_pydict(arrays)


def from_awkward(array: ak.Array, layout: Layout | None = None) -> Collection:
    """A read-only collection over a flat Awkward array of records, without a copy.

    `layout` as in `from_arrow`. Raises CollectionError for jagged arrays, missing values, and
    records that an index picks from others (`ak.to_packed` copies them together).
    """
    import awkward as ak

    records = ak.materialize(array).layout
    if not isinstance(records, ak.contents.RecordArray):
        raise CollectionError(f"needed flat records: {_awkward_advice('the array', records)}")

    def values_of(name: str, content: Any) -> Any:
        if isinstance(content, ak.contents.RecordArray):
            return [values_of(name, content.content(i)) for i in range(len(content.fields))]
        if not isinstance(content, ak.contents.NumpyArray) or content.purelist_depth != 1:
            raise CollectionError(_awkward_advice(f"column {name!r}", content))
        return content.data

    # `content` cuts what lies beyond the records' length.
    given = {name: records.content(name) for name in records.fields}
    return _collect(given, values_of, layout)


def to_awkward(collection: Collection, columns: Sequence[str] | None = None) -> ak.Array:
    """The n elements in use of a CPU collection as Awkward records, without a copy.

    The array keeps the memory alive, and sees what is written to it later. Raises CollectionError
    for scalars and bfloat16.
    """
    import awkward as ak

    contents: dict[str, Any] = {}
    for member, parts in _exported(collection, columns):
        made = [ak.contents.NumpyArray(part) for part in parts]
        eigen = member.kind == "eigen"
        contents[member.name] = (
            ak.contents.RecordArray(made, _entry_names(member), length=collection.n)
            if eigen
            else made[0]
        )
    return ak.Array(ak.contents.RecordArray([*contents.values()], [*contents], length=collection.n))


def _collect(
    given: Mapping[str, Any], values_of: Callable[[str, Any], Any], layout: Layout | None
) -> Collection:
    """`values_of` gives an array, or for a column of structs the arrays of its entries."""
    if layout is None:
        values = {name: values_of(name, found) for name, found in given.items()}
        layout = _layout_of(values)
    else:
        scalars = [c.name for c in layout.columns if c.kind == "scalar"]
        if scalars:
            raise CollectionError(
                f"{scalars[0]!r} is a scalar of the collection, and this data has columns only: "
                "use Collection.from_columns"
            )
        missing = [c.name for c in layout.columns if c.name not in given]
        if missing:
            raise CollectionError(f"no column {missing[0]!r}, there are: {', '.join(given)}")
        values = {c.name: values_of(c.name, given[c.name]) for c in layout.columns}
    pieces = {c.name: _in_storage_order(c, values[c.name]) for c in layout.columns}
    return Collection.from_columns(layout, pieces, readonly=True)


def _layout_of(values: Mapping[str, Any]) -> Layout:
    nested = [name for name, found in values.items() if isinstance(found, list)]
    if nested:
        raise CollectionError(
            f"column {nested[0]!r} has several entries an element: give the layout that says "
            "which Eigen object they are"
        )
    strange = [(name, v.dtype) for name, v in values.items() if str(v.dtype) not in DTYPES]
    if strange:
        raise CollectionError(
            f"column {strange[0][0]!r} is {strange[0][1]}: convert it to one of {', '.join(DTYPES)}"
        )
    columns = [column(name, str(found.dtype)) for name, found in values.items()]
    return Layout(columns, 1, "columns")


def _in_storage_order(member: Column, values: Any) -> Any:
    if (member.kind == "eigen") != isinstance(values, list):
        raise CollectionError(
            f"column {member.name!r} is {member.kind} {list(member.shape)} in the layout; the data "
            f"has {'a struct' if isinstance(values, list) else 'one value'} for each element"
        )
    if member.kind != "eigen":
        return values
    if len(values) != member.components:
        raise CollectionError(
            f"column {member.name!r} has {member.components} entries in the layout, "
            f"{len(values)} in the data"
        )
    place = {member.component_of(i): value for i, value in enumerate(values)}
    return [place[k] for k in range(member.components)]


def _arrow_columns(data: Any) -> dict[str, pa.Array]:
    """Each column as one Arrow array."""
    import pyarrow as pa

    if isinstance(data, pa.Table | pa.RecordBatch):
        items = list(zip(data.schema.names, data.columns, strict=True))
    elif isinstance(data, Mapping):
        items = list(data.items())
    else:
        raise CollectionError(
            f"a {type(data).__name__} is no Arrow data: give a Table, a RecordBatch, or a dict of "
            "Arrow arrays"
        )
    found: dict[str, pa.Array] = {}
    for name, array in items:
        if name in found:
            raise CollectionError(f"two columns are called {name!r}: rename one")
        if isinstance(array, pa.ChunkedArray):
            if array.num_chunks > 1:
                raise CollectionError(
                    f"column {name!r} lies in {array.num_chunks} chunks: combine_chunks() copies "
                    "them together, to_batches() gives one piece after another"
                )
            array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
        if not isinstance(array, pa.Array):
            raise CollectionError(
                f"column {name!r} is a {type(array).__name__}, not an Arrow array: "
                "use Collection.from_columns"
            )
        found[name] = array
    return found


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise CollectionError(
            f"column {name!r} has {array.null_count} nulls, and a column has a value in every "
            "place: fill_null(value) or drop_null() first"
        )


def _arrow_values(name: str, array: pa.Array) -> Array:
    """The values of a primitive array as a NumPy view that keeps its buffer alive."""
    _refuse_nulls(name, array)
    if str(array.type) not in _IN_PLACE:
        raise CollectionError(f"column {name!r} is {array.type}: {_arrow_advice(array.type)}")
    if not array.is_cpu:
        raise CollectionError(f"column {name!r} lies on a GPU: give it as CuPy or torch columns")
    values: Array = array.to_numpy()
    return values


def _arrow_advice(kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        return "Arrow packs it in bits; cast it to uint8"
    if pa.types.is_fixed_size_list(kind):
        return "the entries of one element lie together; give each entry as a column"
    if pa.types.is_nested(kind):
        return "a column has one value for each element; flatten it first"
    if pa.types.is_temporal(kind) or pa.types.is_uint64(kind):
        return "look at the same bytes as integers with view('int64') or view('int32')"
    return f"cast it to one of {', '.join(_IN_PLACE)}"


def _awkward_advice(what: str, content: Any) -> str:
    kind = type(content).__name__
    if content.is_list:
        return f"{what} is jagged ({kind}): flatten it first (ak.flatten)"
    if content.is_option:
        return f"{what} may have missing values ({kind}): fill or drop them (ak.fill_none)"
    if content.is_indexed:
        return f"{what} is picked by an index ({kind}): ak.to_packed copies it together"
    if content.is_numpy and content.purelist_depth > 1:
        return f"{what} has several values an element ({kind}): give each as a field"
    return f"{what} is a {kind}"


def _entry_names(member: Column) -> list[str]:
    if len(member.shape) == 1:
        return [f"e{row}" for row in range(member.shape[0])]
    return [f"e{row}_{col}" for row in range(member.shape[0]) for col in range(member.shape[1])]


def _exported(
    collection: Collection, columns: Sequence[str] | None
) -> Iterator[tuple[Column, list[Array]]]:
    """Each member with views of its entries row by row, every one of shape `(n,)`."""
    if collection.device.type != "cpu":
        raise CollectionError(
            f"the collection lies on {collection.device}: copy it first, collection.to('cpu')"
        )
    names = [c.name for c in collection.layout.columns] if columns is None else columns
    for name in names:
        member = collection.layout[name]
        if member.kind == "scalar":
            raise CollectionError(
                f"{name!r} is a scalar of the collection, not a column: leave it out (columns=)"
            )
        if member.dtype == "bfloat16":
            raise CollectionError(
                f"column {name!r}: NumPy and Arrow have no bfloat16; leave it out (columns=)"
            )
        places = map(member.component_of, range(member.components))
        yield member, [collection.span(name, k).first(collection.n).numpy() for k in places]
