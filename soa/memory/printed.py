"""The text that `repr` gives for a collection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from soa.dtypes import is_opaque
from soa.layout import Column

if TYPE_CHECKING:
    from soa.memory.collection import Collection

_ROWS_SHOWN = 4
_COLUMNS_SHOWN = 20


def printed(collection: Collection) -> str:
    """The collection's columns with dtypes and first rows. Memory of a GPU is not read."""
    rows = f"Collection of {collection.n:,} rows on {collection.device}"
    lines = [", ".join([rows, *_notes(collection)])]
    shown = collection.layout.columns[:_COLUMNS_SHOWN]
    kinds = {c.name: f"{c.dtype}{list(c.shape) if c.shape else ''}" for c in shown}
    widths = max(map(len, kinds)), max(map(len, kinds.values()))
    for c in shown:
        line = f"  {c.name:{widths[0]}}  {kinds[c.name]:{widths[1]}}  "
        lines.append((line + _first_values(collection, c)).rstrip())
    more = len(collection.layout.columns) - len(shown)
    return "\n".join([*lines, *([f"  and {more} more columns"] if more else [])])


def _notes(collection: Collection) -> Iterator[str]:
    """What differs from a collection that owns its memory and fills it."""
    whole = collection.whole
    if whole is not collection:
        yield f"from row {collection.start:,} of {whole.n:,}"
    if collection.capacity > collection.n:
        yield f"room for {collection.capacity:,}"
    if collection.readonly:
        yield "read-only"
    if collection.copied:
        yield f"copied: {', '.join(collection.copied)}"


def _first_values(collection: Collection, member: Column) -> str:
    if collection.device.type != "cpu" or is_opaque(member.dtype):
        return ""
    n = 1 if member.kind == "scalar" else min(collection.n, _ROWS_SHOWN)
    spans = [collection.span(member.name, member.component_of(i)) for i in range(member.components)]
    bfloat16 = member.dtype == "bfloat16"
    parts = [(s.first(n).tensor() if bfloat16 else s.first(n).numpy()).tolist() for s in spans]
    rows = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row]
        for row in zip(*parts, strict=True)
    ]
    values = [f"[{' '.join(row)}]" if member.shape else row[0] for row in rows]
    return "  ".join(values + ["…"] * (member.kind != "scalar" and collection.n > n))
