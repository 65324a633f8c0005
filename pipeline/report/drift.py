"""How far columns moved from the reference, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.report.tables import Part, new_table
from soa.text import number

if TYPE_CHECKING:
    from runtime.watch import Moved


def describe_drift(moved: Sequence[Moved], most: int = 60) -> Iterator[Part]:
    """Describe how far columns moved from the reference, in a table of at most `most` columns.

    `moved`: the columns, farthest first. Nothing is yielded if it is empty.
    """
    if not moved:
        return
    table = new_table("distance from the reference", "column", "index", "by chance",
                      "Jensen-Shannon", "values", "reference", "what changed most")  # fmt: skip
    for distance in moved[:most]:
        table.add_row(
            distance.column,
            number(distance.psi),
            number(distance.chance),
            number(distance.js),
            f"{distance.values:,}",
            f"{distance.reference:,}",
            "; ".join(distance.changes),
        )
    yield table
    if len(moved) > most:
        yield f"and {len(moved) - most:,} columns that moved less"
