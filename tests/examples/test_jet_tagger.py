"""The network of the demo: its weights, and the properties that it was made for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.jet_tagger import generate, train
from examples.jet_tagger.model import JetTagger, build


@pytest.fixture(scope="module")
def model() -> JetTagger:
    tagger = build()
    assert isinstance(tagger, JetTagger)
    tagger.load_state_dict(load_file(train.WEIGHTS))
    return tagger.eval().requires_grad_(False)


def jets(n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Particles (n, 4, 16) and jets (n, 3) of the reference; its jets have 0 to 7 particles too."""
    columns = generate.reference({"n": n}, seed)["jets"]
    particles = [columns[f"part_{name}"] for name in ("pt", "energy", "deta", "dphi")]
    jet = [columns[name] for name in ("pt", "eta", "mass")]
    return torch.tensor(np.stack(particles, 1)), torch.tensor(np.stack(jet, 1))


def test_the_committed_weights_reach_the_documented_accuracy(model: JetTagger) -> None:
    # 0.852 on 20000 jets; the statistical error on 4000 is 0.006.
    assert train.accuracy(model, *train.tensors(4000, seed=987654)) > 0.83


def test_the_committed_weights_are_small() -> None:
    assert train.WEIGHTS.stat().st_size < 1_000_000


def test_answers_are_probabilities_and_the_label_is_the_largest(model: JetTagger) -> None:
    probabilities, label = model(*jets(100))
    assert probabilities.shape == (100, 3)
    assert probabilities.dtype == torch.float32
    assert label.shape == (100,)
    assert label.dtype == torch.int32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(100))
    assert torch.equal(label.long(), probabilities.argmax(1))


@pytest.mark.parametrize("junk", [-7.0, 1.0e30, float("inf"), float("nan")])
def test_what_lies_in_absent_particles_does_not_matter(model: JetTagger, junk: float) -> None:
    particles, jet = jets(200)
    expected, _ = model(particles, jet)
    absent = particles[:, 0] == 0
    assert absent.any()
    dirty = particles.clone()
    for feature in (1, 2, 3):
        dirty[:, feature][absent] = junk
    assert torch.equal(model(dirty, jet)[0], expected)


def test_ties_between_neighbours_do_not_matter(model: JetTagger) -> None:
    # On a coarse grid many distances are equal, so the order of the particles decides which are
    # among the nearest. The answer must not depend on it.
    particles, jet = jets(200)
    particles[:, 2:] = (particles[:, 2:] * 10).round() / 10
    expected, _ = model(particles, jet)
    for seed in range(3):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        answers, _ = model(particles[:, :, order], jet)
        torch.testing.assert_close(answers, expected, atol=1e-5, rtol=0)


def test_a_jet_without_particles_has_an_answer(model: JetTagger) -> None:
    probabilities, _ = model(torch.zeros(1, 4, 16), torch.tensor([[400.0, 0.1, 0.0]]))
    assert probabilities.isfinite().all()


def test_the_reference_has_jets_with_fewer_particles_than_neighbours() -> None:
    columns = generate.reference({"n": 400}, 1)["jets"]
    count = np.count_nonzero(columns["part_pt"], axis=1)
    assert {0, 1, 2} <= set(count.tolist())
    assert np.median(count) == 16
    assert all(len(values) == 400 for values in columns.values())


def test_training_learns() -> None:
    """Of three classes, a guess is right in a third of the cases."""
    model = train.train(3000, epochs=2, seed=1, tried=500)
    assert train.accuracy(model, *train.tensors(1000, seed=2)) > 0.5
