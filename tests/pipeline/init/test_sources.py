"""`pipeline init` with files of other programs: ONNX, boosted trees, weaver, jagged rows."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import InitError
from pipeline.init.weaver import read_weaver
from soa.errors import SoaPipelineError
from tests.campaigns.networks.files import WEAVER
from tests.pipeline.init.test_init import (
    ROOT,
    init_config,
    real_file,
    reference,
    refused,
    user_folder,
    user_model,
)

__all__ = ["user_folder"]  # a fixture


@pytest.fixture
def onnx_tools() -> None:
    """Skips where ONNX or its runtime is not installed."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")


@pytest.mark.usefixtures("onnx_tools")
def test_names_and_widths_are_those_of_an_onnx_file(user_folder: Path) -> None:
    """A name that is none in a config is changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older exporter is deprecated
        torch.onnx.export(
            user_model(user_folder, "Flat"),
            (torch.rand(5, 4),),
            str(user_folder / "net.onnx"),
            dynamo=False,
            input_names=["my.features"],
            output_names=["p"],
            dynamic_axes={"my.features": {0: "n"}, "p": {0: "n"}},
        )
    config = init_config(user_folder, "net.onnx", user_folder / "flat.npz")
    assert (config.inputs[0].name, config.inputs[0].columns) == ("my_features", tuple("abcd"))
    assert (config.outputs[0].name, config.model.onnx) == ("p", "net.onnx")


@pytest.mark.usefixtures("onnx_tools")
def test_a_broken_onnx_file_is_refused(user_folder: Path) -> None:
    (user_folder / "broken.onnx").write_bytes(b"no graph")
    assert "broken.onnx" in refused(user_folder, "broken.onnx")


@pytest.mark.usefixtures("onnx_tools")
def test_onnx_of_scikit_learn_has_labels_and_scores(user_folder: Path) -> None:
    """NaN is a value for an imputer; the label and the scores are outputs."""
    files = ROOT / "tests" / "models" / "sources"
    with np.load(files / "linear.npz") as stored:
        rows = stored["x"]
    assert np.isnan(rows).any()
    np.savez(user_folder / "holes.npz", **dict(zip("abcd", rows.T.copy(), strict=True)))
    config = init_config(user_folder, str(files / "linear.onnx"), user_folder / "holes.npz")
    assert config.inputs[0].columns == tuple("abcd")
    assert [len(output.columns) for output in config.outputs] == [1, 2]


def write_onnx(file: Path, *nodes: Any) -> None:
    """Writes an ONNX file of a network from x: (n, 2, 4) to y.

    A node is its kind, inputs, output and attributes.
    """
    onnx = pytest.importorskip("onnx")
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    written = [
        helper.make_node(kind, inputs, [output], **attributes)
        for kind, inputs, output, attributes in nodes
    ]
    constants = {"w": np.ones((1, 8, 4)), "r": np.ones((1, 8, 2))}
    weights = [onnx.numpy_helper.from_array(np.float32(v), k) for k, v in constants.items()]
    graph = helper.make_graph(
        written, "net", [value("x", 1, ["n", 2, 4])], [value("y", 1, None)], weights
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), file)


@pytest.fixture
def pairs(user_folder: Path) -> Path:
    """Ninety rows of x: (2, 4)."""
    values = np.random.default_rng(1).normal(size=(90, 2, 4)).astype("f4")
    np.savez(user_folder / "x.npz", x=values)
    return user_folder / "x.npz"


@pytest.mark.usefixtures("onnx_tools")
def test_an_onnx_lstm_is_refused_by_the_name_of_its_node(user_folder: Path, pairs: Path) -> None:
    """No engine supports it. ONNX Runtime ends the process when it has no rows."""
    turned = ("Transpose", ["x"], "turned", {"perm": [1, 0, 2]})
    lstm = ("LSTM", ["turned", "w", "r"], "y", {"hidden_size": 2, "name": "cells"})
    write_onnx(user_folder / "lstm.onnx", turned, lstm)
    assert "LSTM (node 'cells')" in refused(user_folder, "lstm.onnx", pairs)


@pytest.mark.usefixtures("onnx_tools")
def test_an_onnx_einsum_takes_no_rows(user_folder: Path, pairs: Path) -> None:
    """All engines support it, although ONNX Runtime ends the process when it has no rows."""
    write_onnx(user_folder / "net.onnx", ("Einsum", ["x", "x"], "y", {"equation": "nij,nkj->nik"}))
    assert init_config(user_folder, "net.onnx", pairs).rows["n"].min == 0


@pytest.fixture
def trees(user_folder: Path) -> str:
    """Trees of xgboost, trained on the columns c, a and d."""
    xgboost = pytest.importorskip("xgboost")
    values = np.random.default_rng(1).normal(size=(200, 3)).astype("f4")
    table = xgboost.DMatrix(values, values.sum(1) > 0, feature_names=["c", "a", "d"])
    settings = {"objective": "binary:logistic", "max_depth": 2}
    xgboost.train(settings, table, 3).save_model(user_folder / "trees.json")
    return "trees.json"


@pytest.fixture
def holes() -> dict[str, Any]:
    """Fifty rows of a, b, c and d; `a` is NaN in every seventh."""
    draw = np.random.default_rng(1)
    rows: dict[str, Any] = {name: draw.normal(size=50).astype("f4") for name in "abcd"}
    rows["a"][::7] = np.nan
    return rows


def test_trees_without_data_have_the_columns_of_their_training(
    user_folder: Path, trees: str
) -> None:
    assert init_config(user_folder, trees).inputs[0].columns == ("c", "a", "d")


def test_nan_is_a_missing_value_for_trees(
    user_folder: Path, trees: str, holes: dict[str, Any]
) -> None:
    np.savez(user_folder / "holes.npz", **holes)
    config = init_config(user_folder, trees, user_folder / "holes.npz")
    assert config.inputs[0].columns == ("c", "a", "d")
    assert np.isnan(reference(user_folder)["events/a"][0])
    assert "8 of 50 are NaN" in (user_folder / "config.yaml").read_text()


def test_a_null_of_pandas_is_a_missing_value_for_trees(
    user_folder: Path, trees: str, holes: dict[str, Any]
) -> None:
    """pandas writes NaN as null."""
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(holes).to_parquet(user_folder / "holes.parquet")
    init_config(user_folder, trees, user_folder / "holes.parquet")
    assert np.isnan(reference(user_folder)["events/a"]).tolist() == np.isnan(holes["a"]).tolist()


def test_nulls_among_integers_are_refused_for_trees(
    user_folder: Path, trees: str, holes: dict[str, Any]
) -> None:
    pandas = pytest.importorskip("pandas")
    whole = pandas.DataFrame(holes).assign(a=pandas.array([1, None] * 25, "Int64"))
    whole.to_parquet(user_folder / "whole.parquet")
    line = refused(user_folder, trees, user_folder / "whole.parquet")
    assert "a has 25 nulls: cast it to floating point" in line


@pytest.fixture
def events() -> Path:
    """A file of events with jets and muons."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    return real_file("uproot-HZZ.root")


