"""Measurements of a promotion that passes, except for the fields that a test changes."""

from __future__ import annotations

from typing import Any

from registry import Manifest, Worst
from registry.promotion import Findings, Proof, Requirements, strictest

V3 = "cpu/x86-64-v3"


def findings(manifest: Manifest, **changes: Any) -> Findings:
    """`changes` are fields of Findings, or of its Requirements."""
    needed = {name: changes.pop(name) for name in Requirements.__annotations__ if name in changes}
    requirements = vars(strictest([V3], 0.0, 1.1, [])) | needed
    good = {"probabilities": Worst(max_abs=1e-7, max_rel=1e-6, outside=0.0)}
    usual: dict[str, Any] = {"proof": Proof(0.0, 0.01, None), "worst": {V3: good}}
    return Findings(manifest, Requirements(**requirements), **(usual | changes))
