"""The worked example of CONTRIBUTING.md: a gate is one function."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry import Manifest
from registry.promotion import decide, gates
from soa.records import as_record
from tests.models.bundles import manifest_data
from tests.models.findings import findings

GUIDE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def section() -> str:
    """What the guide says of a new gate."""
    return GUIDE.read_text().split("\n## A new gate\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(("seconds", "passes"), [(12.0, True), (7200.0, False)])
def test_a_new_gate_is_one_function(
    monkeypatch: pytest.MonkeyPatch, seconds: float, passes: bool
) -> None:
    code = section().split("```python\n")[1].split("```")[0]
    names = dict(vars(gates))
    exec(code, names)
    monkeypatch.setattr(gates, "GATES", (*gates.GATES, names["compile_time"]))
    data = manifest_data()
    data["targets"]["cpu/x86-64-v3"]["candidates"]["aoti"]["compile_seconds"] = seconds
    *others, new = decide(findings(as_record(Manifest, data)))
    assert (new.gate, new.passed) == ("compile time", passes)
    assert "aoti" in new.detail
    assert all(decision.passed for decision in others)


def test_the_guide_says_it_on_half_a_page() -> None:
    assert len(section().splitlines()) <= 30
