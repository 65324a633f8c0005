"""`pipeline init`: makes a config that `run` accepts, from a model and a file of a user."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pipeline
from pipeline.config import Config, load_config, source_of
from pipeline.init.writing import Request, init
from registry.bundle.bundle import Bundle
from soa.memory import as_collection
from stages.model import load_callable
from tests.campaigns.networks.walk import typed
from tests.models.project import cli, first_step, refusal

ROOT = Path(__file__).resolve().parents[3]
DATA = [
    Path(os.environ.get("SKHEP_DATA", "none")),
    ROOT.parent / "shared/data",
    ROOT.parents[1] / "shared/data",
]
MODEL = '''
import torch
from torch import Tensor, nn


class Flat(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, hidden), nn.Linear(hidden, 3))

    def forward(self, features: Tensor) -> Tensor:
        return torch.softmax(self.layers(features), 1)


class Sets(nn.Module):
    """(n, 4, P) and a mask (n, 1, P)"""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Conv1d(4, 8, 1), nn.Linear(8, 2)

    def forward(self, points: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = self.all((torch.relu(self.each(points)) * mask).sum(2))
        return torch.sigmoid(found), found.sum(1)


class Cloud(nn.Module):
    """(n, 2, P), (n, 7, P) and a mask (n, 1, P), as networks of weaver have it"""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Conv1d(9, 8, 1), nn.Linear(8, 10)

    def forward(self, points: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        found = torch.relu(self.each(torch.cat([points, features], 1))) * mask
        return self.all(found.sum(2))


class Last(nn.Module):
    """(n, P, 4), as many have it"""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.all(torch.relu(self.each(points)).amax(1))


class Each(nn.Module):
    """(n, 4, P)"""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Conv1d(4, 8, 1), nn.Linear(8, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.all(torch.relu(self.each(points)).amax(2))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.kinds = nn.Linear(3, 2), nn.Embedding(50, 2)

    def forward(self, x: Tensor, kind: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": (self.a(x) + self.kinds(kind).sum(1)) * scale}


class Ten(nn.Module):
    """(n, 10)"""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x)


class Anything(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] + inputs[1].sum(1, keepdim=True)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1)


def unread(width):
    raise RuntimeError("no licence")
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model's code and a file of rows."""
    return filled(tmp_path / "own")


def filled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {name: draw.normal(size=90).astype("f4") for name in "abcd"}
    np.savez(folder / "flat.npz", **columns)
    return folder


def written(place: Path, model: str, *given: object, engine: str = "exported") -> Config:
    """The config that init writes into `place` without questions; all of its files exist."""
    where = ("--out", place / "config.yaml", "--engine", engine)
    answer = json.loads(
        cli("init", place / model if "." in model else model, *given, *where, "--json").stdout
    )
    assert all(Path(file).is_file() for file in answer["files"])
    assert not list(place.glob(".*"))
    for line in (place / "config.yaml").read_text().splitlines()[2:]:
        assert "#" in line or line.lstrip().startswith("- "), line
    return load_config(place / "config.yaml")


def refused(place: Path, model: str, *given: object) -> str:
    """The line with which init refuses; no file is written."""
    before = sorted(place.rglob("*"))
    line = refusal(
        "init", place / model if "." in model else model, *given, "--out", place / "config.yaml"
    )
    after = [path for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts]
    assert after == [path for path in before if "__pycache__" not in path.parts]
    return line


def real(name: str) -> Path:
    for folder in DATA:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not in $SKHEP_DATA, nor in ../shared/data")


