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
from stages.model import ModelSource, build_model, instead, is_program
from tests.models import mlps


def test_weights_alone(tmp_path: Path) -> None:
    state = mlps.build().state_dict()
    torch.save(state, tmp_path / "weights.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "weights.ckpt")
    save_file(state, tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.ckpt", "weights.safetensors"):
        assert f"--weights {tmp_path / name}" in instead(tmp_path / name)
    with pytest.raises(SourceError, match="--weights") as caught:
        build_model(ModelSource(torchscript=tmp_path / "weights.pt"))
    assert "\n" not in str(caught.value)


def test_a_pickled_network(tmp_path: Path) -> None:
    """The function that the message has returns it."""
    network = mlps.build()
    torch.save(network, tmp_path / "whole.pt")
    code = re.findall(r'"([^"]*)"', instead(tmp_path / "whole.pt"))
    (tmp_path / "net.py").write_text("\n".join(code))
    found = build_model(ModelSource(factory=f"{tmp_path / 'net.py'}:build")).state_dict()
    assert all(torch.equal(found[key], value) for key, value in network.state_dict().items())


def test_a_program_by_another_suffix(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),))
    torch.export.save(program, tmp_path / "net.pt2")
    (tmp_path / "net.pt2").rename(tmp_path / "net.pt")
    torch.save({}, tmp_path / "none.pt")
    assert is_program(tmp_path / "net.pt") and not is_program(tmp_path / "none.pt")


@pytest.mark.parametrize("suffix", [".pkl", ".joblib", ".skops", ".cbm", ".keras", ".h5"])
def test_other_programs(suffix: str) -> None:
    """A line of Python writes an ONNX file. Whether it runs is tried where those libraries are."""
    text = instead(Path(f"folder/net{suffix}"))
    (code,) = re.findall(r'python -c "([^"]*)"', text)
    names = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert {f"folder/net{suffix}", "net.onnx"} <= names
    assert text.count("net.onnx") == 2


def test_boosters(tmp_path: Path) -> None:
    assert "net.json" in instead(tmp_path / "net.model")
    assert not instead(tmp_path / "net.ts")
    (tmp_path / "trees.json").write_text(json.dumps({"oblivious_trees": []}))
    with pytest.raises(SourceError, match="CatBoost"):
        build_model(ModelSource(trees=tmp_path / "trees.json"))
