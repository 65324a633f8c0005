"""Paths of the real files; a test is skipped, with the reason, if its file is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.nanoaod import data


@pytest.fixture
def nanoaod_file() -> Path:
    pytest.importorskip("uproot", reason="reading NanoAOD needs uproot")
    return _located(data.FILE)


@pytest.fixture
def particlenet_weights() -> Path:
    return _located("ParticleNet_kin.pt")


def _located(name: str) -> Path:
    try:
        return data.locate(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
