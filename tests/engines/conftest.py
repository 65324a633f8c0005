"""Fixtures that make tests of `lanes` quicker."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """Compiles libraries of `lanes`, and those of its headers, with -O1, in half the time. For
    tests of what operators and blocks do; other tests show what -O3 makes of the code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_LANES", "-O1")
        yield


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Traces each captured program at one row once, though several artifacts are made of it."""
    from engines.lanes.planning import program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "trace_row", cache(program.trace_row))
        yield
