"""TensorRT: refusals on hosts that cannot run it, and the engine itself on those that can."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from engines import EngineError, Portable, Target, engine
from engines.exported.archive import load_program
from engines.onnx.program import return_columns
from engines.tensorrt import input_ranges
from tests.models.building import Built
from tests.models.mlps import CLASSES, FEATURES

INSTALLED = importlib.util.find_spec("torch_tensorrt") is not None


def test_a_cpu_target_is_refused(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="builds for CUDA targets; found cpu/x86-64-v3"):
        engine("tensorrt").compile(
            Portable(mlp.capture.program, None), Target("cpu", "x86-64-v3"), {}, tmp_path
        )


without_library = pytest.mark.skipif(INSTALLED, reason="torch-tensorrt is installed")
EXTRA = r"pip install 'soa-pipeline\[cuda\]'"


@without_library
def test_compile_without_the_library_names_the_extra(mlp: Built, tmp_path: Path) -> None:
    source = Portable(mlp.capture.program, None)
    with pytest.raises(EngineError, match=EXTRA):
        engine("tensorrt").compile(source, Target("cuda", "sm_90"), {}, tmp_path)


@without_library
def test_open_without_the_library_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"torch_tensorrt cannot be imported.*{EXTRA}"):
        engine("tensorrt").open(tmp_path / "tensorrt.pt2", torch.device("cuda:0"))


def test_it_is_built_for_the_rows_of_the_signature_and_their_padding(mlp: Built) -> None:
    rewritten = return_columns(load_program(mlp.capture.program))
    carrier, matrix = input_ranges(rewritten)
    assert (carrier["min_shape"], carrier["max_shape"]) == ((0, 0), (5000, 0))
    assert (matrix["min_shape"][0], matrix["max_shape"][0]) == (6, 6)
    assert matrix["max_shape"][1] > 5000  # room for every padded length of 5000 rows


@pytest.mark.cuda
@pytest.mark.skipif(not INSTALLED, reason="torch-tensorrt is not installed")
def test_its_answers_on_a_gpu_are_those_of_the_model(mlp: Built, tmp_path: Path) -> None:
    from engines.target import gpu_target
    from runtime.session.session import Session

    device = torch.device("cuda:0")
    tensorrt = engine("tensorrt")
    files = tensorrt.compile(Portable(mlp.capture.program, None), gpu_target(0), {}, tmp_path)
    session = Session(mlp.signature, tensorrt.open(tmp_path / files[0], device), device)
    inputs, written = mlp.collections({"n": 33})
    on_gpu = {name: collection.to(device) for name, collection in written.items()}
    session.run({name: collection.to(device) for name, collection in inputs.items()}, on_gpu)
    rows = torch.stack([inputs["jets"].tensor(name) for name in FEATURES], dim=1)
    answers = torch.stack([on_gpu["tags"].tensor(name) for name in CLASSES], dim=1)
    torch.testing.assert_close(answers.cpu(), mlp.model(rows), atol=1e-4, rtol=1e-3)