POINTS = "points=Jet_Px,Jet_Py,Jet_Pz,Jet_E"


def test_jagged_rows_become_a_collection_of_items(user_folder: Path, events: Path) -> None:
    config = init_config(user_folder, "model.py:Sets", events, "--input", POINTS)
    jets, (block, mask) = config.collections["Jet"], config.inputs
    assert (jets.storage, jets.rows) == ("columns", "n_Jet")
    assert jets.jagged is not None
    assert (jets.jagged.rows, jets.jagged.length) == ("n", 5)
    assert (block.collection, block.shape, mask.mask) == ("Jet", None, True)
    rows = reference(user_folder)
    assert len(rows["Jet_offsets/end"]) == 2421
    assert rows["Jet_offsets/end"][-1] == len(rows["Jet/Jet_Px"]) == 2773


def test_a_length_makes_jagged_rows_an_input_without_a_mask(
    user_folder: Path, events: Path
) -> None:
    config = init_config(user_folder, "model.py:Last", events, "--input", POINTS, "--length", 4)
    assert config.inputs[0].shape == (4, 4)


def test_axes_as_numbers_give_the_length(user_folder: Path, events: Path) -> None:
    as_numbers = POINTS.replace("points=", "points=(n, 3, 4): ")
    config = init_config(user_folder, "model.py:Last", events, "--input", as_numbers)
    assert config.inputs[0].shape == (3, 4)


