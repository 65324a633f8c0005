"""Where the programs of an emulated device are kept: they take ten seconds each to compile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models.shared import made_once


def emulators(factory: pytest.TempPathFactory) -> Path:
    """A folder for `emulate.cache_root`. Later runs find it again, if they find the artifacts that
    `tests/models/compiler` keeps; the names of the programs have the digest of their sources."""
    kept = os.environ.get("TESTS_COMPILED")
    return Path(kept) if kept else made_once(factory, "emulators", lambda folder: None)
