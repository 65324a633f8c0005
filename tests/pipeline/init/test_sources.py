"""`pipeline init` with files of other programs: ONNX, boosted trees, weaver, jagged rows."""

from __future__ import annotations

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
    place,
    real,
    reference,
    refused,
    written,
    written_model,
)

__all__ = ["place"]  # a fixture


def test_onnx(place: Path) -> None:
    """Names and widths are those of the file."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older exporter is deprecated
        torch.onnx.export(
            written_model(place, "Flat"),
            (torch.rand(5, 4),),
            str(place / "net.onnx"),
            dynamo=False,
            input_names=["my.features"],
            output_names=["p"],
            dynamic_axes={"my.features": {0: "n"}, "p": {0: "n"}},
        )
    config = written(place, "net.onnx", place / "flat.npz")
    assert (config.inputs[0].name, config.inputs[0].columns) == ("my_features", tuple("abcd"))
    assert (config.outputs[0].name, config.model.onnx) == ("p", "net.onnx")
    (place / "broken.onnx").write_bytes(b"no graph")
    assert "broken.onnx" in refused(place, "broken.onnx", "--force")


def test_onnx_of_scikit_learn(place: Path) -> None:
    """NaN is a value for an imputer; the label and the scores are columns."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    files = ROOT / "tests" / "models" / "sources"
    with np.load(files / "linear.npz") as stored:
        x = stored["x"]
    assert np.isnan(x).any()
    np.savez(place / "holes.npz", **dict(zip("abcd", x.T.copy(), strict=True)))
    config = written(place, str(files / "linear.onnx"), place / "holes.npz")
    assert config.inputs[0].columns == tuple("abcd")
    assert [len(output.columns) for output in config.outputs] == [1, 2]


def of_onnx(place: Path, name: str, *nodes: Any) -> None:
    """Writes an ONNX file of a network on x: (n, 2, 4)."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    made = [helper.make_node(kind, given, [to], **more) for kind, given, to, more in nodes]
    constants = {"w": np.ones((1, 8, 4)), "r": np.ones((1, 8, 2))}
    weights = [onnx.numpy_helper.from_array(np.float32(v), k) for k, v in constants.items()]
    graph = helper.make_graph(
        made, "net", [value("x", 1, ["n", 2, 4])], [value("y", 1, None)], weights
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), place / name)


def test_onnx_that_ends_the_process_at_no_rows(place: Path) -> None:
    """ONNX Runtime crashes at an LSTM, which no engine supports, and at an Einsum, which all do."""
    values = np.random.default_rng(1).normal(size=(90, 2, 4)).astype("f4")
    np.savez(place / "x.npz", x=values)
    turned = ("Transpose", ["x"], "turned", {"perm": [1, 0, 2]})
    lstm = ("LSTM", ["turned", "w", "r"], "y", {"hidden_size": 2, "name": "cells"})
    of_onnx(place, "lstm.onnx", turned, lstm)
    assert "LSTM (node 'cells')" in refused(place, "lstm.onnx", place / "x.npz")
    einsum = ("Einsum", ["x", "x"], "y", {"equation": "nij,nkj->nik"})
    of_onnx(place, "net.onnx", einsum)
    config = written(place, "net.onnx", place / "x.npz")
    assert config.rows["n"].min == 0


def test_trees(place: Path) -> None:
    """The columns are those with which the trees were trained; NaN is a missing value."""
    xgboost = pytest.importorskip("xgboost")
    draw = np.random.default_rng(1)
    values = draw.normal(size=(200, 3)).astype("f4")
    names = ["c", "a", "d"]
    table = xgboost.DMatrix(values, values.sum(1) > 0, feature_names=names)
    settings = {"objective": "binary:logistic", "max_depth": 2}
    xgboost.train(settings, table, 3).save_model(place / "trees.json")
    assert written(place, "trees.json").inputs[0].columns == ("c", "a", "d")
    holes: dict[str, Any] = {name: draw.normal(size=50).astype("f4") for name in "abcd"}
    holes["a"][::7] = np.nan
    np.savez(place / "holes.npz", **holes)
    config = written(place, "trees.json", place / "holes.npz", "--force")
    assert config.inputs[0].columns == ("c", "a", "d")
    assert np.isnan(reference(place)["events/a"][0])
    assert "8 of 50 are NaN" in (place / "config.yaml").read_text()
    pandas = pytest.importorskip("pandas")  # it writes NaN as null
    pandas.DataFrame(holes).to_parquet(place / "holes.parquet")
    written(place, "trees.json", place / "holes.parquet", "--force")
    assert np.isnan(reference(place)["events/a"]).tolist() == np.isnan(holes["a"]).tolist()
    whole = pandas.DataFrame(holes).assign(a=pandas.array([1, None] * 25, "Int64"))
    whole.to_parquet(place / "whole.parquet")
    line = refused(place, "trees.json", place / "whole.parquet", "--force")
    assert "a has 25 nulls: cast it to floating point" in line


@pytest.fixture
def events() -> Path:
    """A file of events with jets and muons."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    return real("uproot-HZZ.root")


