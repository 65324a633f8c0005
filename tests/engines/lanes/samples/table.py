"""The results of the campaign as a page: one row for each operator, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

# The worst of its cases is what an operator is, except that one right case makes it right.
_ORDER = ("wrong", "error", "right", "not applicable", "not exported")
_HEAD = """# Operators: compared with eager torch on torch's own samples

torch has samples of arguments for each operator that it tests itself with (`op_db` of
`torch.testing`). This table says what the engine `{engine}` makes of them. The tensors of a sample become
one row; the other rows have other numbers, NaN, infinities, -0.0 and denormal numbers. A sample is tried in three ways:
all its tensors are from rows; all but the first are constants; all are transposed, flipped or sliced in front of
the operator. float32 is used, and int64 or bool where an operator takes no float32.

{counts}

*Right* means: the answers are those of eager torch up to rounding, and integers and bools are equal. *Not applicable*: the
engine says that it has no code, and another engine runs the network. *Not exported*: torch.export does not take the samples,
neither with any number of rows nor at one row. *Not tried*: no sample fits. "Special" counts the cases whose answers
to NaN, infinities, denormal or very large numbers have another class than eager torch's.

The command `python -m tests.engines.lanes.samples --table docs/reference/operators.md` wrote this page, with torch {torch}.

| operator | result | cases right | special | why not, for the other cases |
| --- | --- | --- | --- | --- |
"""


def status(found: dict[str, Any]) -> str:
    """What an operator is: wrong, error, right, not applicable, not exported or not tried."""
    whats = {case["what"] for case in found["cases"]}
    return next((what for what in _ORDER if what in whats), "not tried")


def counts(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The number of operators by status."""
    found = Counter(status(each) for each in results)
    return {what: found[what] for what in (*_ORDER, "not tried")}


def line(found: dict[str, Any]) -> str:
    """An operator's row in the table."""
    cases = found["cases"]
    right = [case for case in cases if case["what"] == "right"]
    others = Counter(_why(case) for case in cases if case["what"] != "right")
    why = found.get("not_tried") or "; ".join(
        f"{why} ({number})" if len(others) > 1 else why for why, number in others.most_common(3)
    )
    special = sum(bool(case["special"]) for case in right)
    of = f"{len(right)} of {len(cases)}" if cases else ""
    text = why.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return f"| `{found['operator']}` | {status(found)} | {of} | {special or ''} | {text} |"


def _why(case: dict[str, Any]) -> str:
    return case["why"] if case["what"] == "not applicable" else f"{case['what']}: {case['why']}"


def page(results: Sequence[dict[str, Any]], engine: str) -> str:
    """The whole page, in Markdown."""
    number = counts(results)
    said = ", ".join(f"{count} {what}" for what, count in number.items())
    head = _HEAD.format(
        engine=engine, counts=f"**{len(results)} operators: {said}.**", torch=torch.__version__
    )
    return head + "".join(f"{line(each)}\n" for each in results)
