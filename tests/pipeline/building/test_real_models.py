"""The configs of this repository from end to end: build, promote, load in production, run.

Tests that need real files are skipped if these are missing; examples/README.md says where the files
come from. The answers are compared with the eager model, called by the test on row-major tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from examples.particlenet import model as particlenet
from pipeline.building.run_config import RunResult, run
from pipeline.promotion.promoting import Assessment, promote
from registry.store.registry import Registry
from runtime.loader import load
from runtime.session.session import Session
from soa.memory import Collection
from tests.models.project import TARGET
from tests.models.real_files import located

CONFIGS = Path(__file__).parents[3] / "configs"


@dataclass(frozen=True)
class Life:
    """A config that was built and promoted in a registry of its own."""

    config: Path
    work: Path
    registry: Registry
    result: RunResult
    promoted: Assessment


Bring = Callable[..., Life]
"""Builds and promotes a config by its name; keywords are changes of it."""


@pytest.fixture
def bring(tmp_path: Path, quick_commits: None) -> Bring:
    """The config is built and promoted in a registry of this test."""

    def to_production(name: str, **changes: Any) -> Life:
        """One CPU level; `changes` replace keys of the config, or are added to `model`."""
        document = yaml.safe_load((CONFIGS / name).read_text())
        document |= {"targets": [TARGET], "compile": {"benchmark_s": 1}, **changes} | {
            "model": document["model"] | changes.get("model", {})
        }
        document["model"]["weights"] = str(CONFIGS / document["model"]["weights"])
        for section in (document["model"], document["reference"]):
            section["factory"] = str(CONFIGS / section["factory"])
        config = tmp_path / name
        config.write_text(yaml.safe_dump(document, sort_keys=False))
        work, registry = tmp_path / "work", Registry(f"sqlite:///{tmp_path}/store/registry.db")
        result = run(config, registry, work, say=print)  # shown if a test fails
        promoted = promote(registry, result.version.ref, "production", say=print)
        return Life(config, work, registry, result, promoted)

    return to_production


def production(life: Life, engines: set[str]) -> Session:
    """Requires valid, accurate candidates and passed gates; returns a session in production.

    A second run has nothing to do.
    """
    [target] = life.result.bundle.manifest.targets.values()
    assert set(target.candidates) == engines
    for name, candidate in target.candidates.items():
        assert (candidate.status, candidate.reason) == ("valid", None), name
        assert candidate.worst
        for output, worst in candidate.worst.items():
            assert worst.max_abs < 1e-5, (name, output)
            assert worst.outside == 0, (name, output)
    assert target.status == "verified"
    assert target.chosen in engines
    assert life.promoted.version.aliases == ("production",)
    gates = {d.gate: d.passed for d in life.promoted.decisions}
    expected = ("digests", "verified", "tolerance", "reference", "speed")
    assert gates == dict.fromkeys(expected, True)
    again = run(life.config, life.registry, life.work)
    assert (again.worked, again.version.ref) == ((), life.result.version.ref)
    return load(f"{life.result.version.name}@production", registry=life.registry)


def row_major(columns: dict[str, Any], names: tuple[str, ...]) -> torch.Tensor:
    """Columns as one tensor of float32: (n, names)."""
    return torch.from_numpy(np.stack([columns[name].astype(np.float32) for name in names], 1))


def answers(session: Session, columns: dict[str, Any], output: str) -> Collection:
    """The output collection of a run on these columns of jets."""
    jets = Collection.from_arrays(session.layout("jets"), columns)
    outputs = session.collection(output, jets.n)
    session.run(jets, outputs)
    return outputs


def require_close(outputs: Collection, names: Sequence[str], expected: torch.Tensor) -> None:
    """Requires the columns with these names to be (n, names) of `expected`."""
    tensor = torch.stack([outputs.tensor(name) for name in names], 1)
    torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


@pytest.mark.long  # `make demo` builds it too
def test_the_demo_model_from_its_config_to_production(bring: Bring) -> None:
    session = production(bring("demo.yaml"), {"lanes", "aoti"})
    model = jet_tagger.build().eval()
    model.load_state_dict(load_file(jet_tagger_training.WEIGHTS))
    for n in (0, 1, 33, 1000):
        columns, truth = generate.jets(n, seed=77)
        particles = row_major(columns, ("part_pt", "part_energy", "part_deta", "part_dphi"))
        with torch.no_grad():
            expected, label = model(particles, row_major(columns, ("pt", "eta", "mass")))
        del columns["energy"]
        tags = answers(session, columns, "tags")
        require_close(tags, ["p_qcd", "p_w", "p_top"], expected)
        assert torch.equal(tags.tensor("label"), label)
    assert float((tags.tensor("label").numpy() == truth).mean()) > 0.8  # 0.85 on 20000 jets


@pytest.mark.long
def test_the_real_particlenet_from_its_config_to_production(bring: Bring) -> None:
    """With one engine and half the rows, this takes a minute instead of several."""
    pytest.importorskip("weaver", reason="needs pip install --no-deps weaver-core==0.4.17")
    weights = located("ParticleNet_kin.pt")
    life = bring(
        "particlenet.yaml",
        model={"weights": str(weights), "torchscript_route": "none"},
        engines=["aoti"],
        rows={"n": {"min": 0, "max": 33, "typical": [1, 4]}},
    )
    session = production(life, {"aoti"})
    model = particlenet.build().eval()
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True), strict=True)
    classes = [c.name for c in session.layout("scores").columns]
    for n in (0, 1, 2, 33):
        columns = particlenet.reference({"n": n}, seed=77)["jets"]  # not the seed of the build
        particles = row_major(columns, ("part_pt", "part_energy", "part_deta", "part_dphi"))
        with torch.no_grad():
            expected = model(particles, row_major(columns, ("pt", "energy")))
        require_close(answers(session, columns, "scores"), classes, expected)
