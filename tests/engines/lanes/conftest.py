from __future__ import annotations

import pytest


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles libraries of `lanes` with -O1, in half the time. For tests of what operators do;
    other tests show what -O3 makes of the code."""
    monkeypatch.setenv("TESTS_LANES", "-O1")
