"""Give jagged arrays of Awkward and Arrow as the two collections of a signature, without a copy.

Both libraries keep the lists of all rows as content and offsets. The content holds the columns of
the items; two views of the offsets say where the items of a row begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soa.errors import CollectionError, needs_extra
from soa.memory.collection import Collection
from soa.memory.from_libraries import as_collection, drop_empty_mask
from soa.memory.named_columns import require_column
from soa.memory.span import Array
from soa.options import TEXT, of_type, takes
from soa.signature import Signature, offsets_of


@takes(CollectionError, signature=of_type("a signature: session.signature", Signature), name=TEXT)
def from_jagged(data: Any, signature: Signature, name: str) -> dict[str, Collection]:
    """Return read-only collections of the items of `data` and of their offsets, for `bind`.

    `data` is an Awkward array: lists of records, or records of lists as uproot reads them; or Arrow
    data that `ak.from_arrow` takes. The columns of the model's layout are looked up by name and
    used in place. Offsets are copied only if the data has none (lists of one size), has them in
    another dtype, or is a slice that does not begin at the first item. Raises CollectionError if
    the offsets of the columns differ, and in the cases in which `as_collection` does.
    """
    with needs_extra("data", CollectionError):
        import awkward as ak

    if name not in signature.jagged:
        raise CollectionError(f"{name!r} is not jagged in the model: {', '.join(signature.jagged)}")
    array = data if isinstance(data, ak.Array) else ak.from_arrow(data)
    rows = _apply_index(ak.materialize(array).layout)
    layout, offsets = signature.layouts[name], signature.layouts[offsets_of(name)]
    columns = {member.name: _read_lists(member.name, rows) for member in layout.columns}
    used = _find_used(_common_lists(columns))
    items = [lists.content[used.low : used.high] for lists in columns.values()]
    records = ak.contents.RecordArray(items, [*columns], length=used.high - used.low)
    dtype = offsets["end"].dtype
    begin, end = used.begin.astype(dtype, copy=False), used.end.astype(dtype, copy=False)
    return {
        name: as_collection(ak.Array(records), layout),
        offsets_of(name): Collection.from_columns(
            offsets, {"begin": begin, "end": end}, readonly=True
        ),
    }


@dataclass(frozen=True)
class _Lists:
    """The lists of a column: where the items of each row begin and end in the content."""

    begin: Array
    end: Array
    content: Any


@dataclass(frozen=True)
class _UsedItems:
    """The items `low` up to `high` (excluded) of a content, which are those that the rows use.

    `begin` and `end` say where the items of each row lie, counted from `low`.
    """

    low: int
    high: int
    begin: Array
    end: Array


def _common_lists(columns: Mapping[str, _Lists]) -> _Lists:
    """Return the lists of the first column; raise CollectionError if others have other offsets."""
    first = next(iter(columns))
    begin, end = columns[first].begin, columns[first].end
    for name, lists in columns.items():
        if not (np.array_equal(begin, lists.begin) and np.array_equal(end, lists.end)):
            raise CollectionError(f"columns {first!r}, {name!r} have different offsets")
    return columns[first]


def _find_used(lists: _Lists) -> _UsedItems:
    """Find the items that the lists use. Offsets are copied only if they have to be changed."""
    begin, end = lists.begin, lists.end
    has_items = end > begin
    low = int(begin[has_items].min()) if has_items.any() else 0
    high = int(end[has_items].max()) if has_items.any() else 0
    if low or (begin < 0).any() or (end > high).any():  # an empty row may have any offsets
        begin, end = np.where(has_items, (begin - low, end - low), 0)
    return _UsedItems(low, high, begin, end)


def _read_lists(name: str, rows: Any) -> _Lists:
    """Return the lists of a column; raise CollectionError unless every row has a list.

    `rows` is Awkward's content: lists of records, or records of lists.
    """
    require_column(name, rows.fields)
    lists = _apply_index(rows.content(name)) if rows.is_record else rows
    if lists.is_option or not lists.is_list:
        raise CollectionError(f"column {name!r} has no list in every row: {type(lists).__name__}")
    content = drop_empty_mask(lists.content)
    if not rows.is_record:
        if not content.is_record:
            kind = type(content).__name__
            raise CollectionError(
                f"the lists hold {kind}, not records of the columns: ak.to_packed copies the "
                "selected records into one array"
            )
        content = drop_empty_mask(content.content(name))
    begin = np.asarray(lists.starts.data)
    return _Lists(begin, np.asarray(lists.stops.data)[: len(begin)], content)


def _apply_index(content: Any) -> Any:
    """Return a content whose rows an index may select with this index applied to its offsets."""
    content = drop_empty_mask(content)
    return content.project() if content.is_indexed and not content.is_option else content