def test_a_model_of_items_needs_flatten_for_jagged_rows(user_folder: Path, events: Path) -> None:
    features = POINTS.replace("points", "features")
    line = refused(user_folder, "model.py:Flat", events, "--input", features)
    assert "--flatten makes a row of each item" in line


@pytest.mark.parametrize("other", ["Jet_Pz,NJet", "Muon_Px,Muon_Py"])
def test_columns_with_other_numbers_of_items_are_refused(
    user_folder: Path, events: Path, other: str
) -> None:
    line = refused(user_folder, "model.py:Sets", events, "--input", f"points=Jet_Px,Jet_Py,{other}")
    assert "which differ in their items per row" in line


def test_particlenet_and_its_data_config_become_a_config(user_folder: Path) -> None:
    """The trained network with its data config gives the same as configs/particlenet_raw.yaml."""
    pytest.importorskip("weaver")
    weights = real_file("ParticleNet_kin.pt")
    (user_folder / "JetClass_kin.yaml").write_text(WEAVER)
    from examples.particlenet.model import reference as jets

    columns = jets({"n": 20}, 1)["jets"]
    columns |= {"jet_pt": columns.pop("pt"), "jet_energy": columns.pop("energy")}
    np.savez(user_folder / "jets.npz", allow_pickle=False, **columns)
    model = f"{ROOT}/examples/particlenet/model.py:network"
    options = ("--weights", weights, "--weaver", user_folder / "JetClass_kin.yaml", "--rows", 16)
    config = init_config(user_folder, model, user_folder / "jets.npz", *options)
    assert config.model.weights_prefix == "mod."
    assert [block.name for block in config.inputs] == ["points", "features", "mask"]
    assert config.outputs[0].columns[:2] == ("QCD", "Hbb")
    features = config.inputs[1].preprocess
    assert features is not None
    assert features.exists == "part_energy"
    assert features.features[2] == [
        "part_pt",
        {"ratio": ["jet_pt"]},
        "log",
        {"standardise": [-4.7, 0.7]},
        {"clip": [-5, 5]},
    ]


