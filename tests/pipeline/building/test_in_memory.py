"""`pipeline.compile`: a model in memory and columns in memory, without a config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import pipeline
from engines.errors import RunError
from pipeline.building.in_memory import Compiled
from pipeline.errors import DataError, InitError
from registry.store.registry import Registry
from soa.errors import SoaPipelineError
from tests.models.project import cli

RNG = np.random.default_rng(1)
JETS = {name: RNG.normal(size=700).astype(np.float32) for name in ("pt", "eta", "phi")}


def stacked(rows: slice = slice(None)) -> Tensor:
    return torch.stack([torch.from_numpy(JETS[name][rows]) for name in JETS], dim=1)


class Net(nn.Module):
    """Dropout and batch norm: right answers need eval mode, which the caller's net must keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.layers(x)
        return {"p": found.softmax(-1), "score": found[:, 0].exp()}


class Mean(nn.Module):
    """Jagged items with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(2, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = torch.relu(self.each(x.transpose(1, 2))) * mask.unsqueeze(-1)
        return found.sum((1, 2)) / mask.sum(1).clamp(min=1)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(1)
    made = Net()
    made(stacked())  # batch norm has seen the data
    return made


@dataclass(frozen=True)
class Before:
    """A network before it is compiled, and what was said while that was done."""

    weights: dict[str, Tensor]
    said: list[str]


@pytest.fixture(scope="module")
def before(net: Net) -> Before:
    return Before({name: value.clone() for name, value in net.state_dict().items()}, [])


@pytest.fixture(scope="module")
def fast(net: Net, before: Before) -> Iterator[Compiled]:
    with pipeline.compile(net, JETS, say=before.said.append) as made:
        yield made


@pytest.fixture(scope="module")
def expected(net: Net) -> dict[str, Tensor]:
    with torch.no_grad():
        found: dict[str, Tensor] = net.eval()(stacked())
    net.train()
    return found


def test_the_answers_are_those_of_the_network(fast: Compiled, expected: dict[str, Tensor]) -> None:
    found = fast({**JETS, "other": np.zeros(700)})
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4)
    probabilities = np.stack([found["p0"], found["p1"]], axis=1)
    np.testing.assert_allclose(probabilities, expected["p"], rtol=1e-4, atol=1e-5)
    fewer = fast({name: values[:5] for name, values in JETS.items()})
    np.testing.assert_array_equal(fewer["score"], found["score"][:5])
    for same in (pl.LazyFrame(JETS), pipeline.as_collection(JETS)):
        np.testing.assert_array_equal(fast(same)["score"], found["score"])


def test_the_network_stays_as_it_was(net: Net, before: Before, fast: Compiled) -> None:
    assert net.training and all(p.requires_grad for p in net.parameters())
    now = net.state_dict()
    assert all(torch.equal(value, now[name]) for name, value in before.weights.items())


def test_what_was_chosen_is_said(before: Before, fast: Compiled) -> None:
    assert any("lanes" in line for line in before.said)
    assert any("speed" in line for line in before.said)


@dataclass(frozen=True)
class Closed:
    """A network that was compiled with columns of three libraries, and closed."""

    fast: Compiled
    score: Any
    place: Path
    open_files: list[Path]


@pytest.fixture(scope="module")
def closed(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Closed:
    place = tmp_path_factory.mktemp("temporary")
    parts = [category(JETS["pt"][rows]) for rows in (slice(350), slice(350, None))]
    data = {"pt": pa.chunked_array(parts), "eta": pl.Series(JETS["eta"]), "phi": JETS["phi"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        with pipeline.compile(net, data, say=_quiet) as fast:
            return Closed(fast, fast(data)["score"], place, list(place.iterdir()))


def test_columns_of_three_libraries(closed: Closed, net: Net) -> None:
    with torch.no_grad():
        rounded = torch.from_numpy(JETS["pt"].round(1))
        expected = net.eval()(torch.cat([rounded.unsqueeze(1), stacked()[:, 1:]], 1))["score"]
    net.train()
    np.testing.assert_allclose(closed.score, expected, rtol=1e-4)


def test_no_file_stays_after_close(closed: Closed, tmp_path: Path) -> None:
    assert closed.open_files and not list(closed.place.iterdir())
    with pytest.raises(RunError):
        closed.fast.save(tmp_path / "late" / "config.yaml")
    assert not (tmp_path / "late").exists()


def test_the_saved_config_gives_the_same_answers(
    fast: Compiled, tmp_path: Path, empty: Registry
) -> None:
    config, *_ = fast.save(tmp_path / "config.yaml")
    ran = cli(
        "run", config, "--quick", "--registry", empty.uri, "--work", tmp_path / "work", "--json"
    )
    assert json.loads(ran.stdout)["version"] == "model/1"
    with pipeline.load("model", registry=empty.uri, mode="test") as session:
        again = session.collection("outputs", 700)
        session.run(pipeline.as_collection(JETS, session.layout("events")), again)
        np.testing.assert_allclose(again["score"], fast(JETS)["score"], rtol=1e-5)


def test_jagged_items_by_a_mask() -> None:
    counts = RNG.integers(0, 5, 60)
    events = ak.Array(
        {
            f"Jet_{name}": ak.unflatten(RNG.normal(size=counts.sum()).astype(np.float32), counts)
            for name in ("pt", "eta")
        }
    )
    torch.manual_seed(1)
    model = Mean().eval()
    with pipeline.compile(model, events, inputs={"x": "Jet_pt,Jet_eta"}, length=4) as fast:
        found = fast(events)["output"]
    nothing = np.float32(0)
    padded = [
        ak.to_numpy(ak.fill_none(ak.pad_none(events[name], 4, clip=True), nothing))
        for name in events.fields
    ]
    mask = np.arange(4) < counts[:, None]
    with torch.no_grad():
        expected = model(torch.from_numpy(np.stack(padded, 1)), torch.from_numpy(mask).float())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_reproducible_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SoaPipelineError):
        pipeline.compile(Random(), JETS, say=lambda line: None)
    assert not list(tmp_path.glob("pipeline-compile-*"))


def test_data_that_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SoaPipelineError) as caught:
        pipeline.compile(Net(), object(), say=lambda line: None)
    assert caught.traceback  # its frames keep alive what was made before the error
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said() -> None:
    with pytest.raises(DataError, match="Absent"):
        pipeline.compile(Net(), JETS, inputs={"x": ["pt", "Absent", "phi"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 1), ("threads", "2"), ("inputs", "pt"), ("length", 0), ("say", None), ("name", 3)],
)
def test_arguments_are_checked_before_any_work(name: str, value: object) -> None:
    with pytest.raises(InitError, match=f"compile: {name} is"):
        pipeline.compile(Net(), JETS, **{name: value})  # type: ignore[arg-type]


def test_a_refusal_names_arguments_and_no_option() -> None:
    """It is worded for `pipeline init`."""
    for net, given in ((nn.Bilinear(1, 1, 1), JETS), (Net(), {"pt": JETS["pt"]})):
        with pytest.raises(InitError) as caught:
            pipeline.compile(net, given)
        assert "--" not in str(caught.value) and "inputs" in str(caught.value)


class SortedRows(nn.Module):
    """Rows see each other: an integer in place of a float must not hide it."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.argsort(x[:, 0])]


