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
def user_folder(tmp_path: Path) -> Path:
    """A folder with a model's code and a file of rows."""
    return make_user_folder(tmp_path / "own")


def make_user_folder(folder: Path) -> Path:
    """Makes a folder with a model's code (model.py) and a file of 90 rows (flat.npz)."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {name: draw.normal(size=90).astype("f4") for name in "abcd"}
    np.savez(folder / "flat.npz", **columns)
    return folder


def init_config(
    user_folder: Path, model: str, *options: object, engine: str = "exported"
) -> Config:
    """The config that init writes into `user_folder` without questions.

    All of its files exist, and each of its keys has a comment.
    """
    source = user_folder / model if "." in model else model
    where = ("--out", user_folder / "config.yaml", "--engine", engine)
    answer = json.loads(cli("init", source, *options, *where, "--json").stdout)
    assert all(Path(file).is_file() for file in answer["files"])
    assert not list(user_folder.glob(".*"))
    for line in (user_folder / "config.yaml").read_text().splitlines()[2:]:
        assert "#" in line or line.lstrip().startswith("- "), line
    return load_config(user_folder / "config.yaml")


def refused(user_folder: Path, model: str, *options: object) -> str:
    """The line with which init refuses; no file is written."""
    before = own_files(user_folder)
    source = user_folder / model if "." in model else model
    line = refusal("init", source, *options, "--out", user_folder / "config.yaml")
    assert own_files(user_folder) == before
    return line


def own_files(user_folder: Path) -> list[Path]:
    """All files and folders, without those that Python keeps of imported modules."""
    return [path for path in sorted(user_folder.rglob("*")) if "__pycache__" not in path.parts]


def real_file(name: str) -> Path:
    """A file of measured data; the test is skipped where no folder of DATA has it."""
    for folder in DATA:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not in $SKHEP_DATA, nor in ../shared/data")


def reference(user_folder: Path) -> dict[str, Any]:
    """The rows that init wrote beside the config, by `collection/column`."""
    with np.load(user_folder / "reference.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config that init writes for Flat and the file of rows."""
    folder = make_user_folder(tmp_path_factory.mktemp("flat") / "own")
    init_config(folder, "model.py:Flat", folder / "flat.npz")
    return folder


def test_a_file_with_just_the_columns_is_the_input(flat: Path) -> None:
    config = load_config(flat / "config.yaml")
    (block,) = config.inputs
    assert (block.name, block.columns) == ("features", ("a", "b", "c", "d"))
    assert source_of(config).factory == f"{flat / 'model.py'}:Flat"
    assert set(reference(flat)) == {f"events/{name}" for name in "abcd"}


def test_outputs_that_sum_to_one_are_a_classifier(flat: Path) -> None:
    (output,) = load_config(flat / "config.yaml").outputs
    assert output.classifier
    assert output.columns == ("output0", "output1", "output2")


def test_rows_are_unbounded_and_the_reference_fills_a_tile(flat: Path) -> None:
    """The 90 rows of the file are repeated."""
    rows = load_config(flat / "config.yaml").rows["n"]
    assert rows.unbounded and rows.max == 1024
    text = (flat / "config.yaml").read_text()
    assert re.search("max: 1024 .* the rows of a tile", text) and "unbounded: true" in text


@pytest.fixture
def sixteen(user_folder: Path) -> nn.Module:
    """The model of a config with another argument and weights; 100 rows are the most."""
    model: nn.Module = load_callable(f"{user_folder / 'model.py'}:Flat")(hidden=16).eval()
    save_file(model.state_dict(), user_folder / "w.safetensors")
    weights = ("--kwargs", '{"hidden": 16}', "--weights", user_folder / "w.safetensors")
    init_config(user_folder, "model.py:Flat", user_folder / "flat.npz", *weights, "--rows", 100)
    return model