def test_a_data_config_of_weaver_has_inputs_masks_and_labels(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(WEAVER)
    inputs, labels = read_weaver(tmp_path / "data.yaml", ())
    assert labels[-1] == "Tbl"
    assert [weaver_input.mask for weaver_input in inputs.values()] == [False, False, False, True]
    assert {weaver_input.length for weaver_input in inputs.values()} == {128}
    assert inputs["pf_points"].features == (["part_deta"], ["part_dphi"])


@pytest.mark.parametrize(
    ("columns", "start"),
    [
        ([], ["part_deta", "square", {"add": ["part_dphi", "square"]}, "sqrt"]),
        (["part_deltaR"], ["part_deltaR"]),
    ],
    ids=["computed", "of the file"],
)
def test_a_new_variable_of_weaver_is_computed_unless_the_file_has_it(
    tmp_path: Path, columns: list[str], start: list[object]
) -> None:
    (tmp_path / "data.yaml").write_text(WEAVER)
    inputs, _ = read_weaver(tmp_path / "data.yaml", columns)
    assert inputs["pf_features"].features[4][: len(start)] == start


def test_a_preprocess_json_of_weaver_has_expressions(tmp_path: Path) -> None:
    """A median of 0, a factor of 1 and bounds of ±1e32 change nothing: they give no operation."""
    scaled = {"median": 1.5, "norm_factor": 2, "lower_bound": -5, "upper_bound": 5}
    plain = {"median": 0, "norm_factor": 1, "lower_bound": -1e32, "upper_bound": 1e32}
    infos = {"a": scaled, "b": plain}
    data = {
        "output_names": ["label_b"],
        "input_names": ["x"],
        "x": {"var_names": ["a", "b"], "var_length": 8, "var_infos": infos},
    }
    (tmp_path / "preprocess.json").write_text(json.dumps(data))
    inputs, _ = read_weaver(tmp_path / "preprocess.json", ())
    assert inputs["x"].features == (["a", {"standardise": [1.5, 2]}, {"clip": [-5, 5]}], ["b"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("np.log(part_pt)", "np.tanh(part_pt)", "np.tanh(part_pt) is no operation of preprocess"),
        ("np.log(part_pt)", "np.log(", "data.yaml: "),
        ("method: manual", "method: auto", "standardise part_deltaR"),
        ("  pf_points:\n    length", "  pf_points:\n    lengths: [", "not YAML"),
        ("inputs:", "outputs:", "neither a data config of weaver nor a preprocess.json"),
    ],
)
def test_a_file_that_weaver_would_not_read_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    # Without numbers, `auto` would have to find those of part_deltaR.
    text = WEAVER.replace(old, new).replace("[part_deltaR, 0.2, 4.0]", "part_deltaR")
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(SoaPipelineError) as caught:
        read_weaver(tmp_path / "data.yaml", ())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, InitError) or "YAML" in says


def jagged_jets(jets: int = 40) -> Any:
    """Jets with particles, nested: each row has a list of records."""
    ak = pytest.importorskip("awkward")
    draw = np.random.default_rng(1)
    counts = draw.integers(0, 7, jets)
    names = ("pt", "energy", "deta", "dphi")
    particles = ak.zip({n: draw.uniform(1, 2, counts.sum()).astype("f4") for n in names})
    flat = {f"jet_{name}": draw.uniform(9, 99, jets).astype("f4") for name in ("pt", "energy")}
    return ak.zip({"part": ak.unflatten(particles, counts), **flat}, depth_limit=1)


@pytest.mark.parametrize("kind", ["parquet", "root"])
def test_fields_of_records_in_lists_are_columns_of_items(user_folder: Path, kind: str) -> None:
    """In nested Parquet and ROOT's RNTuple, the items of a row are those of its records."""
    ak, uproot = pytest.importorskip("awkward"), pytest.importorskip("uproot")
    jets = jagged_jets()
    if kind == "parquet":
        ak.to_parquet(jets, user_folder / "jets.parquet")
    else:
        with uproot.recreate(user_folder / "jets.root") as file:
            file.mkrntuple("jets", jets)
    points = ",".join(f"part.{name}" for name in ("pt", "energy", "deta", "dphi"))
    columns = ("--input", f"points={points}")
    config = init_config(user_folder, "model.py:Sets", user_folder / f"jets.{kind}", *columns)
    (name,) = config.collections.keys() - {"outputs"}
    assert [c.name for c in config.collections[name].columns] == ["pt", "energy", "deta", "dphi"]
    rows = reference(user_folder)
    assert rows[f"{name}_offsets/end"].tolist() == np.cumsum(ak.num(jets.part)).tolist()
    assert rows[f"{name}/pt"].tolist() == ak.flatten(jets.part.pt).tolist()


