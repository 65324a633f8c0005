"""Paths of the real files; a test is skipped, with the reason, if its file is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.nanoaod import data
from tests.models.real_files import located


@pytest.fixture
def nanoaod_file() -> Path:
    pytest.importorskip("uproot", reason="reading NanoAOD needs uproot")
    return located(data.FILE)


@pytest.fixture
def particlenet_weights() -> Path:
    return located("ParticleNet_kin.pt")
