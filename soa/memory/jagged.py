"""Jagged arrays of Awkward and Arrow as the two collections of a signature, without a copy.

Both keep a list of each row as offsets and content. The content is the items' columns; where each
row's items begin and end are two views of the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from soa.errors import CollectionError
from soa.memory.collection import Collection
from soa.memory.interop import _arrow_columns, _refuse_nulls, from_arrow, from_awkward
from soa.memory.span import Array
from soa.signature import Signature, offsets_of

Lists = tuple[Array, Array, Any]
"""Where each row's items begin and end, and the content they are in."""


def from_jagged(data: Any, signature: Signature, name: str) -> dict[str, Collection]:
    """Read-only collections of the items of `data` and of their offsets, by name, to be bound.

    `data` is an Awkward array of lists of records, or of records of lists as uproot reads them; or
    Arrow lists of structs, or columns of lists (a Table, a RecordBatch, a dict). The columns of the
    model's layout are looked up by name. Their memory is used as it is, from the first item of a
    row to the last. Offsets are made anew where the data has none (lists of one size), has another
    dtype, or does not begin with its content (a slice). Raises CollectionError for columns that are
    not cut into rows alike, and for what `from_awkward` and `from_arrow` refuse.
    """
    if name not in signature.jagged:
        have = ", ".join(signature.jagged) or "none"
        raise CollectionError(f"{name!r} is not a jagged collection of the model; it has: {have}")
    layout, at = signature.layouts[name], offsets_of(name)
    awkward = type(data).__module__.partition(".")[0] == "awkward"
    names = [c.name for c in layout.columns]
    lists = dict((_awkward_lists if awkward else _arrow_lists)(data, names))
    begin, end, _ = next(iter(lists.values()))
    for other, (its_begin, its_end, _) in lists.items():
        if not (np.array_equal(begin, its_begin) and np.array_equal(end, its_end)):
            raise CollectionError(
                f"columns {names[0]!r} and {other!r} are not cut into rows alike: their offsets "
                "differ"
            )
    filled = end > begin
    low = int(begin[filled].min()) if filled.any() else 0
    high = int(end[filled].max()) if filled.any() else 0
    shortest = min(len(content) for _, _, content in lists.values())
    if (end < begin).any() or low < 0 or high > shortest:
        raise CollectionError(
            f"the offsets of {names[0]!r} lead from {low} to {high}, its content has {shortest} "
            "items: the array is damaged"
        )
    items = {column: content[low:high] for column, (_, _, content) in lists.items()}
    if awkward:
        import awkward as ak

        records = ak.contents.RecordArray([*items.values()], [*items], length=high - low)
        collection = from_awkward(ak.Array(records), layout)
    else:
        collection = from_arrow(items, layout)
    if low or (begin < 0).any() or (end > high).any():  # an empty row may lie anywhere
        begin, end = np.where(filled, (begin - low, end - low), 0)
    dtype = signature.layouts[at]["begin"].dtype
    columns = {"begin": begin.astype(dtype, copy=False), "end": end.astype(dtype, copy=False)}
    return {
        name: collection,
        at: Collection.from_columns(signature.layouts[at], columns, readonly=True),
    }


def _awkward_lists(data: Any, names: list[str]) -> Iterator[tuple[str, Lists]]:
    import awkward as ak

    def plain(content: Any) -> Any:  # rows that an index picks: it picks their offsets
        return content.project() if content.is_indexed and not content.is_option else content

    rows = plain(ak.materialize(data).layout)
    for name in names:
        if name not in rows.fields:
            raise CollectionError(f"no column {name!r}, there are: {', '.join(rows.fields)}")
        lists = plain(rows.content(name)) if rows.is_record else rows
        if not lists.is_list:
            raise CollectionError(
                f"column {name!r} is not jagged, or rows are missing ({type(lists).__name__}): "
                "a list for each row is needed"
            )
        content = lists.content
        if not rows.is_record:
            if not content.is_record:
                raise CollectionError(
                    f"the items are a {type(content).__name__}, not records: ak.to_packed copies "
                    "them together"
                )
            content = content.content(name)
        begin = np.asarray(lists.starts.data)
        yield name, (begin, np.asarray(lists.stops.data)[: len(begin)], content)


def _arrow_lists(data: Any, names: list[str]) -> Iterator[tuple[str, Lists]]:
    import pyarrow as pa

    apart = not isinstance(data, pa.Array | pa.ChunkedArray)
    given = _arrow_columns(data if apart else {"items": data})
    for name in names:
        if apart and name not in given:
            raise CollectionError(f"no column {name!r}, there are: {', '.join(given)}")
        lists = given[name if apart else "items"]
        _refuse_nulls(name, lists)
        kind = lists.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            offsets = lists.offsets.to_numpy()
            begin, end = offsets[:-1], offsets[1:]
        elif pa.types.is_fixed_size_list(kind):
            begin = (np.arange(len(lists)) + lists.offset) * kind.list_size
            end = begin + kind.list_size
        else:
            raise CollectionError(f"column {name!r} is {kind}: a list for each row is needed")
        content = lists.values
        if not apart:
            _refuse_nulls("items", content)
            names_there = [field.name for field in content.type] if content.type.num_fields else []
            if name not in names_there:
                raise CollectionError(f"the items have no {name!r}, they are {content.type}")
            content = content.field(name)
        yield name, (begin, end, content)
