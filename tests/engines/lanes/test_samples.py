"""A part of the campaign on torch's own samples, and its page in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
    chosen = [operator for operator in operators() if title_of(operator) in OPERATORS]
    assert len(chosen) == len(OPERATORS)
    of_samples = [case for operator in chosen for case in cases_of(operator, most=2, seed=0)]
    return of_samples + [case for name in MODES for case in cases_of_modes(name)]


def test_no_answer_to_torchs_own_samples_is_wrong(cases: list[Case]) -> None:
    with quiet_torch():
        verdicts = judged(cases, Way())
    right = [verdict for verdict in verdicts if verdict.what == "right"]
    bad = [verdict for verdict in verdicts if verdict.what in ("wrong", "error")]
    assert not bad
    assert len(right) > len(cases) // 2  # the others are not applicable


def answers_of_eager(case: Case) -> list[Tensor]:
    """Eager torch's results, each for all rows, as a library gives them."""
    rows = [row for row in case.wanted if row is not None]
    assert len(rows) == len(case.wanted)
    return [torch.stack(of_all_rows) for of_all_rows in zip(*rows, strict=True)]


def test_the_answers_of_eager_torch_are_right(cases: list[Case]) -> None:
    assert compared(cases[0], answers_of_eager(cases[0])).what == "right"


def test_one_number_that_is_a_little_off_is_wrong(cases: list[Case]) -> None:
    case = cases[0]
    answers = answers_of_eager(case)
    answers[0][7].view(-1)[0] += 0.001 * (1 + answers[0][7].abs().max())
    assert compared(case, answers).what == "wrong"


def results_on_page() -> dict[str, str]:
    """The kind of result of each operator and function with modes."""
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_says_that_no_answer_is_wrong() -> None:
    results = results_on_page()
    assert len(results) > 300
    assert set(results.values()) <= set(table.KINDS) - {"wrong"}


def test_the_page_names_operators_of_torch() -> None:
    """At least those of the torch that it was written with; another has others."""
    if f"with torch {torch.__version__}" not in PAGE.read_text().replace("\n", " "):
        pytest.skip("the page was written with another torch")
    named = {name for name in results_on_page() if not name.startswith("modes of ")}
    assert named <= {title_of(operator) for operator in operators()}
