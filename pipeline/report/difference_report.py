"""A difference between two versions, as tables for people."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from pipeline.report.difference import Difference
from pipeline.report.tables import microseconds, new_table

_LONGEST = 80
_MOST_ROWS = 40


def print_difference(out: Console, found: Difference) -> None:
    for letter, side in (("A", found.a), ("B", found.b)):
        out.print(f"{letter} {side.ref}  {side.digest[:12]}", style="bold")
    if found.same:
        out.print("the same files, byte for byte")
        return
    _print_weights(out, found)
    for subject, changes in found.records.items():
        if subject == "files":
            names = ", ".join(change.what for change in changes[:6])
            more = f", … ({len(changes)})" if len(changes) > 6 else ""
            out.print(f"files that differ: {names}{more}")
            continue
        table = new_table(subject, "", "A", "B")
        for change in changes[:_MOST_ROWS]:
            table.add_row(change.what, _value(change.a), _value(change.b))
        out.print(table)
        _print_more(out, len(changes))
    _print_deviations(out, found)
    _print_speed(out, found)


def _print_weights(out: Console, found: Difference) -> None:
    weights = found.weights
    if weights.unreadable:
        out.print(f"weights: not compared: {weights.unreadable}")
        return
    if not weights.changes:
        out.print(f"weights: all {weights.same} tensors are equal")
        return
    table = new_table(
        f"weights: {len(weights.changes)} tensors differ, {weights.same} are equal",
        "tensor", "A", "B", "elements", "max |A-B|", "norm A", "norm B", "norm A-B",
    )  # fmt: skip
    for change in weights.changes[:_MOST_ROWS]:
        numbers = (change.max_abs, change.norm_a, change.norm_b, change.norm_difference)
        table.add_row(
            change.name,
            change.a or "—",
            "=" if change.a == change.b else change.b or "—",
            "" if change.elements is None else str(change.elements),
            *("" if n is None else f"{n:.3g}" for n in numbers),
        )
    out.print(table)
    _print_more(out, len(weights.changes))


def _print_deviations(out: Console, found: Difference) -> None:
    if not found.deviations:
        return
    table = new_table(
        "deviation from the model's own answers: max abs (fraction outside the tolerance)",
        "target", "engine", "output", "A", "B",
    )  # fmt: skip
    for d in found.deviations:
        sides = ((d.a_max_abs, d.a_outside), (d.b_max_abs, d.b_outside))
        cells = ["—" if worst is None else f"{worst:.2e} ({out_:.2%})" for worst, out_ in sides]
        table.add_row(d.target, d.engine, d.output, *cells)
    out.print(table)


def _print_speed(out: Console, found: Difference) -> None:
    if not found.speed:
        return
    table = new_table(
        "median of a call, as measured when each was built", "target", "engine", "rows", "A", "B",
        "B / A",
    )  # fmt: skip
    for each in found.speed:
        times = ["—" if t is None else microseconds(t) for t in (each.a_us, each.b_us)]
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.target, each.engine, each.rows, *times, ratio)
    out.print(table)


def _print_more(out: Console, count: int) -> None:
    if count > _MOST_ROWS:
        out.print(f"  … and {count - _MOST_ROWS} more: --json has all")


def _value(value: Any) -> str:
    if value is None:
        return "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