def reference(place: Path) -> dict[str, Any]:
    with np.load(place / "reference.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config that init writes for Flat and the file of rows."""
    folder = filled(tmp_path_factory.mktemp("flat") / "own")
    written(folder, "model.py:Flat", folder / "flat.npz")
    return folder


def test_the_file_has_just_the_columns(flat: Path) -> None:
    config = load_config(flat / "config.yaml")
    (block,) = config.inputs
    assert (block.name, block.columns) == ("features", ("a", "b", "c", "d"))
    (output,) = config.outputs
    assert output.classifier
    assert output.columns == ("output0", "output1", "output2")
    assert source_of(config).factory == f"{flat / 'model.py'}:Flat"
    assert set(reference(flat)) == {f"events/{name}" for name in "abcd"}
    assert config.rows["n"].unbounded and config.rows["n"].max == 1024  # the 90 rows are repeated
    text = (flat / "config.yaml").read_text()
    assert re.search("max: 1024 .* the rows of a tile", text) and "unbounded: true" in text


def test_it_runs(place: Path, tmp_path: Path) -> None:
    """The config is not edited, and its version is validated on the rows of the file. Its answers
    to them are the model's."""
    model = load_callable(f"{place / 'model.py'}:Flat")(hidden=16).eval()
    save_file(model.state_dict(), place / "w.safetensors")
    given = ("--kwargs", '{"hidden": 16}', "--weights", place / "w.safetensors", "--rows", 100)
    written(place, "model.py:Flat", place / "flat.npz", *given)
    config, work, registry = place / "config.yaml", tmp_path / "work", f"sqlite:///{tmp_path}/r.db"
    ran = cli("run", config, "--work", work, "--registry", registry, "--json")
    assert "train mode" in ran.stderr and "BatchNorm1d 'layers.0'" in ran.stderr
    answer = json.loads(ran.stdout)
    (target,) = answer["targets"].values()
    assert target == {"status": "verified", "chosen": "exported"}
    with np.load(place / "flat.npz") as stored:
        rows = dict(stored)
    with pipeline.load(answer["bundle"], mode="test") as session:
        made = session.collection("outputs", 90)
        session.run(as_collection(rows, session.layout("events")), made)
        found = torch.stack([made.tensor(f"output{i}") for i in range(3)], 1)
    expected = model(torch.from_numpy(np.stack([*rows.values()], 1))).detach()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    kept = Bundle.open(answer["bundle"]).manifest.provenance.config
    assert kept["reference"]["file"] == "reference.npz"
    assert kept["outputs"][0]["columns"] == ["output0", "output1", "output2"]
    # With other rows the reference is another one: no stage is reused.
    np.savez(place / "reference.npz", **{k: v[::-1] for k, v in reference(place).items()})
    assert first_step(config, work, registry) == "capture"


def test_weights_and_names(place: Path) -> None:
    state = written_model(place, "Flat").state_dict()
    save_file({f"net.{key}": value for key, value in state.items()}, place / "w.safetensors")
    names = (
        "--weights",
        place / "w.safetensors",
        "--output",
        "p=p_b,p_c,p_light",
        "--name",
        "tagger",
    )
    config = written(place, "model.py:Flat", place / "flat.npz", *names)
    assert (config.model.weights, config.model.weights_prefix) == ("w.safetensors", "net.")
    assert (config.outputs[0].name, config.outputs[0].columns) == ("p", ("p_b", "p_c", "p_light"))
    assert config.name == "tagger"


def written_model(place: Path, name: str) -> Any:
    return load_callable(f"{place / 'model.py'}:{name}")().eval()


@pytest.mark.parametrize("kind", ["pt2", "ts"])
def test_without_data(place: Path, kind: str) -> None:
    """A program has input widths, and its columns get names; TorchScript needs --input."""
    model = written_model(place, "Flat")
    if kind == "ts":
        torch.jit.script(model).save(place / "net.ts")
        assert "give --input features=COLUMN" in refused(place, "net.ts")
    else:
        rows = torch.export.Dim("n", min=2, max=512)
        shapes = {"features": {0: rows}}
        program = torch.export.export(model, (torch.rand(5, 4),), dynamic_shapes=shapes)
        torch.export.save(program, place / "net.pt2")
    names = ("--input", "features=features0 .. features3") if kind == "ts" else ()
    config = written(place, f"net.{kind}", *names)
    assert config.inputs[0].columns == ("features0", "features1", "features2", "features3")
    if kind == "pt2":  # the range of the export
        assert (config.rows["n"].min, config.rows["n"].max) == (0, 256)


def test_two_inputs_of_two_kinds(place: Path) -> None:
    draw = np.random.default_rng(1)
    ints = draw.integers(0, 50, (90, 2)).astype("i4")
    np.savez(
        place / "more.npz",
        allow_pickle=False,
        m=draw.normal(size=(90, 3)),
        **{f"k{i}": ints[:, i] for i in (0, 1)},
    )
    config = written(
        place, "model.py:Two", place / "more.npz", "--input", "x=m", "--input", "kind=k*"
    )
    x, kind = config.inputs
    assert (x.dtype, kind.dtype, kind.columns) == ("float32", "int64", ("k0", "k1"))
    assert config.collections["events"].columns[0].eigen == (3,)
    assert config.outputs[0].name == "sum"  # the model's own name for it


def test_forward_that_names_nothing(place: Path) -> None:
    line = refused(place, "model.py:Anything", place / "flat.npz")
    assert "forward names no inputs: give --input" in line
    config = written(
        place, "model.py:Anything", place / "flat.npz", "--input", "x=a", "--input", "y=b,c"
    )
    assert [block.columns for block in config.inputs] == [("a",), ("b", "c")]


def test_parquet(place: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(1)
    flat = {name: draw.normal(size=50) for name in "abcd"}
    pq.write_table(pa.table(flat), place / "rows.parquet")
    config = written(place, "model.py:Flat", place / "rows.parquet")
    assert {c.dtype for c in config.collections["events"].columns} == {"float64"}
    for file in ("config.yaml", "reference.npz"):
        (place / file).unlink()
    holes = pa.array([None, *flat["a"][1:]])
    pq.write_table(pa.table({**flat, "a": holes}), place / "nulls.parquet")
    assert "a has 1 nulls: fill them" in refused(place, "model.py:Flat", place / "nulls.parquet")
    text = pa.array(["x"] * 50)
    pq.write_table(pa.table({**flat, "a": text}), place / "text.parquet")
    assert ": a is string" in refused(place, "model.py:Flat", place / "text.parquet")
    pq.write_table(pa.table(flat).slice(0, 0), place / "empty.parquet")
    assert "has no rows" in refused(place, "model.py:Flat", place / "empty.parquet")


def lists(place: Path, width: int, *names: str, rows: int = 50) -> dict[str, Any]:
    """Columns with a list of `width` float32 per row, as pandas writes arrays."""
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(1)
    found = {name: draw.normal(size=(rows, width)).astype("f4") for name in names}
    pandas.DataFrame({k: [*v] for k, v in found.items()}).to_parquet(place / "lists.parquet")
    return found


def test_lists_of_one_length_are_vectors(place: Path) -> None:
    values = lists(place, 10, "x")
    file = place / "lists.parquet"
    config = written(place, "model.py:Ten", file)
    (column,) = config.collections["events"].columns
    assert (column.name, column.eigen, config.inputs[0].shape) == ("x", (10,), None)
    np.testing.assert_array_equal(reference(place)["events/x"], values["x"])
    # With --length the lists are jagged, as others may be longer; they are cut.
    config = written(place, "model.py:Ten", file, "--length", 10, "--force")
    (block,) = config.inputs
    assert (block.shape, len(config.signature().jagged)) == ((10,), 1)
    assert "reference.npz" in {path.name for path in place.iterdir()}


@pytest.mark.parametrize(("model", "jagged"), [("Each", False), ("Last", False), ("Sets", True)])
def test_several_lists_of_one_length(place: Path, model: str, jagged: bool) -> None:
    """An input (n, columns, items) takes vectors, side by side.

    For an input (n, items, columns), or one with a mask, they are jagged lists, here of equal
    length.
    """
    lists(place, 6, *"abcd")
    given = ("--input", "points=a,b,c,d")
    config = written(place, f"model.py:{model}", place / "lists.parquet", *given)
    assert bool(config.signature().jagged) == jagged
    assert config.inputs[0].shape == {"Each": (4, 6), "Last": (4, 6), "Sets": None}[model]
    assert config.inputs[0].permute == {"Each": (), "Last": (0, 2, 1), "Sets": ()}[model]


def test_vectors_and_numbers_beside_each_other(place: Path) -> None:
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(1)
    rows = {"h": [*draw.normal(size=(50, 9)).astype("f4")], "pt": draw.normal(size=50)}
    pandas.DataFrame(rows).to_parquet(place / "mixed.parquet")
    config = written(place, "model.py:Ten", place / "mixed.parquet", "--input", "x=h,pt")
    assert [(c.name, c.eigen) for c in config.collections["events"].columns] == [
        ("h", (9,)),
        ("pt", None),
    ]
    assert (config.inputs[0].dtype, config.inputs[0].shape) == ("float32", None)
    line = refused(place, "model.py:Ten", place / "mixed.parquet", "--input", "x=h", "--force")
    # Listed once, although it is the shape of both vectors and items.
    assert line.count("x (n, 9) of h") == 1
    assert "name the columns" not in line  # the user has named them
    line = refused(
        place,
        "model.py:Ten",
        place / "mixed.parquet",
        "--input",
        "x=h,pt",
        "--length",
        9,
        "--force",
    )
    assert "which differ in their items per row" in line


def test_what_init_writes_binds_arrays_in_place(flat: Path) -> None:
    """Outputs are separate columns too, so arrays of NumPy or torch are bound without a copy."""
    layout = load_config(flat / "config.yaml").signature().layouts["outputs"]
    arrays = {name: np.zeros(30, "f4") for name in ("output0", "output1", "output2")}
    collection = as_collection(arrays, layout)
    assert not collection.readonly and not collection.copied


def test_the_most_rows_say_why(place: Path) -> None:
    (place / "small.py").write_text(
        "import torch\n\n\nclass Small(torch.nn.Module):\n"
        "    def forward(self, features):\n"
        "        assert 0 < len(features) < 100\n"
        "        return features\n"
    )
    for given, said in (
        ((), ["max: 64 .* not 129, on which it fails: ", "min: 1 .* 0 rows: "]),
        (("--rows", 20), ["max: 20 .* by --rows"]),
    ):
        written(place, "small.py:Small", place / "flat.npz", *given, "--force")
        for pattern in said:
            assert re.search(pattern, (place / "config.yaml").read_text()), pattern


def test_hdf5(place: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="the extra `data` has it")
    draw = np.random.default_rng(1)
    with h5py.File(place / "rows.h5", "w") as file:
        file["jets/kin"] = draw.normal(size=(50, 4)).astype(">f4")
        pairs = np.zeros(50, [("x", "f4"), ("y", "f4")])
        file["jets/pairs"] = pairs
    config = written(place, "model.py:Flat", place / "rows.h5", "--input", "features=jets/kin")
    assert [c.name for c in config.collections["events"].columns] == ["jets_kin"]
    assert config.inputs[0].columns == ("jets_kin",)


def test_nanoaod(place: Path) -> None:
    """With a row for each jet of all events, in the dtypes of the branches."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    file = real("nanoAOD_2015_CMS_Open_Data_ttbar.root")
    example = ROOT / "examples/nanoaod"
    words = "pt,eta,mass,area,chHEF,neEmEF,btagCSVV2,qgl,puIdDisc,jetId,nMuons,nConstituents"
    columns = ",".join(f"Jet_{name}" for name in words.split(","))
    given = ("--weights", example / "weights.safetensors", "--input", f"jets={columns}")
    model = f"{example / 'model.py'}:build"
    line = refused(place, model, file, *given)
    assert "--flatten makes a row of each item" in line
    config = written(place, model, file, *given, "--flatten")
    (name,) = config.collections.keys() - {"outputs"}
    dtypes = {c.name: c.dtype for c in config.collections[name].columns}
    assert (name, dtypes["Jet_jetId"], dtypes["Jet_nConstituents"]) == ("Jet", "int32", "uint8")
    assert len(reference(place)["Jet/Jet_pt"]) == 537
    assert "has no 'Jet_pT'" in refused(place / "..", model, file, "--input", "jets=Jet_pT")


def test_asked_on_a_terminal(place: Path) -> None:
    questions = []

    def ask(flag: str, question: str, default: str | None) -> str:
        questions.append(flag.split("=")[0])
        return {"--name": "asked", "--output output": "x, y, z"}.get(
            flag.split("=")[0], default or ""
        )

    init(Request(f"{place / 'model.py'}:Flat", place / "flat.npz", place / "c.yaml"), ask)
    assert questions == ["--input features", "--output output", "--name"]
    config = load_config(place / "c.yaml")
    assert (config.name, config.outputs[0].columns) == ("asked", ("x", "y", "z"))
    assert config.reference.file == "c.reference.npz"


def test_enter_answers_on_a_terminal(place: Path) -> None:
    said, questions = typed(place, "init", "model.py:Flat", "flat.npz", "--name", "asked")
    assert questions == 2  # the columns, and the names of the outputs
    assert "train mode" in said
    assert load_config(place / "config.yaml").inputs[0].columns == tuple("abcd")


def test_files_that_are_there_stay(place: Path) -> None:
    (place / "config.yaml").write_text("mine")
    line = refused(place, "model.py:Flat", place / "flat.npz")
    assert "config.yaml is there already: --force replaces it" in line
    assert (place / "config.yaml").read_text() == "mine"
    written(place, "model.py:Flat", place / "flat.npz", "--force")


@pytest.mark.parametrize(
    ("model", "data", "given", "says"),
    [
        ("model.py:Flat", "flat.npz", ("--input", "features=a,b,c"), "features (n, 3) of a, b, c"),
        ("model.py:Flat", "flat.npz", ("--input", "features=a,b,e"), "has no 'e'; it has a, b, c"),
        ("model.py:Flat", "flat.npz", ("--input", "features=z*"), "features: no column fits it"),
        ("model.py:Flat", "flat.npz", ("--input", "feature=a"), "takes features: give --input"),
        ("model.py:Flat", "flat.npz", ("--input", "features"), "expected NAME=COLUMN"),
        ("model.py:Flat", "flat.npz", ("--output", "p=a,b"), "found 2 names for 3 columns"),
        ("model.py:Flat", "model.py", (), "its suffix must be one of .root, .parquet"),
        ("model.py:Flat", "broken.npz", (), "broken.npz is no .npz file"),
        ("model.py:Flat", "broken.root", (), "broken.root is no .root file"),
        ("model.py:Flat", "broken.parquet", (), "broken.parquet is no .parquet file"),
        ("model.py:Flat", "nan.npz", (), "a is NaN or infinite 2 times"),
        ("model.py:Flat", "lengths.npz", (), "name columns that have the same"),
        ("model.py:Flat", "kinds.npz", (), "a is text: a column is one of"),
        ("model.py:Two", "flat.npz", ("--yes",), "nothing says the columns of 'x'"),
        ("model.py:Fixed", "flat.npz", (), "it has to be a tensor, a row for each"),
        ("model.py:unread", "flat.npz", (), "missing a required argument: 'width'"),
        ("model.py:unread", "flat.npz", ("--kwargs", '{"width": 1}'), "no licence"),
        ("model.py:None", "flat.npz", (), "has no callable 'None'"),
        ("model.py", "flat.npz", (), "a model is file.py:callable"),
        ("weights.pt", "flat.npz", (), "FILE.py:CLASS DATA --weights "),
        ("weights.safetensors", "flat.npz", (), "FILE.py:CLASS DATA --weights "),
        ("model.py:Flat", "flat.npz", ("--name", "a b"), "config.yaml:3: name: found 'a b'"),
    ],
)  # fmt: skip
def test_one_line(place: Path, model: str, data: str, given: tuple[str, ...], says: str) -> None:
    with np.load(place / "flat.npz") as stored:
        flat = dict(stored)
    for ending in ("npz", "root", "parquet"):
        (place / f"broken.{ending}").write_bytes(b"PAR1 or PK or root")
    np.savez(place / "nan.npz", **{**flat, "a": np.append(flat["a"][:-2], [np.nan, np.inf])})
    np.savez(place / "lengths.npz", **{**flat, "a": flat["a"][:-1]})
    np.savez(place / "kinds.npz", **{**flat, "a": np.array(["x"] * 90)})
    torch.save(nn.Linear(2, 2).state_dict(), place / "weights.pt")
    save_file(nn.Linear(2, 2).state_dict(), place / "weights.safetensors")
    assert says in refused(place, model, place / data, *given)