def test_two_jagged_inputs_and_their_masks(user_folder: Path) -> None:
    """A mask belongs to the jagged input before it."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    file = real_file("uproot-HZZ.root")
    jets = ("--input", "jets=Jet_Px,Jet_Py,Jet_Pz", "--input", "muon_exists=mask")
    muons = ("--input", "muons=Muon_Px,Muon_Py,Muon_Pz,Muon_E")
    config = init_config(user_folder, f"{ROOT}/examples/hzz/model.py:build", file, *jets, *muons)
    assert [(block.collection, block.mask, block.shape) for block in config.inputs] == [
        ("Jet", False, None), ("Jet", True, (1, 5)), ("Muon", False, (5, 4)), ("Muon", True, (5,)),
    ]  # fmt: skip
    assert config.inputs[3].dtype == "bool"


@pytest.fixture
def weaver_options(user_folder: Path) -> tuple[object, ...]:
    """The options for jets.parquet with formulas such as `part_pt / jet_pt`, as in JetClass."""
    (user_folder / "kin.yaml").write_text(WEAVER)
    return (user_folder / "jets.parquet", "--weaver", user_folder / "kin.yaml")


def write_jets(user_folder: Path, **of_jets: Any) -> None:
    """Writes jets.parquet: the particles of `jagged_jets`, and these columns."""
    ak = pytest.importorskip("awkward")
    jets = jagged_jets()
    particles = {f"part_{name}": jets.part[name] for name in jets.part.fields}
    ak.to_parquet(ak.zip(particles | of_jets, depth_limit=1), user_folder / "jets.parquet")


JET_COLUMNS = ("jet_pt", "jet_energy")


def test_a_formula_of_items_and_their_row_is_refused(
    user_folder: Path, weaver_options: tuple[object, ...]
) -> None:
    jets = jagged_jets()
    write_jets(user_folder, **{name: jets[name] for name in JET_COLUMNS})
    line = refused(user_folder, "model.py:Cloud", *weaver_options)
    assert "part_dphi and jet_energy" in line
    assert "give the file one of them for each item" in line


def test_a_formula_of_items_and_a_column_repeated_for_each_item(
    user_folder: Path, weaver_options: tuple[object, ...]
) -> None:
    """The items are padded to the length in training."""
    ak = pytest.importorskip("awkward")
    jets = jagged_jets()
    repeated = {name: ak.broadcast_arrays(jets[name], jets.part.pt)[0] for name in JET_COLUMNS}
    write_jets(user_folder, **repeated)
    config = init_config(user_folder, "model.py:Cloud", *weaver_options, "--rows", 8)
    jagged = next(c.jagged for c in config.collections.values() if c.jagged)
    assert jagged.length == 128


def test_a_formula_of_vectors_and_their_row(
    user_folder: Path, weaver_options: tuple[object, ...]
) -> None:
    """If all lists have the length in training, they are vectors, and jagged no more."""
    ak = pytest.importorskip("awkward")
    names = jagged_jets().part.fields
    vectors = {f"part_{n}": ak.from_regular(ak.Array(np.ones((9, 128), "f4"))) for n in names}
    rows = {name: np.arange(1, 10, dtype="f4") for name in JET_COLUMNS}
    ak.to_parquet(ak.zip(vectors | rows, depth_limit=1), user_folder / "jets.parquet")
    config = init_config(user_folder, "model.py:Cloud", *weaver_options, "--rows", 8)
    assert not config.signature().jagged


def test_trees_of_lightgbm_have_the_columns_of_their_training(user_folder: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    draw = np.random.default_rng(1)
    values = draw.normal(size=(200, 3))
    table = lightgbm.Dataset(values, values.sum(1), feature_name=["c", "a", "d"])
    settings = {"objective": "regression", "verbosity": -1, "num_threads": 1, "num_leaves": 7}
    lightgbm.train(settings, table, 3).save_model(user_folder / "trees.txt")
    config = init_config(user_folder, "trees.txt", user_folder / "flat.npz")
    assert config.inputs[0].columns == ("c", "a", "d")
    assert config.model.trees == "trees.txt"
