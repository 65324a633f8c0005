"""How the benchmarks print: a table with medians and spread, and the machine it ran on."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.provenance import host, tools
from pipeline.report import console, microseconds, new_table
from stages.benchmark import Timing


def print_machine() -> None:
    facts = {**host(), "torch": tools().get("torch", "?")}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)


def print_race(title: str, columns: Mapping[str, Mapping[str, Timing]], base: str) -> None:
    """Contestants as rows, one column a size: median [p05 … p95], ratio to `base`."""
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    table = new_table(title, "", *columns)
    for name in names:
        cells = []
        for rows in columns.values():
            if name not in rows:
                cells.append("")
                continue
            t = rows[name]
            ratio = t.median_us / rows[base].median_us
            cells.append(
                f"{microseconds(t.median_us)} ({microseconds(t.p05_us)} … "
                f"{microseconds(t.p95_us)}) x{ratio:.2f}"
            )
        table.add_row(name, *cells)
    console().print(table)
