"""The results of the campaign as a page: one row for each operator, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

KINDS = ("wrong", "error", "right", "not applicable", "no sample that fits")
"""What an operator can be: the first that one of its cases is."""
_HEAD = """# Operators

torch has samples of arguments for each operator that it tests itself with (`op_db` of
`torch.testing`). This page says what the engine `{engine}` makes of them. The tensors of a sample
become one row; the other rows have other numbers, the last ones NaN, infinities, both zeros,
denormal and very large numbers. Each sample is tried in three ways: all its tensors are from rows;
all but the first are constants; all are transposed, flipped or sliced before the operator. The
dtype is float32, or int64 or bool for an operator without floating point. The second table has the
modes of pools, padding, interpolation, reductions and others.

{counts} Of torch's own operators, {missing} were not tried yet.

- *Right*: one case or more has eager torch's answers up to rounding, and no case has others.
  Integers and bools are equal, also those that come from NaN and infinities.
- *Not applicable*: the engine says so when it compiles. Another engine runs the network.
- *No sample that fits*: such as complex or sparse tensors, random results, no tensor as result.
- *Special*: the number of cases in which an answer to a special value has another class (NaN, an
  infinity, a zero with its sign, another number) than eager torch's.

`python -m tests.engines.lanes.samples --table docs/reference/operators.md` wrote this page, with
torch {torch}.
"""
_COLUMNS = """
## {title}

| {first} | result | cases right | special | why, for the other cases |
| --- | --- | --- | --- | --- |
"""
_KEPT_APART = str.maketrans({"|": "\\|", "<": "&lt;", "*": "\\*", "_": "\\_", "[": "\\["})


def kind(result: dict[str, Any]) -> str:
    """What an operator is: one of KINDS. `result`: one of `examined`."""
    kinds = {case["what"] for case in result["cases"]}
    return next((possible for possible in KINDS if possible in kinds), KINDS[-1])


def counts(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The number of operators of each kind."""
    numbers = Counter(kind(result) for result in results)
    return {possible: numbers[possible] for possible in KINDS}


def line(result: dict[str, Any]) -> str:
    """An operator's row in the table."""
    cases = result["cases"]
    right = [case for case in cases if case["what"] == "right"]
    others = Counter(_why(case) for case in cases if case["what"] != "right")
    why = result.get("no_sample") or "; ".join(
        f"{why} ({number})" if len(others) > 1 else why for why, number in others.most_common(3)
    )
    special = sum(bool(case["special"]) for case in right)
    share = f"{len(right)} of {len(cases)}" if cases else ""
    why = why.translate(_KEPT_APART)
    return f"| `{result['operator']}` | {kind(result)} | {share} | {special or ''} | {why} |"


def _why(case: dict[str, Any]) -> str:
    """Why a case is not right."""
    return case["why"] if case["what"] == "not applicable" else f"{case['what']}: {case['why']}"


def page(
    operators: Sequence[dict[str, Any]],
    modes: Sequence[dict[str, Any]],
    missing: int,
    engine: str,
) -> str:
    """The whole page, in Markdown. `missing`: the number of operators that were not tried."""
    text = _HEAD.format(
        engine=engine,
        missing=missing,
        counts=f"{_counted(operators, 'operators')} {_counted(modes, 'functions with modes')}",
        torch=torch.__version__,
    )
    for title, first, results in (
        ("torch's samples", "operator", operators),
        ("Modes", "function", modes),
    ):
        if results:
            text += _COLUMNS.format(title=title, first=first)
            text += "".join(f"{line(result)}\n" for result in results)
    return text


def _counted(results: Sequence[dict[str, Any]], noun: str) -> str:
    """A sentence with the number of results of each kind."""
    if not results:
        return f"No {noun} were tried."
    numbers = ", ".join(f"{count} {kind}" for kind, count in counts(results).items())
    return f"**{len(results)} {noun}: {numbers}.**"
