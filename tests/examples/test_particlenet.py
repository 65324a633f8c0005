"""ParticleNet of weaver-core on columns: its inputs, its answers, its export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.export import Dim

from examples.particlenet import model as particlenet
from pipeline.config import load_config
from pipeline.config.assemble import reference_inputs, source_of
from stages.model.fronts.preprocess import Preprocessed
from stages.model.source import build_model
from stages.reference.answers import row_major_inputs


@pytest.fixture
def model(particlenet_weights: Path) -> particlenet.ParticleNetOnColumns:
    pytest.importorskip("weaver", reason="needs pip install --no-deps weaver-core==0.4.17")
    network = particlenet.build()
    assert isinstance(network, particlenet.ParticleNetOnColumns)
    state = torch.load(particlenet_weights, map_location="cpu", weights_only=True)
    network.load_state_dict(state, strict=True)
    return network.eval().requires_grad_(False)


def jets(n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Particles (n, 4, 128) and jets (n, 2) of the reference."""
    columns = particlenet.reference({"n": n}, seed)["jets"]
    particles = [columns[f"part_{name}"] for name in ("pt", "energy", "deta", "dphi")]
    jet = [columns[name] for name in ("pt", "energy")]
    return torch.tensor(np.stack(particles, 1)), torch.tensor(np.stack(jet, 1))


def test_the_wrapper_prepares_what_the_network_was_trained_on(
    model: particlenet.ParticleNetOnColumns,
) -> None:
    """Computed here for one particle at a time."""
    particles, jet = jets(3)
    points, features, mask = model.prepare(particles, jet)
    for i, p in np.ndindex(3, 128):
        particle = [float(x) for x in particles[i, :, p]]
        pt, _, deta, dphi = particle
        if pt == 0:
            assert not mask[i, 0, p]
            assert not features[i, :, p].any()
        else:
            expected = trained_features(particle, float(jet[i, 0]), float(jet[i, 1]))
            np.testing.assert_allclose(features[i, :, p].numpy(), expected, atol=2e-5)
            assert points[i, :, p].tolist() == [deta, dphi]


def trained_features(particle: list[float], jet_pt: float, jet_energy: float) -> Any:
    """The features of a particle by the formulas of JetClass_kin.yaml, in float64."""
    pt, energy, deta, dphi = particle
    features = [
        (np.log(pt) - 1.7) * 0.7,
        (np.log(energy) - 2.0) * 0.7,
        (np.log(pt / jet_pt) + 4.7) * 0.7,
        (np.log(energy / jet_energy) + 4.7) * 0.7,
        (np.hypot(deta, dphi) - 0.2) * 4.0,
        deta,
        dphi,
    ]
    return np.clip(features, -5, 5)


def test_the_wrapper_gives_the_answers_of_the_network(
    model: particlenet.ParticleNetOnColumns,
) -> None:
    particles, jet = jets(3)
    with torch.no_grad():
        direct = model.mod(*model.prepare(particles, jet))
    assert torch.equal(model(particles, jet), direct)


def test_the_config_with_expressions_feeds_the_network_what_numpy_would(
    model: particlenet.ParticleNetOnColumns,
    particlenet_weights: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKHEP_DATA", str(particlenet_weights.parent))
    config = load_config(Path(__file__).parents[2] / "configs" / "particlenet_raw.yaml")
    whole = build_model(source_of(config))
    assert isinstance(whole, Preprocessed)
    inputs = reference_inputs(config, config.signature())
    raw = row_major_inputs(config.signature(), inputs, {"n": 20})
    columns = {name: values[:20].double().numpy() for name, values in inputs["jets"].items()}
    exists = columns["part_pt"] > 0
    features = np.where(exists[:, None], features_by_numpy(columns), 0.0).astype(np.float32)
    points = np.stack([columns["part_deta"], columns["part_dphi"]], 1).astype(np.float32)
    expected = [torch.tensor(values) for values in (points, features, exists[:, None])]
    own_points, own_features, own_mask = whole.prepare(raw)
    assert not exists.all()
    torch.testing.assert_close(own_points, expected[0], atol=0, rtol=0)
    # float32 values up to 5
    torch.testing.assert_close(own_features, expected[1], atol=2e-6, rtol=0)
    assert torch.equal(own_mask.bool(), expected[2])
    with torch.no_grad():
        answers = model.mod(*(values.clone() for values in expected))
        torch.testing.assert_close(whole(*raw), answers, atol=1e-5, rtol=0)


def features_by_numpy(columns: dict[str, Any]) -> Any:
    """The features of all particles, (n, 7, P), also of those that do not exist."""
    with np.errstate(divide="ignore"):
        # weaver's settings: variable, subtract_by, multiply_by; then clipped to 5.
        table = [
            (np.log(columns["part_pt"]), 1.7, 0.7),
            (np.log(columns["part_energy"]), 2.0, 0.7),
            (np.log(columns["part_pt"] / columns["pt"][:, None]), -4.7, 0.7),
            (np.log(columns["part_energy"] / columns["energy"][:, None]), -4.7, 0.7),
            (np.hypot(columns["part_deta"], columns["part_dphi"]), 0.2, 4.0),
            (columns["part_deta"], 0.0, 1.0),
            (columns["part_dphi"], 0.0, 1.0),
        ]
        rows = [np.clip((x - centre) * scale, -5, 5) for x, centre, scale in table]
    return np.stack(rows, 1)


def test_it_knows_the_toy_jets_for_what_they_are(model: particlenet.ParticleNetOnColumns) -> None:
    columns, labels = particlenet._generator().jets(60, 4, 128)
    particles = np.stack([columns[f"part_{k}"] for k in ("pt", "energy", "deta", "dphi")], 1)
    jet = np.stack([columns["pt"], columns["energy"]], 1)
    scores = model(torch.tensor(particles), torch.tensor(jet)).numpy()
    mean = {
        name: dict(zip(particlenet.CLASSES, scores[labels == i].mean(0), strict=True))
        for i, name in enumerate(("qcd", "w", "top"))
    }
    assert mean["qcd"]["QCD"] > 0.6
    assert mean["w"]["Wqq"] + mean["w"]["Zqq"] > 0.5
    assert max(mean["top"], key=lambda name: mean["top"][name]) == "Tbqq"


def test_its_export_gives_its_answers_and_leaves_inputs_alone(
    model: particlenet.ParticleNetOnColumns,
) -> None:
    rows = Dim("n", min=0, max=64)
    exported = torch.export.export(
        model, jets(7), dynamic_shapes=({0: rows}, {0: rows}), strict=False
    ).module()
    for n in (0, 1, 2, 33):
        particles, jet = jets(n)
        before = particles.clone()
        expected = model(particles, jet)
        assert expected.shape == (n, 10)
        torch.testing.assert_close(exported(particles, jet), expected, atol=1e-5, rtol=0)
        assert torch.equal(particles, before)


def test_without_weaver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weaver.nn.model.ParticleNet", None)
    with pytest.raises(ImportError, match="pip install --no-deps weaver-core"):
        particlenet.build()
