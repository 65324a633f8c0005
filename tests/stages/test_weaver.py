"""The published networks of weaver-core are captured, or refused with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.particlenet.model import network
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.capture import capture
from stages.errors import CaptureError
from stages.reference.answers import Arrays
from tests.models.building import require_valid

pytest.importorskip("weaver", reason="needs pip install --no-deps weaver-core==0.4.17")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.cuda.amp.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]
PARTICLES, ROWS = 20, 40
SCORES = tuple(f"p{i}" for i in range(10))


def signature(**blocks: int) -> Signature:
    """Blocks with this many features per particle, and the mask."""
    members = [eigen(name, "float32", rows, PARTICLES) for name, rows in blocks.items()]
    layouts = {
        "jets": Layout([*members, eigen("mask", "float32", PARTICLES)]),
        "tags": Layout([column(name, "float32") for name in SCORES]),
    }
    inputs = [Block(name, "jets", (name,)) for name in blocks]
    mask = Block("exists", "jets", ("mask",), shape=(1, PARTICLES))
    outputs = [Block("scores", "tags", SCORES)]
    return Signature.build(layouts, [*inputs, mask], outputs, {"n": RowRange(0, ROWS)})


def jets(**blocks: int) -> Arrays:
    """Random rows for `signature`, of 5 to 20 particles; vectors are momenta and their energy."""
    torch.manual_seed(1)
    columns = {name: torch.randn(ROWS, rows, PARTICLES) for name, rows in blocks.items()}
    if "vectors" in columns:
        columns["vectors"][:, 3] = 4 * columns["vectors"].norm(dim=1)  # energy
    number = torch.randint(5, PARTICLES + 1, (ROWS, 1))
    return {"jets": {**columns, "mask": (torch.arange(PARTICLES) < number).float()}}


@pytest.mark.long
def test_particle_net_is_valid_although_it_writes_into_its_inputs(tmp_path: Path) -> None:
    blocks = {"points": 2, "features": 7}
    require_valid(network(), signature(**blocks), tmp_path, ("exported",), jets(**blocks), "none")


def transformer(**options: Any) -> torch.nn.Module:
    """A small ParticleTransformer with the options of its class."""
    from weaver.nn.model.ParticleTransformer import ParticleTransformer

    torch.manual_seed(1)
    sizes = {"embed_dims": [16, 16], "pair_embed_dims": [8], "num_heads": 2, "num_layers": 1}
    model = ParticleTransformer(input_dim=7, num_classes=10, num_cls_layers=1, **sizes, **options)
    return model.eval()  # type: ignore[no-any-return]


BLOCKS = {"features": 7, "vectors": 4}


@pytest.mark.long
def test_particle_transformer_that_trims_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"ParticleTransformer\.py:\d+ .*trim: false"):
        capture(transformer(), signature(**BLOCKS), jets(**BLOCKS), tmp_path, "none")


@pytest.mark.long
def test_particle_transformer_that_does_not_trim_is_valid(tmp_path: Path) -> None:
    model = transformer(trim=False)
    require_valid(model, signature(**BLOCKS), tmp_path, ("exported",), jets(**BLOCKS), "none")
