"""Threads of a block that share a row: the library's answers in any order, and no wait to spare."""

from __future__ import annotations

from functools import cache

import pytest

from tests.engines.lanes import waits

pytestmark = pytest.mark.usefixtures("quick_compiler")

shared = cache(waits.shared)
LONG = {"lstm"}
"""Its steps are products and functions, as in `attention`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in waits.NETWORKS],
)
def test_threads_that_take_turns_give_the_answers(name: str) -> None:
    assert shared(name).right()


def test_a_missing_wait_changes_the_answers() -> None:
    """The first wait is that of a product, for all elements of its operands."""
    kernel = shared("attention")
    assert not kernel.without(kernel.waits[0]).right()
