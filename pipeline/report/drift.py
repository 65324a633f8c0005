"""How far columns moved from the reference, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.report.tables import Part, new_table
from soa.text import number

if TYPE_CHECKING:
    from runtime.watch import Moved


def describe_drift(moved: Sequence[Moved], max_columns: int = 60) -> Iterator[Part]:
    """Describe how far columns moved from the reference, in a table of at most `max_columns`.

    `moved`: the columns, farthest first. Nothing is yielded if it is empty.
    """
    if not moved:
        return
    table = new_table("distance from the reference", "column", "index", "by chance",
                      "Jensen-Shannon", "values", "reference", "what changed most")  # fmt: skip
    for distance in moved[:max_columns]:
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
    if len(moved) > max_columns:
        yield f"and {len(moved) - max_columns:,} columns that moved less"