def test_the_config_runs_as_it_is(user_folder: Path, sixteen: nn.Module, tmp_path: Path) -> None:
    """Its version is validated on the rows of the file, and its answers to them are the model's."""
    work, registry = tmp_path / "work", f"sqlite:///{tmp_path}/r.db"
    config = user_folder / "config.yaml"
    ran = cli("run", config, "--work", work, "--registry", registry, "--json")
    assert "train mode" in ran.stderr and "BatchNorm1d 'layers.0'" in ran.stderr
    answer = json.loads(ran.stdout)
    (target,) = answer["targets"].values()
    assert target == {"status": "verified", "chosen": "exported"}
    with np.load(user_folder / "flat.npz") as stored:
        rows = dict(stored)
    with pipeline.load(answer["bundle"], mode="test") as session:
        outputs = session.collection("outputs", 90)
        session.run(as_collection(rows, session.layout("events")), outputs)
        answers = torch.stack([outputs.tensor(f"output{i}") for i in range(3)], 1)
    expected = sixteen(torch.from_numpy(np.stack([*rows.values()], 1))).detach()
    torch.testing.assert_close(answers, expected, atol=1e-5, rtol=1e-4)
    recorded = Bundle.open(answer["bundle"]).manifest.provenance.config
    assert recorded["reference"]["file"] == "reference.npz"
    assert recorded["outputs"][0]["columns"] == ["output0", "output1", "output2"]
    # With other rows the reference is another one: no stage is reused.
    np.savez(
        user_folder / "reference.npz", **{k: v[::-1] for k, v in reference(user_folder).items()}
    )
    assert first_step(config, work, registry) == "capture"


def test_weights_of_a_part_of_a_larger_model_have_a_prefix(user_folder: Path) -> None:
    state = user_model(user_folder, "Flat").state_dict()
    file = user_folder / "w.safetensors"
    save_file({f"net.{key}": value for key, value in state.items()}, file)
    config = init_config(user_folder, "model.py:Flat", user_folder / "flat.npz", "--weights", file)
    assert (config.model.weights, config.model.weights_prefix) == ("w.safetensors", "net.")


def test_a_user_names_the_model_and_its_outputs(user_folder: Path) -> None:
    names = ("--output", "p=p_b,p_c,p_light", "--name", "tagger")
    config = init_config(user_folder, "model.py:Flat", user_folder / "flat.npz", *names)
    assert (config.outputs[0].name, config.outputs[0].columns) == ("p", ("p_b", "p_c", "p_light"))
    assert config.name == "tagger"


def user_model(user_folder: Path, name: str) -> nn.Module:
    """A model of the user's file, by the name of its class."""
    model: nn.Module = load_callable(f"{user_folder / 'model.py'}:{name}")().eval()
    return model


FEATURES = ("features0", "features1", "features2", "features3")


def test_a_program_without_data_has_its_own_widths_and_rows(user_folder: Path) -> None:
    """Its columns are numbered. It has at most 256 rows, as 513 are outside the exported range."""
    shapes = {"features": {0: torch.export.Dim("n", min=2, max=512)}}
    model = user_model(user_folder, "Flat")
    program = torch.export.export(model, (torch.rand(5, 4),), dynamic_shapes=shapes)
    torch.export.save(program, user_folder / "net.pt2")
    config = init_config(user_folder, "net.pt2")
    assert config.inputs[0].columns == FEATURES
    assert (config.rows["n"].min, config.rows["n"].max) == (0, 256)


def test_torchscript_without_data_needs_names_of_columns(user_folder: Path) -> None:
    torch.jit.script(user_model(user_folder, "Flat")).save(user_folder / "net.ts")
    assert "give --input features=COLUMN" in refused(user_folder, "net.ts")
    config = init_config(user_folder, "net.ts", "--input", "features=features0 .. features3")
    assert config.inputs[0].columns == FEATURES


def test_floats_and_indices_are_inputs_of_their_own_dtypes(user_folder: Path) -> None:
    draw = np.random.default_rng(1)
    ints = draw.integers(0, 50, (90, 2)).astype("i4")
    np.savez(
        user_folder / "more.npz",
        allow_pickle=False,
        m=draw.normal(size=(90, 3)),
        **{f"k{i}": ints[:, i] for i in (0, 1)},
    )
    config = init_config(
        user_folder,
        "model.py:Two",
        user_folder / "more.npz",
        "--input",
        "x=m",
        "--input",
        "kind=k*",
    )
    x, kind = config.inputs
    assert (x.dtype, kind.dtype, kind.columns) == ("float32", "int64", ("k0", "k1"))
    assert config.collections["events"].columns[0].eigen == (3,)
    assert config.outputs[0].name == "sum"  # the model's own name for it


