"""Real files: every jet of NanoAOD, and every event of HZZ with its jets and muons."""

from __future__ import annotations

from pathlib import Path

import awkward as ak
import numpy as np
import pytest
import torch
import uproot

import pipeline
from examples.hzz.run import FILE
from examples.nanoaod import data, model
from pipeline.building.run_config import run
from registry.store.registry import Registry
from tests.examples import test_hzz as hzz
from tests.models.project import PASSED
from tests.models.real_files import located

pytestmark = pytest.mark.long  # they build each config with one engine
ROOT = Path(__file__).parents[3]


def promote_example(folder: Path, config: str, registry: Registry) -> None:
    """Runs an example's config with one engine, and promotes the version to production."""
    text = (ROOT / "configs" / config).read_text().replace("../examples", str(ROOT / "examples"))
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("targets", "engi")))
    (folder / config).write_text(text + "\ntargets: [cpu/x86-64-v3]\nengines: [exported]\n")
    built = run(folder / config, registry, folder / "work")
    registry.promote(built.version, "production", PASSED)


def test_every_jet_of_nanoaod_has_its_answer(
    tmp_path: Path, empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = located(data.FILE)
    monkeypatch.setenv("SKHEP_DATA", str(source.parent))
    promote_example(tmp_path, "nanoaod.yaml", empty)
    out = tmp_path / "out"
    keep = ["event", "Jet_pt"]
    pipeline.apply("nanoaod-flavour@production", source, out, keep=keep, registry=empty)
    with uproot.open(source) as before, uproot.open(out / source.name) as after:
        events, scored = before["Events"].arrays(["event", "Jet_pt"]), after["Events"].arrays()
    assert scored["event"].tolist() == events["event"].tolist()
    assert scored["Jet_pt"].tolist() == events["Jet_pt"].tolist()
    columns, _ = data.jets(source)
    inputs = np.stack([columns[name].astype("f4") for name in model.INPUTS], axis=1)
    network = model.build().eval()
    network.load_state_dict(trained_weights())
    with torch.no_grad():
        expected = network(torch.from_numpy(inputs)).numpy()
    for i, name in enumerate(("p_light", "p_c", "p_b")):
        assert ak.num(scored[name]).tolist() == ak.num(events["Jet_pt"]).tolist()
        np.testing.assert_allclose(ak.flatten(scored[name]), expected[:, i], atol=1e-5, rtol=1e-4)


def trained_weights() -> dict[str, torch.Tensor]:
    """The weights of the example's network."""
    from safetensors.torch import load_file

    return load_file(ROOT / "examples/nanoaod/weights.safetensors")


def test_every_event_of_hzz_has_its_answer(tmp_path: Path, empty: Registry) -> None:
    source = located(FILE)
    promote_example(tmp_path, "hzz.yaml", empty)
    with uproot.open(source) as file:
        events = file["events"].arrays(filter_name=["Jet_*", "Muon_*", "NJet"])
    out = tmp_path / "hzz.parquet"
    pipeline.apply("hzz-events@production", source, out, keep=["NJet", "Jet_Px"], registry=empty)
    scored = ak.from_parquet(out)
    assert scored["NJet"].tolist() == events["NJet"].tolist()
    assert scored["Jet_Px"].tolist() == events["Jet_Px"].tolist()
    expected = hzz.expected(events).numpy()
    for i, name in enumerate(("signal", "background")):
        np.testing.assert_allclose(scored[name], expected[:, i], atol=1e-5, rtol=1e-4)
