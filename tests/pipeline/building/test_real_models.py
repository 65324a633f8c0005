"""The configs of this repository from end to end: build, promote, load in production, run.

Those that need real files skip where these are missing; examples/README.md says where they come
from. The answers are compared with the eager model, called by the test on row-major tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from examples.jet_tagger import generate
from examples.jet_tagger import model as jet_tagger
from examples.jet_tagger import train as jet_tagger_training
from examples.nanoaod import data as nanoaod
from examples.nanoaod import model as nanoaod_model
from examples.nanoaod import train as nanoaod_training
from examples.particlenet import model as particlenet
from pipeline.building.runner import RunResult, run
from pipeline.promotion.promoting import Assessment, promote
from registry.bundle.manifest import Candidate
from registry.store.registry import Registry
from runtime.loader import load
from runtime.session.session import Session
from soa.memory import Collection

CONFIGS = Path(__file__).parents[3] / "configs"


@dataclass(frozen=True)
class Life:
    """A config that was built and promoted in a registry of its own."""

    config: Path
    work: Path
    registry: Registry
    result: RunResult
    promoted: Assessment

    @property
    def candidates(self) -> dict[str, Candidate]:
        [target] = self.result.bundle.manifest.targets.values()
        return target.candidates

    def session(self) -> Session:
        return load(f"{self.result.version.name}@production", registry=self.registry)


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Loading for production sets torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Life:
    return live(CONFIGS / "demo.yaml", tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def real_particlenet(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Life:
    pytest.importorskip("weaver", reason="needs pip install --no-deps weaver-core==0.4.17")
    weights = located("ParticleNet_kin.pt")
    folder = tmp_path_factory.mktemp("particlenet")
    document = yaml.safe_load((CONFIGS / "particlenet.yaml").read_text())
    document["model"]["weights"] = str(weights)
    for part in (document["model"], document["reference"]):
        part["factory"] = str(CONFIGS / part["factory"])
    # One engine and half the rows: a minute of work instead of several.
    document["engines"] = ["aoti"]
    document["model"]["torchscript_route"] = "none"
    document["rows"] = {"n": {"min": 0, "max": 33, "typical": [1, 4]}}
    config = folder / "particlenet.yaml"
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return live(config, folder)


@pytest.fixture(scope="session")
def nanoaod_flavour(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Life:
    pytest.importorskip("uproot", reason="reading NanoAOD needs uproot")
    located(nanoaod.FILE)
    folder = tmp_path_factory.mktemp("nanoaod")
    document = yaml.safe_load((CONFIGS / "nanoaod.yaml").read_text())
    document["model"]["weights"] = str(CONFIGS / document["model"]["weights"])
    for part in (document["model"], document["reference"]):
        part["factory"] = str(CONFIGS / part["factory"])
    document["engines"] = ["aoti", "exported"]
    config = folder / "nanoaod.yaml"
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return live(config, folder)


def located(name: str) -> Path:
    try:
        return nanoaod.locate(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def live(config: Path, folder: Path) -> Life:
    work, registry = folder / "work", Registry(f"sqlite:///{folder}/registry/registry.db")
    result = run(config, registry, work, say=print)  # shown where a test fails
    promoted = promote(registry, result.version.ref, "production", say=print)
    return Life(config, work, registry, result, promoted)


def assert_lived(life: Life, engines: set[str], largest_deviation: float) -> None:
    """Every candidate is valid and close, the fastest serves, and every gate passed."""
    assert set(life.candidates) == engines
    for name, candidate in life.candidates.items():
        assert (candidate.status, candidate.reason) == ("valid", None), name
        assert candidate.worst
        for output, worst in candidate.worst.items():
            assert worst.max_abs < largest_deviation, (name, output)
            assert worst.outside == 0, (name, output)
    [target] = life.result.bundle.manifest.targets.values()
    assert target.status == "verified"
    assert target.chosen in engines
    assert life.promoted.version.aliases == ("production",)
    assert {d.gate for d in life.promoted.decisions} == {
        "digests",
        "verified",
        "tolerance",
        "reference",
        "speed",
    }
    assert all(d.passed for d in life.promoted.decisions)
    again = run(life.config, life.registry, life.work)
    assert again.worked == ()
    assert again.version.ref == life.result.version.ref


def row_major(columns: dict[str, Any], names: tuple[str, ...]) -> torch.Tensor:
    return torch.from_numpy(np.stack([columns[name].astype(np.float32) for name in names], 1))


def answers(collection: Collection, names: list[str]) -> torch.Tensor:
    return torch.stack([collection.tensor(name) for name in names], 1)


def test_the_demo_model(demo: Life) -> None:
    assert_lived(demo, {"aoti", "torchscript", "exported"}, 1e-5)
    session = demo.session()
    model = jet_tagger.build().eval()
    model.load_state_dict(load_file(jet_tagger_training.WEIGHTS))
    for n in (0, 1, 33, 1000):
        columns, truth = generate.jets(n, seed=77)
        particles = row_major(columns, ("part_pt", "part_energy", "part_deta", "part_dphi"))
        with torch.no_grad():
            expected, label = model(particles, row_major(columns, ("pt", "eta", "mass")))
        del columns["energy"]
        jets = Collection.from_arrays(session.layout("jets"), columns)
        tags = session.collection("tags", n)
        session.run(jets, tags)
        found = answers(tags, ["p_qcd", "p_w", "p_top"])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert torch.equal(tags.tensor("label"), label)
    assert float((tags.tensor("label").numpy() == truth).mean()) > 0.8  # 0.85 on 20000 jets


def test_the_real_particlenet(real_particlenet: Life) -> None:
    assert_lived(real_particlenet, {"aoti"}, 1e-5)
    session = real_particlenet.session()
    assert session.origin is not None and session.origin.engine == "aoti"
    model = particlenet.build().eval()
    state = torch.load(located("ParticleNet_kin.pt"), map_location="cpu", weights_only=True)
    model.load_state_dict(state, strict=True)
    classes = [c.name for c in session.layout("scores").columns]
    for n in (0, 1, 2, 33):
        columns = particlenet.reference({"n": n}, seed=77)["jets"]  # not the seed of the build
        particles = row_major(columns, ("part_pt", "part_energy", "part_deta", "part_dphi"))
        with torch.no_grad():
            expected = model(particles, row_major(columns, ("pt", "energy")))
        jets = Collection.from_arrays(session.layout("jets"), columns)
        scores = session.collection("scores", n)
        session.run(jets, scores)
        torch.testing.assert_close(answers(scores, classes), expected, atol=1e-5, rtol=0)


def test_the_flavour_tagger_on_the_real_file(nanoaod_flavour: Life) -> None:
    assert_lived(nanoaod_flavour, {"aoti", "exported"}, 1e-5)
    session = nanoaod_flavour.session()
    columns, labels = nanoaod.jets(located(nanoaod.FILE))
    model = nanoaod_model.build().eval()
    model.load_state_dict(load_file(nanoaod_training.WEIGHTS))
    with torch.no_grad():
        expected = model(row_major(columns, nanoaod_model.INPUTS))
    jets = Collection.from_arrays(session.layout("jets"), columns)
    flavours = session.collection("flavours", jets.n)
    session.run(jets, flavours)
    assert jets.n == len(labels) == 537
    found = answers(flavours, ["p_light", "p_c", "p_b"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
