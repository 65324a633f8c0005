"""Real servers behind a real proxy, and the programs that tests of them need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.errors import ServerError
from serving.local.fleet import Fleet, find_envoy
from tests.models import served
from tests.serving.conftest import Shop


def find_prometheus(name: str) -> Path:
    """`prometheus` or `promtool`, from $PIPELINE_PROMETHEUS or PATH; skips the test if missing."""
    folder = os.environ.get("PIPELINE_PROMETHEUS")
    if found := shutil.which(name, path=folder) or shutil.which(name):
        return Path(found)
    pytest.skip(f"no {name} on PATH or in $PIPELINE_PROMETHEUS")


@pytest.fixture(scope="session")
def stall(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A shop with mixed alone, which is quickly made and loaded."""
    bundle = served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED)
    return Shop.of(tmp_path_factory.mktemp("stall"), {"mixed": bundle})


@pytest.fixture(scope="session")
def envoy() -> Path:
    try:
        return find_envoy()
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(real_triton: None, envoy: Path, stall: Shop) -> Iterator[Fleet]:
    """Two real Tritons behind a real Envoy; each module has its own, as one module kills them."""
    with Fleet(stall.repository, 2) as started:
        yield started