def test_a_forward_without_names_takes_those_of_the_options(user_folder: Path) -> None:
    line = refused(user_folder, "model.py:Anything", user_folder / "flat.npz")
    assert "forward names no inputs: give --input" in line
    config = init_config(
        user_folder,
        "model.py:Anything",
        user_folder / "flat.npz",
        "--input",
        "x=a",
        "--input",
        "y=b,c",
    )
    assert [block.columns for block in config.inputs] == [("a",), ("b", "c")]


def write_parquet(user_folder: Path, name: str, **changed: Any) -> Path:
    """Writes fifty rows of a, b, c and d in double precision, of which some are changed."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(1)
    rows = {name: draw.normal(size=50) for name in "abcd"}
    pq.write_table(pa.table({**rows, **changed}), user_folder / name)
    return user_folder / name


def test_columns_of_parquet_keep_their_dtype(user_folder: Path) -> None:
    config = init_config(user_folder, "model.py:Flat", write_parquet(user_folder, "rows.parquet"))
    assert {c.dtype for c in config.collections["events"].columns} == {"float64"}


@pytest.mark.parametrize(
    ("values", "problem"),
    [([None, *([0.5] * 49)], "a has 1 nulls: fill them"), (["x"] * 50, ": a is string")],
    ids=["nulls", "text"],
)
def test_columns_of_parquet_that_are_no_numbers_are_refused(
    user_folder: Path, values: list[Any], problem: str
) -> None:
    file = write_parquet(user_folder, "rows.parquet", a=values)
    assert problem in refused(user_folder, "model.py:Flat", file)


def test_parquet_without_rows_is_refused(user_folder: Path) -> None:
    file = write_parquet(user_folder, "empty.parquet", **{name: np.zeros(0) for name in "abcd"})
    assert "has no rows" in refused(user_folder, "model.py:Flat", file)


def write_lists(user_folder: Path, width: int, *names: str, rows: int = 50) -> dict[str, Any]:
    """Writes lists.parquet: columns with a list of `width` float32 per row, as pandas does."""
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(1)
    columns = {name: draw.normal(size=(rows, width)).astype("f4") for name in names}
    pandas.DataFrame({k: [*v] for k, v in columns.items()}).to_parquet(
        user_folder / "lists.parquet"
    )
    return columns


def test_lists_of_one_length_are_vectors(user_folder: Path) -> None:
    values = write_lists(user_folder, 10, "x")
    config = init_config(user_folder, "model.py:Ten", user_folder / "lists.parquet")
    (column,) = config.collections["events"].columns
    assert (column.name, column.eigen, config.inputs[0].shape) == ("x", (10,), None)
    np.testing.assert_array_equal(reference(user_folder)["events/x"], values["x"])


def test_lists_of_one_length_are_jagged_with_length(user_folder: Path) -> None:
    """Others may be longer; they are cut."""
    write_lists(user_folder, 10, "x")
    config = init_config(user_folder, "model.py:Ten", user_folder / "lists.parquet", "--length", 10)
    (block,) = config.inputs
    assert (block.shape, len(config.signature().jagged)) == ((10,), 1)
    assert (user_folder / "reference.npz").is_file()


@pytest.mark.parametrize(
    ("model", "jagged", "shape", "permute"),
    [
        ("Each", False, (4, 6), ()),
        ("Last", False, (4, 6), (0, 2, 1)),
        ("Sets", True, None, ()),
    ],
    ids=["(n, columns, items)", "(n, items, columns)", "with a mask"],
)
def test_several_lists_of_one_length_are_vectors_unless_there_is_a_mask(
    user_folder: Path,
    model: str,
    jagged: bool,
    shape: tuple[int, ...] | None,
    permute: tuple[int, ...],
) -> None:
    """Vectors lie side by side, and are permuted if the model takes the items first."""
    write_lists(user_folder, 6, *"abcd")
    points = ("--input", "points=a,b,c,d")
    config = init_config(user_folder, f"model.py:{model}", user_folder / "lists.parquet", *points)
    assert bool(config.signature().jagged) == jagged
    assert (config.inputs[0].shape, config.inputs[0].permute) == (shape, permute)


@pytest.fixture
def vectors_and_numbers(user_folder: Path) -> Path:
    """A file with a vector of nine (h) and a number (pt) in each row."""
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(1)
    rows = {"h": [*draw.normal(size=(50, 9)).astype("f4")], "pt": draw.normal(size=50)}
    pandas.DataFrame(rows).to_parquet(user_folder / "mixed.parquet")
    return user_folder / "mixed.parquet"


def test_vectors_and_numbers_beside_each_other(
    user_folder: Path, vectors_and_numbers: Path
) -> None:
    config = init_config(user_folder, "model.py:Ten", vectors_and_numbers, "--input", "x=h,pt")
    columns = [(c.name, c.eigen) for c in config.collections["events"].columns]
    assert columns == [("h", (9,)), ("pt", None)]
    assert (config.inputs[0].dtype, config.inputs[0].shape) == ("float32", None)


def test_a_shape_that_a_model_refuses_is_listed_once(
    user_folder: Path, vectors_and_numbers: Path
) -> None:
    """Also if vectors and items would give the same. The user has named the columns already."""
    line = refused(user_folder, "model.py:Ten", vectors_and_numbers, "--input", "x=h")
    assert line.count("x (n, 9) of h") == 1
    assert "name the columns" not in line


def test_numbers_beside_lists_of_items_are_refused(
    user_folder: Path, vectors_and_numbers: Path
) -> None:
    options = ("--input", "x=h,pt", "--length", 9)
    line = refused(user_folder, "model.py:Ten", vectors_and_numbers, *options)
    assert "which differ in their items per row" in line


def test_what_init_writes_binds_arrays_in_place(flat: Path) -> None:
    """Outputs are separate columns too, so arrays of NumPy or torch are bound without a copy."""
    layout = load_config(flat / "config.yaml").signature().layouts["outputs"]
    arrays = {name: np.zeros(30, "f4") for name in ("output0", "output1", "output2")}
    collection = as_collection(arrays, layout)
    assert not collection.readonly and not collection.copied


@pytest.mark.parametrize(
    ("options", "comments"),
    [
        ((), ["max: 64 .* not 129, on which it fails: ", "min: 1 .* 0 rows: "]),
        (("--rows", 20), ["max: 20 .* by --rows"]),
    ],
    ids=["found by trial", "given"],
)
def test_the_most_and_fewest_rows_have_a_comment_why(
    user_folder: Path, options: tuple[object, ...], comments: list[str]
) -> None:
    (user_folder / "small.py").write_text(
        "import torch\n\n\nclass Small(torch.nn.Module):\n"
        "    def forward(self, features):\n"
        "        assert 0 < len(features) < 100\n"
        "        return features\n"
    )
    init_config(user_folder, "small.py:Small", user_folder / "flat.npz", *options)
    for comment in comments:
        assert re.search(comment, (user_folder / "config.yaml").read_text()), comment


def test_a_dataset_in_a_group_of_hdf5_is_a_column(user_folder: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="the extra `data` has it")
    draw = np.random.default_rng(1)
    with h5py.File(user_folder / "rows.h5", "w") as file:
        file["jets/kin"] = draw.normal(size=(50, 4)).astype(">f4")
        pairs = np.zeros(50, [("x", "f4"), ("y", "f4")])
        file["jets/pairs"] = pairs
    config = init_config(
        user_folder, "model.py:Flat", user_folder / "rows.h5", "--input", "features=jets/kin"
    )
    assert [c.name for c in config.collections["events"].columns] == ["jets_kin"]
    assert config.inputs[0].columns == ("jets_kin",)


NANOAOD = ROOT / "examples/nanoaod"
JETS = (
    "pt", "eta", "mass", "area", "chHEF", "neEmEF", "btagCSVV2", "qgl", "puIdDisc", "jetId",
    "nMuons", "nConstituents",
)  # fmt: skip


@pytest.fixture
def nanoaod() -> tuple[object, ...]:
    """The file, the weights and the columns of the example."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    columns = ",".join(f"Jet_{name}" for name in JETS)
    file = real_file("nanoAOD_2015_CMS_Open_Data_ttbar.root")
    return (file, "--weights", NANOAOD / "weights.safetensors", "--input", f"jets={columns}")


