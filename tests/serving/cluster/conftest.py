from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pipeline
from pipeline.deployment.repository import Deployed, deploy
from registry.store.registry import Registry
from serving.client.options import RemoteOptions
from serving.errors import ServerError
from serving.local.fleet import Fleet, find_envoy
from serving.remote.remote_session import RemoteSession
from tests.models import served
from tests.models.project import PASSED


@dataclass(frozen=True)
class Stall:
    """A repository with mixed/1 alone, which is quickly made and loaded."""

    registry: Registry
    repository: Path
    deployed: Deployed

    def connect(self, url: str) -> RemoteSession:
        options = RemoteOptions(retries=8, deadline_s=60, in_flight=16)
        return pipeline.load("mixed@production", device=url, registry=self.registry, remote=options)


def find_prometheus(name: str) -> Path:
    """`prometheus` or `promtool`, from $PIPELINE_PROMETHEUS or PATH; skips the test if missing."""
    folder = os.environ.get("PIPELINE_PROMETHEUS")
    if found := shutil.which(name, path=folder) or shutil.which(name):
        return Path(found)
    pytest.skip(f"no {name} on PATH or in $PIPELINE_PROMETHEUS")


@pytest.fixture(scope="session")
def stall(tmp_path_factory: pytest.TempPathFactory) -> Stall:
    folder = tmp_path_factory.mktemp("stall")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    bundle = served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED)
    version = registry.promote(registry.register(bundle), "production", PASSED)
    return Stall(
        registry, folder / "repository", deploy(registry, version.ref, folder / "repository")
    )


@pytest.fixture(scope="session")
def envoy() -> Path:
    try:
        return find_envoy()
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(real_triton: None, envoy: Path, stall: Stall) -> Iterator[Fleet]:
    """Two real Tritons behind a real Envoy; each module has its own, as one module kills them."""
    with Fleet(stall.repository, 2) as started:
        yield started
