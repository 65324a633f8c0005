"""What is said of an error of a library."""

from __future__ import annotations

import pytest

from engines.errors import first_line


def test_an_error_that_is_its_own_cause_is_said_once() -> None:
    error = ValueError("the shape is wrong")
    with pytest.raises(ValueError, match="the shape is wrong"):
        raise error from error
    assert first_line(error) == "the shape is wrong"
