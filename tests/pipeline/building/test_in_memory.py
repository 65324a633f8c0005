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


def stacked() -> Tensor:
    """The jets as the network's input: (700, 3)."""
    return torch.stack([torch.from_numpy(values) for values in JETS.values()], dim=1)


class Net(nn.Module):
    """Dropout and batch norm: right answers need eval mode, which the caller's net must keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"p": logits.softmax(-1), "score": logits[:, 0].exp()}


class Mean(nn.Module):
    """Jagged items with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(2, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        items = torch.relu(self.each(x.transpose(1, 2))) * mask.unsqueeze(-1)
        return items.sum((1, 2)) / mask.sum(1).clamp(min=1)


class Random(nn.Module):
    """Its answers differ from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.fixture(scope="module")
def net() -> Net:
    """In train mode; its batch norm has seen the data."""
    torch.manual_seed(1)
    network = Net()
    network(stacked())
    return network


@dataclass(frozen=True)
class Compilation:
    """The weights of a network before it is compiled, and the lines that were printed meanwhile."""

    weights: dict[str, Tensor]
    lines: list[str]


@pytest.fixture(scope="module")
def compilation(net: Net) -> Compilation:
    """What is noted about the compilation of `fast`."""
    return Compilation({name: value.clone() for name, value in net.state_dict().items()}, [])


@pytest.fixture(scope="module")
def fast(net: Net, compilation: Compilation) -> Iterator[Compiled]:
    """The network, compiled for its own data."""
    with pipeline.compile(net, JETS, say=compilation.lines.append) as compiled:
        yield compiled


@pytest.fixture(scope="module")
def expected(net: Net) -> dict[str, Tensor]:
    """The network's answers to the jets in eval mode; it is left in train mode."""
    with torch.no_grad():
        answers: dict[str, Tensor] = net.eval()(stacked())
    net.train()
    return answers


def test_the_answers_are_those_of_the_network(fast: Compiled, expected: dict[str, Tensor]) -> None:
    """Columns that it does not read are ignored."""
    answers = fast({**JETS, "other": np.zeros(700)})
    np.testing.assert_allclose(answers["score"], expected["score"], rtol=1e-4)
    probabilities = np.stack([answers["p0"], answers["p1"]], axis=1)
    np.testing.assert_allclose(probabilities, expected["p"], rtol=1e-4, atol=1e-5)


def test_fewer_rows_have_the_same_bits(fast: Compiled) -> None:
    fewer = fast({name: values[:5] for name, values in JETS.items()})
    np.testing.assert_array_equal(fewer["score"], fast(JETS)["score"][:5])


@pytest.mark.parametrize("wrap", [pl.LazyFrame, pipeline.as_collection])
def test_frames_and_collections_have_the_same_bits(fast: Compiled, wrap: Any) -> None:
    np.testing.assert_array_equal(fast(wrap(JETS))["score"], fast(JETS)["score"])


def test_the_network_stays_as_it_was(net: Net, compilation: Compilation, fast: Compiled) -> None:
    assert net.training and all(p.requires_grad for p in net.parameters())
    now = net.state_dict()
    assert all(torch.equal(value, now[name]) for name, value in compilation.weights.items())


def test_the_chosen_engine_and_its_speed_are_printed(
    compilation: Compilation, fast: Compiled
) -> None:
    assert any("lanes" in line for line in compilation.lines)
    assert any("speed" in line for line in compilation.lines)


@dataclass(frozen=True)
class Closed:
    """A network that was compiled with columns of three libraries, and closed.

    `score`: its answers while it was open. `temporary`: the folder for temporary files, which had
    `open_files` then.
    """

    fast: Compiled
    score: Any
    temporary: Path
    open_files: list[Path]


@pytest.fixture(scope="module")
def closed(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Closed:
    """Columns of Arrow, polars and NumPy; the first are rounded and coded by a dictionary."""
    temporary = tmp_path_factory.mktemp("temporary")
    chunks = [rounded_dictionary(JETS["pt"][rows]) for rows in (slice(350), slice(350, None))]
    data = {"pt": pa.chunked_array(chunks), "eta": pl.Series(JETS["eta"]), "phi": JETS["phi"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        with pipeline.compile(net, data, say=_quiet) as fast:
            return Closed(fast, fast(data)["score"], temporary, list(temporary.iterdir()))


def test_columns_of_three_libraries_are_taken_together(closed: Closed, net: Net) -> None:
    with torch.no_grad():
        rounded = torch.from_numpy(JETS["pt"].round(1))
        expected = net.eval()(torch.cat([rounded.unsqueeze(1), stacked()[:, 1:]], 1))["score"]
    net.train()
    np.testing.assert_allclose(closed.score, expected, rtol=1e-4)


def test_no_file_stays_after_close(closed: Closed, tmp_path: Path) -> None:
    assert closed.open_files and not list(closed.temporary.iterdir())
    with pytest.raises(RunError):
        closed.fast.save(tmp_path / "late" / "config.yaml")
    assert not (tmp_path / "late").exists()


def test_the_saved_config_gives_the_same_answers(
    fast: Compiled, tmp_path: Path, empty: Registry
) -> None:
    config, *_ = fast.save(tmp_path / "config.yaml")
    result = cli(
        "run", config, "--quick", "--registry", empty.uri, "--work", tmp_path / "work", "--json"
    )
    assert json.loads(result.stdout)["version"] == "model/1"
    with pipeline.load("model", registry=empty.uri, mode="test") as session:
        outputs = session.collection("outputs", 700)
        session.run(pipeline.as_collection(JETS, session.layout("events")), outputs)
        np.testing.assert_allclose(outputs["score"], fast(JETS)["score"], rtol=1e-5)


def test_jagged_items_are_padded_and_have_a_mask() -> None:
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
        answers = fast(events)["output"]
    padding = np.float32(0)
    padded = [
        ak.to_numpy(ak.fill_none(ak.pad_none(events[name], 4, clip=True), padding))
        for name in events.fields
    ]
    mask = np.arange(4) < counts[:, None]
    with torch.no_grad():
        expected = model(torch.from_numpy(np.stack(padded, 1)), torch.from_numpy(mask).float())
    np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_reproducible_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SoaPipelineError):
        pipeline.compile(Random(), JETS, say=_quiet)
    assert not list(tmp_path.glob("pipeline-compile-*"))


def test_data_that_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SoaPipelineError) as caught:
        pipeline.compile(Net(), object(), say=lambda line: None)
    assert caught.traceback  # its frames keep alive what was made before the error
    assert not list(tmp_path.glob("pipeline-compile-*"))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="Absent"):
        pipeline.compile(Net(), JETS, inputs={"x": ["pt", "Absent", "phi"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 1), ("threads", "2"), ("inputs", "pt"), ("length", 0), ("say", None), ("name", 3)],
)
def test_arguments_are_checked_before_any_work(name: str, value: object) -> None:
    with pytest.raises(InitError, match=f"compile: {name} is"):
        pipeline.compile(Net(), JETS, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("net", "columns"),
    [(nn.Bilinear(1, 1, 1), JETS), (Net(), {"pt": JETS["pt"]})],
    ids=["which columns are which input", "too few columns"],
)
def test_a_refusal_names_arguments_and_no_option(
    net: nn.Module, columns: dict[str, np.ndarray[Any, Any]]
) -> None:
    """The same refusal of `pipeline init` names options."""
    with pytest.raises(InitError) as caught:
        pipeline.compile(net, columns)
    assert "--" not in str(caught.value) and "inputs" in str(caught.value)


class SortedRows(nn.Module):
    """Rows see each other: an integer in place of a float must not hide it."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.argsort(x[:, 0])]


class Share(nn.Module):
    """Each value as a fraction of the sum of its column."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(0)


@pytest.mark.parametrize("module", [SortedRows, pytest.param(Share, marks=pytest.mark.long)])
def test_fractions_are_not_cut_off_where_rows_see_each_other(module: type[nn.Module]) -> None:
    net = module()
    columns = {name: np.abs(values[:100]) + np.float32(0.5) for name, values in JETS.items()}
    with pipeline.compile(net, columns, say=_quiet) as fast:
        answers = fast(columns)
    expected = net(torch.stack([torch.from_numpy(values) for values in columns.values()], dim=1))
    np.testing.assert_allclose(np.stack([*answers.values()], 1), expected, rtol=1e-5)


def rounded_dictionary(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.round(values, 1)).dictionary_encode()


@pytest.mark.long
def test_a_reader_that_can_be_read_only_once_is_enough(
    net: Net, expected: dict[str, Tensor]
) -> None:
    whole = pa.table({**JETS, "kind": ["a", "b"] * 350})
    reader = pa.RecordBatchReader.from_batches(whole.schema, whole.to_batches(100))
    with pipeline.compile(net, reader, inputs={"x": ["pt", "eta", "phi"]}, say=_quiet) as fast:
        np.testing.assert_allclose(fast(whole)["score"], expected["score"], rtol=1e-4)


def _quiet(line: str) -> None:
    """A `say` that prints nothing."""
    return None


def test_a_column_with_a_missing_value_is_named(net: Net) -> None:
    missing = pd.DataFrame(JETS).convert_dtypes()
    missing.loc[0, "eta"] = pd.NA
    with pytest.raises(SoaPipelineError, match="column 'eta' has"):
        pipeline.compile(net, missing, say=_quiet)


def test_a_call_without_a_column_names_it_and_the_nearest_one(fast: Compiled) -> None:
    other = {"pt": JETS["pt"], "etas": JETS["eta"], "phi": JETS["phi"]}
    with pytest.raises(SoaPipelineError, match=r"no column 'eta'.*did you mean 'etas'"):
        fast(other)


class BranchesAbove(nn.Module):
    """Takes another path above 5,000 rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * (2 if x.shape[0] > 5000 else 1)


class Loops(nn.Module):
    """A loop over rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.sum(0, keepdim=True) for row in x]) if len(x) else x[:, :1]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (BranchesAbove, "the row count of x <= 5000"),
        (Loops, "that rows are independent is tried, not shown: its rows were captured one by one"),
    ],
)
def test_rows_that_are_not_shown_to_be_independent_are_bounded(
    kind: type[nn.Module], line: str
) -> None:
    lines: list[str] = []
    with pipeline.compile(kind(), JETS, say=lines.append) as compiled:
        assert not compiled.session.signature.ranges["n"].unbounded
    assert any(line in said for said in lines), lines
