"""A part of the campaign on torch's own samples, and its page in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engines.exported import quiet_torch
from tests.engines.lanes.samples import table
from tests.engines.lanes.samples.cases import Case, cases_of, title_of
from tests.engines.lanes.samples.judging import Way, compared, judged
from tests.engines.lanes.samples.modes import cases_of_modes
from tests.engines.lanes.samples.operators import operators

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/operators.md"
OPERATORS = ("masked_fill", "scatter_reduce.mean", "nn.functional.softplus")
MODES = ("adaptive_avg_pool1d", "index_reduce", "round")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    chosen = [each for each in operators() if title_of(each) in OPERATORS]
    assert len(chosen) == len(OPERATORS)
    own = [case for each in chosen for case in cases_of(each, 2, 0)]
    return own + [case for name in MODES for case in cases_of_modes(name)]


def test_answers_to_torchs_own_samples(cases: list[Case]) -> None:
    with quiet_torch():
        verdicts = judged(cases, Way())
    right = [verdict for verdict in verdicts if verdict.what == "right"]
    bad = [verdict for verdict in verdicts if verdict.what in ("wrong", "error")]
    assert not bad
    assert len(right) > len(cases) // 2


def test_a_wrong_answer_is_found(cases: list[Case]) -> None:
    """Also if one number of one row is off by a little."""
    case = cases[0]
    rows = [row for row in case.wanted if row is not None]
    assert len(rows) == len(case.wanted)
    answers = [torch.stack(each) for each in zip(*rows, strict=True)]
    assert compared(case, answers).what == "right"
    answers[0][7].view(-1)[0] += 0.001 * (1 + rows[7][0].abs().max())
    assert compared(case, answers).what == "wrong"


def test_the_page_says_that_no_answer_is_wrong() -> None:
    """It names operators of torch, at least those of the torch that it was written with."""
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert len(rows) > 300
    assert set(rows.values()) <= set(table.KINDS) - {"wrong"}
    if f"with torch {torch.__version__}" in text.replace("\n", " "):
        own = {name for name in rows if not name.startswith("modes of ")}
        assert own <= {title_of(each) for each in operators()}
