"""A file that is no model by itself: the message has what makes a model of it, and that works."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages.errors import SourceError
from stages.model import ModelSource, advise_on_file, build_model, is_program
from tests.models import mlps


@pytest.mark.parametrize("name", ["weights.pt", "weights.ckpt", "weights.safetensors"])
def test_weights_alone_need_an_option(tmp_path: Path, name: str) -> None:
    state, file = mlps.build().state_dict(), tmp_path / name
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state if file.suffix == ".pt" else {"state_dict": state, "epoch": 3}, file)
    assert f"--weights {file}" in advise_on_file(file)


def test_weights_alone_are_no_torchscript(tmp_path: Path) -> None:
    torch.save(mlps.build().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SourceError, match="--weights") as caught:
        build_model(ModelSource(torchscript=tmp_path / "weights.pt"))
    assert "\n" not in str(caught.value)


def test_the_code_for_a_pickled_network_returns_it(tmp_path: Path) -> None:
    network = mlps.build()
    torch.save(network, tmp_path / "whole.pt")
    code = re.findall(r'"([^"]*)"', advise_on_file(tmp_path / "whole.pt"))
    (tmp_path / "net.py").write_text("\n".join(code))
    state = build_model(ModelSource(factory=f"{tmp_path / 'net.py'}:build")).state_dict()
    assert all(torch.equal(state[key], value) for key, value in network.state_dict().items())


def test_a_program_is_known_by_its_content(tmp_path: Path) -> None:
    """Its suffix may be another one."""
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),))
    torch.export.save(program, tmp_path / "net.pt2")
    assert is_program((tmp_path / "net.pt2").rename(tmp_path / "net.pt"))
    torch.save({}, tmp_path / "none.pt")
    assert not is_program(tmp_path / "none.pt")


@pytest.mark.parametrize("suffix", [".pkl", ".joblib", ".skops", ".cbm", ".keras", ".h5"])
def test_the_line_for_a_file_of_another_library_writes_onnx(suffix: str) -> None:
    """A line of Python writes an ONNX file. Whether it runs is tried where those libraries are."""
    text = advise_on_file(Path(f"folder/net{suffix}"))
    (code,) = re.findall(r'python -c "([^"]*)"', text)
    names = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert {f"folder/net{suffix}", "net.onnx"} <= names
    assert text.count("net.onnx") == 2


def test_the_message_for_xgboosts_own_format_names_a_json_file(tmp_path: Path) -> None:
    assert "net.json" in advise_on_file(tmp_path / "net.model")


def test_there_is_no_message_for_torchscript(tmp_path: Path) -> None:
    assert not advise_on_file(tmp_path / "net.ts")


def test_trees_of_catboost_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "trees.json").write_text(json.dumps({"oblivious_trees": []}))
    with pytest.raises(SourceError, match="CatBoost"):
        build_model(ModelSource(trees=tmp_path / "trees.json"))