POINTS = "points=Jet_Px,Jet_Py,Jet_Pz,Jet_E"


def test_jagged_rows_become_a_collection_of_items(place: Path, events: Path) -> None:
    config = written(place, "model.py:Sets", events, "--input", POINTS)
    jets, (block, mask) = config.collections["Jet"], config.inputs
    assert (jets.storage, jets.rows) == ("columns", "n_Jet")
    assert jets.jagged is not None
    assert (jets.jagged.rows, jets.jagged.length) == ("n", 5)
    assert (block.collection, block.shape, mask.mask) == ("Jet", None, True)
    rows = reference(place)
    assert len(rows["Jet_offsets/end"]) == 2421
    assert rows["Jet_offsets/end"][-1] == len(rows["Jet/Jet_Px"]) == 2773


def test_jagged_rows_of_a_given_length(place: Path, events: Path) -> None:
    config = written(place, "model.py:Last", events, "--input", POINTS, "--length", 4)
    assert config.inputs[0].shape == (4, 4)


def test_jagged_rows_for_a_model_of_items(place: Path, events: Path) -> None:
    features = POINTS.replace("points", "features")
    line = refused(place, "model.py:Flat", events, "--input", features)
    assert "--flatten makes a row of each item" in line


@pytest.mark.parametrize("other", ["Jet_Pz,NJet", "Muon_Px,Muon_Py"])
def test_columns_with_other_numbers_of_items(place: Path, events: Path, other: str) -> None:
    line = refused(place, "model.py:Sets", events, "--input", f"points=Jet_Px,Jet_Py,{other}")
    assert "which differ in their items per row" in line


def test_particlenet_of_weaver(place: Path) -> None:
    """The trained network with its data config gives the same as configs/particlenet_raw.yaml."""
    pytest.importorskip("weaver")
    weights = real("ParticleNet_kin.pt")
    (place / "JetClass_kin.yaml").write_text(WEAVER)
    from examples.particlenet.model import reference as jets

    columns = jets({"n": 20}, 1)["jets"]
    columns |= {"jet_pt": columns.pop("pt"), "jet_energy": columns.pop("energy")}
    np.savez(place / "jets.npz", allow_pickle=False, **columns)
    model = f"{ROOT}/examples/particlenet/model.py:network"
    given = ("--weights", weights, "--weaver", place / "JetClass_kin.yaml", "--rows", 16)
    config = written(place, model, place / "jets.npz", *given)
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


