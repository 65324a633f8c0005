"""Paths of the real files, which not every host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.nanoaod import data


def located(name: str) -> Path:
    """The path of a real file; without it the test is skipped, with the reason."""
    try:
        return data.locate(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