class Share(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(0)


@pytest.mark.parametrize("module", [SortedRows, pytest.param(Share, marks=pytest.mark.long)])
def test_fractions_are_not_cut_off_where_rows_see_each_other(module: type[nn.Module]) -> None:
    net = module()
    given = {name: np.abs(values[:100]) + np.float32(0.5) for name, values in JETS.items()}
    with pipeline.compile(net, given, say=lambda line: None) as fast:
        found = fast(given)
    expected = net(torch.stack([torch.from_numpy(values) for values in given.values()], dim=1))
    np.testing.assert_allclose(np.stack([*found.values()], 1), expected, rtol=1e-5)


def category(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.round(values, 1)).dictionary_encode()


@pytest.mark.long
def test_a_reader_of_batches(net: Net, expected: dict[str, Tensor]) -> None:
    """It can be read once."""
    whole = pa.table({**JETS, "kind": ["a", "b"] * 350})
    reader = pa.RecordBatchReader.from_batches(whole.schema, whole.to_batches(100))
    with pipeline.compile(net, reader, inputs={"x": ["pt", "eta", "phi"]}, say=_quiet) as fast:
        np.testing.assert_allclose(fast(whole)["score"], expected["score"], rtol=1e-4)


def _quiet(line: str) -> None:
    return None


def test_messages_name_the_users_columns(net: Net, fast: Compiled) -> None:
    missing = pd.DataFrame(JETS).convert_dtypes()
    missing.loc[0, "eta"] = pd.NA
    with pytest.raises(SoaPipelineError, match="column 'eta' has"):
        pipeline.compile(net, missing, say=_quiet)
    other = {"pt": JETS["pt"], "etas": JETS["eta"], "phi": JETS["phi"]}
    with pytest.raises(SoaPipelineError, match=r"no column 'eta'.*did you mean 'etas'"):
        fast(other)
