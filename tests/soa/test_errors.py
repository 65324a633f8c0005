"""The causes of an error."""

from __future__ import annotations

import pytest

from engines.errors import first_line
from soa.errors import causes


def test_each_cause_comes_once_also_in_a_circle() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert [*causes(first)] == [first, second]


@pytest.mark.parametrize("contexts", [False, True])
def test_an_error_that_was_being_handled_counts_if_contexts_do(contexts: bool) -> None:
    handled, raised = OSError("disk"), ValueError("record")
    raised.__context__ = handled
    assert [*causes(raised, contexts)] == ([raised, handled] if contexts else [raised])


def test_an_error_that_is_its_own_cause_has_a_first_line() -> None:
    error = ValueError("the shape is wrong")
    with pytest.raises(ValueError, match="the shape is wrong"):
        raise error from error
    assert first_line(error) == "the shape is wrong"
