"""Our artifacts are right on SoA memory at every n; a plain compiled model is silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

from engines.aoti.build import settings_for
from engines.exported import quiet_torch
from engines.target import Target
from soa.memory import Collection
from tests.models.building import ENGINES, Built
from tests.models.mlps import CLASSES, FEATURES, PointwiseFirst

SIZES = (0, 1, 2, 31, 32, 33, 1000, 4099)


def row_major(jets: Collection) -> torch.Tensor:
    """A copy of the features, contiguous and of shape (n, 6)."""
    return torch.stack([jets.tensor(name) for name in FEATURES], dim=1)


def answers(tags: Collection) -> torch.Tensor:
    """The probabilities, of shape (n, 3)."""
    return torch.stack([tags.tensor(name) for name in CLASSES], dim=1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model compiled as in AOTInductor's documentation, with an (n, F) example."""
    path = tmp_path_factory.mktemp("plain") / "model.pt2"
    model = PointwiseFirst().eval().requires_grad_(False)
    with quiet_torch():
        program = torch.export.export(
            model, (torch.randn(64, 6),), dynamic_shapes=({0: Dim("n", min=1, max=5000)},)
        )
        # The flags of the other tests, for which precompiled headers exist.
        configs = settings_for(Target.parse("cpu"), {})
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=configs
        )
        return torch._inductor.aoti_load_package(str(path))


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_right_at_every_size(mlp: Built, name: str) -> None:
    session = mlp.session(name)
    for n in SIZES:
        for spare in (0, 1, 77):
            inputs, written = mlp.collections({"n": n}, spare)
            session.run(inputs, written)
            expected = mlp.model(row_major(inputs["jets"]))
            torch.testing.assert_close(
                answers(written["tags"]), expected, atol=1e-5, rtol=0, msg=f"n={n}, spare={spare}"
            )


def test_where_plain_aotinductor_is_silently_wrong_ours_is_right(mlp: Built, plain: Any) -> None:
    session = mlp.session("aoti")
    for n in SIZES[1:]:
        inputs, written = mlp.collections({"n": n}, spare=1)
        jets = inputs["jets"]
        strided = jets.run("a", 0, 6).tensor()[:, :n].T
        assert strided.shape == (n, 6)
        assert strided.stride() == (1, jets.layout.padded_length("a", jets.capacity))
        expected = mlp.model(strided)
        torch.testing.assert_close(plain(strided.contiguous()), expected, atol=1e-5, rtol=0)

        wrong = plain(strided)  # no exception, and nothing in it looks odd
        assert wrong.isfinite().all()
        assert (wrong - expected).abs().max() > 0.1

        session.run(inputs, written)
        torch.testing.assert_close(answers(written["tags"]), expected, atol=1e-5, rtol=0)
