from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.deployment.repository import Deployed, deploy
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from serving.errors import ServerError
from serving.local.triton import ServerOptions, TritonServer, find_triton
from tests.models import served, tagged
from tests.models.project import PASSED, Built


@dataclass(frozen=True)
class Shop:
    """A registry with jets/1, mixed/1 and event/1 in production, and their Triton repository."""

    registry: Registry
    bundles: dict[str, Bundle]
    repository: Path
    deployed: dict[str, Deployed]


@pytest.fixture(scope="session")
def shop(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    bundles = {
        "jets": jets.bundle,
        "mixed": served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED),
        "event": served.shared(tmp_path_factory, "event", served.Event(), served.EVENT),
    }
    deployed = {}
    for name, bundle in bundles.items():
        version = registry.promote(registry.register(bundle), "production", PASSED)
        deployed[name] = deploy(registry, version.ref, folder / "repository")
    return Shop(registry, bundles, folder / "repository", deployed)


@pytest.fixture(scope="session")
def tags(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> tagged.Tags:
    model, signature = tagged.Tagged(), tagged.SIGNATURE
    bundle = served.shared(tmp_path_factory, tagged.NAME, model, signature)
    return tagged.make(tmp_path_factory.mktemp("tagged"), bundle)


@pytest.fixture(scope="session")
def real_triton() -> None:
    try:
        find_triton()
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def triton(real_triton: None, shop: Shop) -> Iterator[TritonServer]:
    """A real Triton for all tests, with the three models of the shop."""
    with TritonServer(shop.repository, ServerOptions(ready_s=120)) as server:
        yield server
