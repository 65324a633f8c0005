"""Files that are made once in a test run and shared by its processes, as xdist recommends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills in the first process that asks. Its users must not change it.

    It is this run's own, unless TESTS_MADE names a folder in which earlier runs have made it.
    """
    base = factory.getbasetemp()
    # Without xdist, earlier runs share the parent folder.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    run = Path(os.environ.get("TESTS_MADE") or run)
    folder = run / "shared" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_suffix(".done")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
