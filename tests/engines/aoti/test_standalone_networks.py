"""Every network of this repository without torch: valid, and of the same bits for both levels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engines import Portable, Target, engine, host_cpu_levels
from examples.nanoaod import data
from pipeline.config import load_config
from pipeline.config.assemble import reference_inputs, source_of, tolerances_of
from runtime.session import Session
from stages.model.source import build_model
from stages.reference.answers import Arrays, Reference, filled_collections
from stages.validate import validate_session
from tests.models import building

NAME = "aoti-standalone"
CONFIGS = Path(__file__).parents[3] / "configs"
NETWORKS = [f"zoo/{path.name}" for path in sorted((CONFIGS / "zoo").glob("*.yaml"))]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("x86-64-v3" not in host_cpu_levels(), reason=f"{NAME} is for x86-64-v3"),
]


def answers(session: Session, inputs: Arrays) -> bytes:
    """What it writes at its largest size."""
    case = {dim: rows.max for dim, rows in session.signature.ranges.items()}
    given, written = filled_collections(session.signature, inputs, case, torch.device("cpu"))
    session.bind(given, written)()
    return b"".join(
        np.ascontiguousarray(collection[member.name]).tobytes()
        for collection in written.values()
        for member in collection.layout.columns
    )


@pytest.mark.parametrize("name", [*NETWORKS, "demo.yaml", "particlenet.yaml"])
def test_networks(name: str, tmp_path: Path) -> None:
    if name == "particlenet.yaml":
        try:
            data.locate("ParticleNet_kin.pt")
        except FileNotFoundError as error:
            pytest.skip(str(error))
    config = load_config(CONFIGS / name)
    signature = config.signature()
    model = build_model(source_of(config))
    inputs = reference_inputs(config, signature)
    nonfinite = config.reference.nonfinite
    built = building.build(model, signature, tmp_path, (NAME,), inputs, "none", nonfinite)
    reference = Reference.load(built.capture.reference)
    tolerances = tolerances_of(config, signature)
    assert validate_session(built.session(NAME), NAME, reference, tolerances).reason is None
    if "x86-64-v4" in host_cpu_levels():
        out = tmp_path / "v3"
        out.mkdir()
        source = Portable(built.capture.program, None)
        made = engine(NAME).compile(source, Target.parse("cpu/x86-64-v3"), {}, out)
        lower = Session(signature, engine(NAME).open(out / made[0], torch.device("cpu")))
        assert answers(lower, inputs) == answers(built.session(NAME), inputs)