def test_weaver_files(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(WEAVER)
    inputs, labels = read_weaver(tmp_path / "data.yaml", ())
    assert labels[-1] == "Tbl"
    assert [one.mask for one in inputs.values()] == [False, False, False, True]
    assert {one.length for one in inputs.values()} == {128}
    assert inputs["pf_points"].features == (["part_deta"], ["part_dphi"])
    radius = inputs["pf_features"].features[4]
    assert radius[:4] == ["part_deta", "square", {"add": ["part_dphi", "square"]}, "sqrt"]
    given, _ = read_weaver(tmp_path / "data.yaml", ["part_deltaR"])  # the file has this column
    assert given["pf_features"].features[4][0] == "part_deltaR"
    info = {"median": 1.5, "norm_factor": 2, "lower_bound": -5, "upper_bound": 5}
    plain = {"median": 0, "norm_factor": 1, "lower_bound": "-1e32", "upper_bound": "1e32"}
    text = str({
        "output_names": ["label_b"],
        "input_names": ["x"],
        "x": {"var_names": ["a", "b"], "var_length": 8, "var_infos": {"a": info, "b": plain}},
    }).replace("'-1e32'", "-1e32").replace("'1e32'", "1e32")  # fmt: skip
    (tmp_path / "preprocess.json").write_text(text.replace("'", '"'))
    inputs, labels = read_weaver(tmp_path / "preprocess.json", ())
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
def test_weaver_files_that_are_none(tmp_path: Path, old: str, new: str, says: str) -> None:
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
    parts = ak.zip({n: draw.uniform(1, 2, counts.sum()).astype("f4") for n in names})
    flat = {f"jet_{name}": draw.uniform(9, 99, jets).astype("f4") for name in ("pt", "energy")}
    return ak.zip({"part": ak.unflatten(parts, counts), **flat}, depth_limit=1)


@pytest.mark.parametrize("kind", ["parquet", "root"])
def test_lists_of_records(place: Path, kind: str) -> None:
    """In nested Parquet and ROOT's RNTuple, the items of a row are those of its records."""
    ak, uproot = pytest.importorskip("awkward"), pytest.importorskip("uproot")
    jets = jagged_jets()
    if kind == "parquet":
        ak.to_parquet(jets, place / "jets.parquet")
    else:
        with uproot.recreate(place / "jets.root") as file:
            file.mkrntuple("jets", jets)
    points = ",".join(f"part.{name}" for name in ("pt", "energy", "deta", "dphi"))
    columns = ("--input", f"points={points}")
    config = written(place, "model.py:Sets", place / f"jets.{kind}", *columns)
    (name,) = config.collections.keys() - {"outputs"}
    assert [c.name for c in config.collections[name].columns] == ["pt", "energy", "deta", "dphi"]
    rows = reference(place)
    assert rows[f"{name}_offsets/end"].tolist() == np.cumsum(ak.num(jets.part)).tolist()
    assert rows[f"{name}/pt"].tolist() == ak.flatten(jets.part.pt).tolist()


def test_two_jagged_inputs_and_their_masks(place: Path) -> None:
    """A mask belongs to the jagged input before it."""
    pytest.importorskip("uproot", reason="the extra `data` has it")
    file = real("uproot-HZZ.root")
    given = ("--input", "jets=Jet_Px,Jet_Py,Jet_Pz", "--input", "muon_exists=mask")
    muons = ("--input", "muons=Muon_Px,Muon_Py,Muon_Pz,Muon_E")
    config = written(place, f"{ROOT}/examples/hzz/model.py:build", file, *given, *muons)
    homes = [(block.collection, block.mask, block.shape) for block in config.inputs]
    jets, muons_ = ("Jet", False, None), ("Muon", False, (5, 4))
    assert homes == [jets, ("Jet", True, (1, 5)), muons_, ("Muon", True, (5,))]
    assert config.inputs[3].dtype == "bool"


def test_formulas_of_jets_and_their_particles(place: Path) -> None:
    """As in JetClass, `part_pt / jet_pt` combines items with a column of their row."""
    ak = pytest.importorskip("awkward")
    jets = jagged_jets()
    names = {f"part_{n}": jets.part[n] for n in jets.part.fields}
    flat = {n: jets[n] for n in ("jet_pt", "jet_energy")}
    ak.to_parquet(ak.zip(names | flat, depth_limit=1), place / "jets.parquet")
    (place / "kin.yaml").write_text(WEAVER)
    model = ("model.py:Cloud", place / "jets.parquet")
    line = refused(place, *model, "--weaver", place / "kin.yaml")
    assert "part_dphi and jet_energy" in line
    assert "give the file one of them for each item" in line
    flat = {n: ak.broadcast_arrays(jets[n], jets.part.pt)[0] for n in flat}
    ak.to_parquet(ak.zip(names | flat, depth_limit=1), place / "jets.parquet")
    config = written(place, *model, "--weaver", place / "kin.yaml", "--rows", 8)
    jagged = next(c.jagged for c in config.collections.values() if c.jagged)
    assert jagged.length == 128  # the length in training
    # If all lists have that length, they are vectors, and a jet's own columns can be used with
    # them.
    full = {f"part_{n}": np.ones((9, 128), "f4") for n in jets.part.fields}
    own = {n: np.arange(1, 10, dtype="f4") for n in flat}
    lists = {name: ak.from_regular(ak.Array(values)) for name, values in full.items()}
    ak.to_parquet(ak.zip(lists | own, depth_limit=1), place / "jets.parquet")
    config = written(place, *model, "--weaver", place / "kin.yaml", "--rows", 8, "--force")
    assert not config.signature().jagged


def test_lightgbm(place: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    draw = np.random.default_rng(1)
    values = draw.normal(size=(200, 3))
    table = lightgbm.Dataset(values, values.sum(1), feature_name=["c", "a", "d"])
    told = {"objective": "regression", "verbosity": -1, "num_threads": 1, "num_leaves": 7}
    lightgbm.train(told, table, 3).save_model(place / "trees.txt")
    config = written(place, "trees.txt", place / "flat.npz")
    assert config.inputs[0].columns == ("c", "a", "d")
    assert config.model.trees == "trees.txt"
