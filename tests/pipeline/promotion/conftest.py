from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import pipeline
from registry.bundle.bundle import Bundle
from registry.shadow_record import ShadowRecord
from registry.store.registry import Registry
from runtime.session.session import Session
from soa.memory import Collection
from tests.models import mlps, project
from tests.models.project import CONFIG, PASSED, Project
from tests.models.shared import made_once
from tests.models.versions import copy_of, store_of

Opened = TypeVar("Opened", bound=Session)
ROWS = 3000
GATES = """
gates:
  max_slowdown: 1000
  metrics:
    data: test.parquet
    label: truth
    functions:
      accuracy: {function: accuracy, output: probabilities, min: 0.001, max_drop: 0.01}
      auc: {function: roc_auc, output: x, signal: 0}
      eff: {function: efficiency, output: x, signal: 0, background: 0.1}
      weighted: {function: own.py:weighted, output: y, max: 2}
"""
OWN = """
def weighted(labels, outputs, column):
    return (outputs * column("weight")).mean()
"""


@dataclass(frozen=True)
class Gated:
    """Versions of one model, each with its own gates.

    `project` is this process's own copy of the good version's project. `data` is the file of
    labelled rows: `features` (ROWS, 6) and `truth` (ROWS), the classes that `good` gives them.
    """

    project: Project
    good: Bundle
    bad: Bundle
    data: Path
    features: torch.Tensor
    truth: torch.Tensor


def write_gated(folder: Path, seed: int, gates: str = GATES) -> Project:
    """Writes a project for one engine that needs no compiler, and its labelled rows."""
    config = CONFIG.replace("[aoti, torchscript, exported]", "[exported]") + gates
    written = project.write_project(folder, seed=seed, config=config)
    draw = np.random.default_rng(1)
    columns = {name: draw.normal(size=ROWS).astype(np.float32) for name in "abcdef"}
    features = torch.from_numpy(np.stack([*columns.values()], axis=1))
    truth = mlps.PointwiseFirst(1)(features).argmax(1).numpy()
    weight = np.full(ROWS, 0.5)
    pq.write_table(pa.table(columns | {"truth": truth, "weight": weight}), folder / "test.parquet")
    (folder / "own.py").write_text(OWN)
    return written


@pytest.fixture(scope="session")
def gated(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Gated:
    """Both versions, built once for all test processes."""

    def make(folder: Path) -> None:
        for name, seed in (("good", 1), ("bad", 2)):
            project.build(write_gated(folder / name, seed))

    folder = made_once(tmp_path_factory, "gated", make)
    good, bad = (
        project.copied(folder / name, tmp_path_factory.mktemp(name)) for name in ("good", "bad")
    )
    table = pq.read_table(folder / "good" / "test.parquet")
    columns = [torch.from_numpy(table[name].to_numpy().copy()) for name in "abcdef"]
    truth = torch.from_numpy(table["truth"].to_numpy().copy())
    data = folder / "good/test.parquet"
    return Gated(good.project, good.bundle, bad.bundle, data, torch.stack(columns, 1), truth)


@pytest.fixture(scope="session")
def store_of_rivals(
    gated: Gated, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of `rivals`, made once for all tests."""

    def fill(registry: Registry) -> None:
        registry.promote(registry.register(gated.good), "production", PASSED)
        registry.promote(registry.register(gated.bad), "staging", PASSED)

    return store_of(tmp_path_factory, empty_database, fill)


@pytest.fixture
def rivals(store_of_rivals: Path, tmp_path: Path) -> Registry:
    """jets/1 is in production, and jets/2, another model, in staging."""
    return copy_of(store_of_rivals, tmp_path / "store")


def beside(kind: type[Opened], registry: Registry, **options: Any) -> Opened:
    """Opens production with a shadow or a canary, which gives a session of this kind."""
    session = pipeline.load("jets@production", registry=registry, **options)
    assert isinstance(session, kind)
    return session


def record_of(registry: Registry, ref: str = "jets/2") -> ShadowRecord:
    """The only record of a version beside production, as the registry has it."""
    (record,) = registry.find(ref).shadows.values()
    return record


def event(session: Session, n: int, seed: int = 1) -> tuple[Collection, Collection, torch.Tensor]:
    """Random jets and their tags, which are not filled yet, and the jets' features (n, 6)."""
    jets, tags = session.collection("jets", n), session.collection("tags", n)
    features = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    for i, name in enumerate("abcdef"):
        jets.fill(name, features[:, i])
    return jets, tags, features


def read(tags: Collection) -> torch.Tensor:
    """The three probabilities of each jet: (n, 3)."""
    return torch.stack([tags.tensor(name) for name in "xyz"], dim=1)


def regated(bundle: Bundle, folder: Path, gates: dict[str, Any]) -> Bundle:
    """The bundle with other gates; the folder's name is its description, so each is another one."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["provenance"]["config"]["gates"] |= gates
        manifest["description"] = folder.name

    return project.resealed(bundle, folder, edit)