def test_nanoaod_with_a_row_for_each_jet(user_folder: Path, nanoaod: tuple[object, ...]) -> None:
    """The dtypes are those of the branches, and the rows those of all events."""
    config = init_config(user_folder, f"{NANOAOD / 'model.py'}:build", *nanoaod, "--flatten")
    (name,) = config.collections.keys() - {"outputs"}
    dtypes = {c.name: c.dtype for c in config.collections[name].columns}
    assert (name, dtypes["Jet_jetId"], dtypes["Jet_nConstituents"]) == ("Jet", "int32", "uint8")
    assert len(reference(user_folder)["Jet/Jet_pt"]) == 537


def test_nanoaod_without_flatten_names_the_option(
    user_folder: Path, nanoaod: tuple[object, ...]
) -> None:
    line = refused(user_folder, f"{NANOAOD / 'model.py'}:build", *nanoaod)
    assert "--flatten makes a row of each item" in line


def test_a_branch_that_nanoaod_lacks_is_named(
    user_folder: Path, nanoaod: tuple[object, ...]
) -> None:
    line = refused(
        user_folder, f"{NANOAOD / 'model.py'}:build", nanoaod[0], "--input", "jets=Jet_pT"
    )
    assert "has no 'Jet_pT'" in line


def test_a_terminal_is_asked_for_what_the_options_leave_open(user_folder: Path) -> None:
    """For a choice among columns, names of outputs and of the model, each with a proposal."""
    answers = {"--name": "asked", "--output output": "x, y, z"}
    asked: list[str] = []

    def ask(flag: str, question: str, default: str | None) -> str:
        option = flag.split("=")[0]
        asked.append(option)
        return answers.get(option, default or "")

    init(
        Request(
            f"{user_folder / 'model.py'}:Flat", user_folder / "flat.npz", user_folder / "c.yaml"
        ),
        ask,
    )
    assert asked == ["--input features", "--output output", "--name"]
    config = load_config(user_folder / "c.yaml")
    assert (config.name, config.outputs[0].columns) == ("asked", ("x", "y", "z"))
    assert config.reference.file == "c.reference.npz"


