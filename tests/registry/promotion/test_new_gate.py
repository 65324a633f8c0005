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


def test_a_new_gate_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    section = GUIDE.read_text().split("\n## A new gate\n")[1].split("\n## ")[0]
    code = section.split("```python\n")[1].split("```")[0]
    names = dict(vars(gates))
    exec(code, names)
    monkeypatch.setattr(gates, "GATES", (*gates.GATES, names["compile_time"]))

    for seconds, passes in ((12.0, True), (7200.0, False)):
        data = manifest_data()
        candidates = data["targets"]["cpu/x86-64-v3"]["candidates"]
        candidates["aoti"]["compile_seconds"] = seconds
        decisions = decide(findings(as_record(Manifest, data)))
        assert decisions[-1].gate == "compile time"
        assert decisions[-1].passed is passes
        assert "aoti" in decisions[-1].detail
        assert all(each.passed for each in decisions[:-1])
    assert len(section.splitlines()) <= 30
