"""Lower precision, chosen by name: the errors are measured against the unchanged model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.base import engine
from engines.errors import TargetError
from engines.target import Target
from pipeline.config import load_config
from pipeline.config.assemble import tolerances_of
from pipeline.errors import ConfigError
from runtime import process
from runtime.checked import Tolerance, default_tolerance
from runtime.errors import LoadError
from runtime.session.session import Session
from stages.capture import Capture, capture
from stages.compile import compile_here
from stages.judging.validate import validate_session
from stages.model.precision import Precision, check_precision, in_precision, tf32_switches
from stages.reference.answers import Reference, random_inputs
from stages.reports import ValidationReport
from tests.models import mlps
from tests.models.building import mlp_signature
from tests.models.project import CONFIG, TARGETS, write_project


def captured(model: nn.Module, precision: Precision, folder: Path) -> Capture:
    """The capture of a model in a lower precision."""
    signature = mlp_signature()
    inputs = random_inputs(signature, 1, {})
    return capture(model.eval(), signature, inputs, folder, precision=precision)


def judged(model: Capture, engine_name: str, tolerance: Tolerance) -> ValidationReport:
    """The report on a portable artifact, which is a file of the capture."""
    file = model.program if engine_name == "exported" else model.script
    assert file is not None
    session = Session(model.signature, engine(engine_name).open(file, torch.device("cpu")))
    reference = Reference.load(model.reference)
    return validate_session(session, engine_name, reference, {"probabilities": tolerance})


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_within_its_own_tolerance_and_not_within_float32s(
    precision: Precision, dtype: str, tmp_path: Path
) -> None:
    model = captured(mlps.PointwiseFirst(), precision, tmp_path)
    assert Capture.load(tmp_path).precision == precision
    assert model.torchscript == "scripted"
    for name in ("exported", "torchscript"):
        assert judged(model, name, default_tolerance(dtype)).reason is None
        report = judged(model, name, default_tolerance("float32"))
        assert not report.valid  # so it did compute in lower precision
        assert report.worst["probabilities"].max_abs > 1e-5


class Grows(nn.Module):
    """One row's square is above 65,504, the largest number of float16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :3] * 300) ** 2 / 90_000


def test_an_overflow_is_refused_with_its_output_and_row(tmp_path: Path) -> None:
    model = captured(Grows(), "fp16", tmp_path)
    report = judged(model, "exported", Tolerance(1.0, 1.0))
    assert report.reason is not None
    assert "output 'probabilities' at n=" in report.reason
    assert "NaN or Inf where the reference has none" in report.reason


@pytest.mark.parametrize("target", ["cpu/x86-64-v3", "rocm/gfx90a", "cuda/sm_75"])
def test_a_target_without_tf32_refuses_it_and_takes_bf16(target: str) -> None:
    check_precision("bf16", Target.parse(target))  # not refused
    with pytest.raises(TargetError, match=f"precision tf32: {target} has no TF32"):
        check_precision("tf32", Target.parse(target))


def test_newer_cuda_gpus_take_tf32() -> None:
    check_precision("tf32", Target.parse("cuda/sm_90a"))  # not refused


def test_a_compiler_does_not_begin_for_a_precision_that_the_target_lacks(tmp_path: Path) -> None:
    """The program, which does not exist, is not opened."""
    with pytest.raises(TargetError, match="use fp32 there"):
        compile_here("exported", "absent", None, "cpu/x86-64-v3", {}, str(tmp_path), "tf32")


def test_tf32_keeps_the_model() -> None:
    model = mlps.PointwiseFirst()
    assert in_precision(model, "tf32") is model


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("fp32", False)])
def test_torchs_switches_are_set_and_put_back(precision: Precision, allowed: bool) -> None:
    backends = torch.backends
    before = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    with tf32_switches(precision):
        assert backends.cudnn.allow_tf32 is backends.cuda.matmul.allow_tf32 is allowed
    assert (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32) == before


@pytest.mark.parametrize(
    ("precision", "target", "dtype"),
    [(None, "cpu", "float32"), ("bf16", "cpu", "bfloat16"), ("tf32", "cuda/sm_90", "float16")],
)
def test_a_config_names_the_precision_and_its_tolerance_follows(
    precision: str | None, target: str, dtype: str, tmp_path: Path
) -> None:
    line = f"precision: {precision}\n" if precision else ""
    text = CONFIG.replace(TARGETS, f"targets: [{target}]") + line
    config = load_config(write_project(tmp_path, config=text).config)
    assert config.precision == (precision or "fp32")
    tolerances = tolerances_of(config, config.signature())
    assert tolerances["probabilities"] == default_tolerance(dtype)


def test_a_config_with_tf32_for_a_cpu_is_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path, config=CONFIG + "precision: tf32\n")
    with pytest.raises(ConfigError, match=r"targets\[0\].*with precision: tf32; only CUDA GPUs"):
        load_config(project.config)


def test_a_process_has_one_setting_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model decides; another one with the same setting is taken, others are refused."""
    monkeypatch.setattr(process, "_tf32", [])
    with tf32_switches("fp32"):  # restores the switches afterwards
        process.settle_tf32(True, "jets")
        assert torch.backends.cuda.matmul.allow_tf32
        process.settle_tf32(True, "tags")
        with pytest.raises(LoadError, match="tracks computes in float32, and this process has"):
            process.settle_tf32(False, "tracks")
        assert torch.backends.cuda.matmul.allow_tf32


def test_fp32_keeps_the_model() -> None:
    model = mlps.PointwiseFirst()
    assert in_precision(model, "fp32") is model


def test_a_lower_precision_is_of_a_copy_of_the_model() -> None:
    model = mlps.PointwiseFirst()
    reduced = in_precision(model, "bf16")
    assert {p.dtype for p in reduced.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
