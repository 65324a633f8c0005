"""Versions in production and their Triton repositories, and a real Triton."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

import pipeline
from pipeline.deployment.repository import Deployed, deploy
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.checked import recorded_tolerances
from runtime.loader import load as load_here
from runtime.session.session import Session
from serving.client.options import RemoteOptions
from serving.errors import ServerError
from serving.local.triton import ServerOptions, TritonServer, find_triton
from serving.remote.remote_session import RemoteSession
from stages.judging.validate import validate_session
from stages.reference.answers import Reference
from tests.models import served, tagged
from tests.models.building import reference_collections
from tests.models.project import PASSED, Built


@dataclass(frozen=True)
class Shop:
    """A registry with version 1 of each model in production, and their Triton repository."""

    registry: Registry
    bundles: dict[str, Bundle]
    repository: Path
    deployed: dict[str, Deployed]

    @classmethod
    def of(cls, folder: Path, bundles: dict[str, Bundle]) -> Self:
        """A shop in a new folder, which gets the registry and the repository."""
        registry = Registry(f"sqlite:///{folder}/registry.db")
        deployed = {}
        for name, bundle in bundles.items():
            version = registry.promote(registry.register(bundle), "production", PASSED)
            deployed[name] = deploy(registry, version.ref, folder / "repository")
        return cls(registry, bundles, folder / "repository", deployed)

    def connect(self, url: str, name: str, options: RemoteOptions) -> RemoteSession:
        """A session of a model on a server."""
        ref = f"{name}@production"
        session = pipeline.load(ref, device=url, registry=self.registry, remote=options)
        assert isinstance(session, RemoteSession)
        return session

    def local(self, name: str) -> Session:
        """A session in this process."""
        return load_here(self.deployed[name].folder / "1" / ".bundle")

    def event(self, name: str, session: Any, n: int) -> tuple[Any, Any]:
        """Collections with the first n rows of the reference, and for the answers."""
        inputs = Reference.load(self.bundles[name].file("reference.safetensors")).inputs
        case = dict.fromkeys(session.signature.dims, n)
        return reference_collections(session.signature, inputs, case)

    def require_valid(self, name: str, session: Session) -> None:
        """All row counts, dtypes and shapes, poisoned outputs, padding: as in validation."""
        bundle = self.bundles[name]
        reference = Reference.load(bundle.file("reference.safetensors"))
        tolerances = recorded_tolerances(bundle.manifest)
        report = validate_session(session, "served", reference, tolerances)
        assert report.valid, report.reason
        assert len(report.cases) > 5


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; fails after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def shop(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A shop with jets, mixed and event."""
    bundles = {
        "jets": jets.bundle,
        "mixed": served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED),
        "event": served.shared(tmp_path_factory, "event", served.Event(), served.EVENT),
    }
    return Shop.of(tmp_path_factory.mktemp("shop"), bundles)


@pytest.fixture(scope="session")
def tags(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> tagged.Tags:
    """Versions of a model whose answers repeat the number of their event."""
    model, signature = tagged.Tagged(), tagged.SIGNATURE
    bundle = served.shared(tmp_path_factory, tagged.NAME, model, signature)
    return tagged.make(tmp_path_factory.mktemp("tagged"), bundle)


@pytest.fixture(scope="session")
def real_triton() -> None:
    """Skips tests on a host without Triton."""
    try:
        find_triton()
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def triton(real_triton: None, shop: Shop) -> Iterator[TritonServer]:
    """A real Triton for all tests, with the three models of the shop."""
    with TritonServer(shop.repository, ServerOptions(ready_s=120)) as server:
        yield server
