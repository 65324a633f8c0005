"""A real file with jagged columns: scored in uproot's own memory, equal to eager on padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import torch

from examples.hzz.model import build
from examples.hzz.run import FILE
from pipeline.building.run_config import run
from pipeline.config import Config, load_config
from pipeline.loading import load
from registry.store.registry import Registry
from runtime.session.session import Session
from soa.memory import from_jagged
from tests.models.real_files import located

CONFIG = Path(__file__).parents[2] / "configs" / "hzz.yaml"


@pytest.fixture(scope="module")
def events() -> Any:
    uproot = pytest.importorskip("uproot", reason="reading the file needs uproot")
    with uproot.open(located(FILE)) as file:
        return file["events"].arrays(filter_name=["Jet_*", "Muon_*"])


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session of the config, built for one engine that needs no compiler."""
    folder = tmp_path_factory.mktemp("hzz")
    text = CONFIG.read_text().replace("../examples", str(CONFIG.parents[1] / "examples"))
    (folder / "hzz.yaml").write_text(
        f"{text}\n  many_rows: 2000\ntargets: [cpu/x86-64-v3]\nengines: [exported]\n"
        "compile: {benchmark_s: 0.1}\n"
    )
    registry = Registry(f"sqlite:///{folder}/registry.db")
    bundle = run(folder / "hzz.yaml", registry, folder / "work").bundle
    candidates = bundle.manifest.targets["cpu/x86-64-v3"].candidates
    assert {name: own.status for name, own in candidates.items()} == {"exported": "valid"}
    return load(str(bundle.path), mode="test")


def padded(events: Any, name: str, length: int) -> torch.Tensor:
    """(n, length) float32, padded by Awkward with zeros."""
    filled = ak.fill_none(ak.pad_none(events[name], length, clip=True), 0)
    return torch.from_numpy(ak.to_numpy(filled).astype(np.float32))


def expected(events: Any) -> torch.Tensor:
    """The answers of the eager network on padded rows, with features computed here."""
    x, y, e, btag = (padded(events, f"Jet_{name}", 4) for name in ("Px", "Py", "E", "btag"))
    features = [
        (torch.log1p(x * x + y * y) - 7.0) * 0.5,
        torch.log1p(e) - 4.5,
        btag.clamp(-1, 5),
    ]
    jet_exists = exists(events["Jet_Px"], 4)
    jets = torch.where(jet_exists.unsqueeze(1), torch.stack(features, dim=1), 0.0)
    names = ("Px", "Py", "Pz", "Charge")
    muons = torch.stack([padded(events, f"Muon_{name}", 3) for name in names], dim=2)
    muon_exists = exists(events["Muon_Px"], 3)
    with torch.no_grad():
        scores: torch.Tensor = build()(jets, jet_exists.unsqueeze(1).float(), muons, muon_exists)
    return scores


def exists(lists: Any, length: int) -> torch.Tensor:
    """(n, length): whether each place is one of an item, and not padding."""
    return torch.arange(length) < torch.from_numpy(ak.to_numpy(ak.num(lists)))[:, None]


def scored(session: Session, events: Any) -> torch.Tensor:
    """The session's answers, (n, 2)."""
    inputs: dict[str, Any] = {}
    for name in ("jets", "muons"):
        inputs |= from_jagged(events, session.signature, name)
    scores = session.collection("scores", len(events))
    session.run(inputs, scores)
    return torch.stack([scores.tensor("signal"), scores.tensor("background")], dim=1)


def test_events_have_fewer_more_and_just_as_many_jets_as_the_model_sees(events: Any) -> None:
    counts = ak.num(events["Jet_Px"])
    assert ak.min(counts) == 0 and ak.max(counts) > 4 and ak.any(counts == 4)


def test_whole_events_are_scored_where_uproot_left_them(session: Session, events: Any) -> None:
    """With the scores of padded events; the jets are bound in uproot's memory."""
    scores = scored(session, events)
    assert scores.shape == (2421, 2)
    torch.testing.assert_close(scores, expected(events), atol=1e-6, rtol=1e-5)
    jets = from_jagged(events, session.signature, "jets")
    layout = events["Jet_E"].layout
    assert jets["jets"]["Jet_E"].ctypes.data == layout.content.data.ctypes.data
    offsets = events["Jet_Px"].layout.offsets.data
    begin, end = (jets["jets_offsets"][name] for name in ("begin", "end"))
    assert begin.ctypes.data == offsets.ctypes.data
    assert end.ctypes.data == offsets.ctypes.data + 8


@pytest.mark.parametrize("kind", ["slice", "picked", "backwards", "one", "without jets"])
def test_a_part_of_the_events_is_scored_as_it_lies(
    session: Session, events: Any, kind: str
) -> None:
    without_jets = ak.num(events["Jet_Px"]) == 0
    part = {
        "slice": events[700:1300],
        "picked": events[without_jets | (ak.num(events["Muon_Px"]) > 2)],
        "backwards": events[::-1],
        "one": events[5:6],
        "without jets": events[without_jets],
    }[kind]
    torch.testing.assert_close(scored(session, part), expected(part), atol=1e-6, rtol=1e-5)


def test_the_config_says_what_the_model_sees() -> None:
    config: Config = load_config(CONFIG)
    signature = config.signature()
    assert signature.jagged == {"jets": 4, "muons": 3}
    assert signature.input_collections == ("jets", "muons", "jets_offsets", "muons_offsets")
    assert signature.rows_of["jets_offsets"] == "event"