def test_enter_takes_what_is_proposed_on_a_terminal(user_folder: Path) -> None:
    shown, questions = typed(user_folder, "init", "model.py:Flat", "flat.npz", "--name", "asked")
    assert questions == 2  # the columns, and the names of the outputs
    assert "train mode" in shown
    assert load_config(user_folder / "config.yaml").inputs[0].columns == tuple("abcd")


def test_a_config_that_is_there_stays_without_force(user_folder: Path) -> None:
    (user_folder / "config.yaml").write_text("mine")
    line = refused(user_folder, "model.py:Flat", user_folder / "flat.npz")
    assert "config.yaml is there already: --force replaces it" in line
    assert (user_folder / "config.yaml").read_text() == "mine"
    init_config(user_folder, "model.py:Flat", user_folder / "flat.npz", "--force")


@pytest.mark.parametrize(
    ("model", "data", "options", "problem"),
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
def test_what_init_cannot_use_is_refused_in_one_line(
    user_folder: Path,
    unusable_files: None,
    model: str,
    data: str,
    options: tuple[str, ...],
    problem: str,
) -> None:
    assert problem in refused(user_folder, model, user_folder / data, *options)


@pytest.fixture
def unusable_files(user_folder: Path) -> None:
    """Files with one mistake each, beside the good one."""
    with np.load(user_folder / "flat.npz") as stored:
        flat = dict(stored)
    for ending in ("npz", "root", "parquet"):
        (user_folder / f"broken.{ending}").write_bytes(b"PAR1 or PK or root")
    np.savez(user_folder / "nan.npz", **{**flat, "a": np.append(flat["a"][:-2], [np.nan, np.inf])})
    np.savez(user_folder / "lengths.npz", **{**flat, "a": flat["a"][:-1]})
    np.savez(user_folder / "kinds.npz", **{**flat, "a": np.array(["x"] * 90)})
    torch.save(nn.Linear(2, 2).state_dict(), user_folder / "weights.pt")
    save_file(nn.Linear(2, 2).state_dict(), user_folder / "weights.safetensors")
