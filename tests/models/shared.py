"""What is made once in a test run, however many processes share it (pytest-xdist's own recipe)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """An existing folder, filled by `make` in the first process that asks. Look, do not touch.

    It is this run's alone, unless TESTS_MADE names a folder in which earlier runs have made it.
    """
    base = factory.getbasetemp()
    # Without xdist the parent belongs to earlier runs too.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    run = Path(os.environ.get("TESTS_MADE") or run)
    folder = run / "shared" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_suffix(".done")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed or was killed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
