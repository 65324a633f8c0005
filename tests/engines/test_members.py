"""Names in archives and graphs that point out of their folder are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from engines.aoti.build import unpack
from engines.base import engine
from engines.errors import EngineError


def test_a_package_is_unpacked_into_its_folder_alone(tmp_path: Path) -> None:
    package, out = tmp_path / "package.pt2", tmp_path / "a" / "b" / "out"
    out.mkdir(parents=True)
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("p/data/aotinductor/model/../../../../../library.so", b"code")
        archive.writestr("/data/aotinductor/model/absolute.json", b"{}")
        archive.writestr("p/data/aotinductor/..", b"nothing")
        archive.writestr("p/data/weights/../../../elsewhere.bin", b"nothing")
    assert unpack(package, out) == ["library.so", "absolute.json"]
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["a/b/out/absolute.json", "a/b/out/library.so", "package.pt2"]


@pytest.mark.parametrize("absolute", [False, True])
def test_onnx_weights_outside_the_folder_are_refused(tmp_path: Path, absolute: bool) -> None:
    """The model is the identity of 16 float32 weights, which the file outside would hold."""
    (tmp_path / "secret").write_bytes(b"\0" * 64)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[16])
    weights.data_location = TensorProto.EXTERNAL
    location = str(tmp_path / "secret") if absolute else "../secret"
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        weights.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match="External data path"):
        engine("onnxruntime").open(folder / "model.onnx", torch.device("cpu"))
