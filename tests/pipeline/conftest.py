from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds every file which the configs of these tests name."""
    for name in ("model.py", "data.py", "weights.safetensors", "model.pt2", "model.ts"):
        (tmp_path / name).touch()
    return tmp_path
