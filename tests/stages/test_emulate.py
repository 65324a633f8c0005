"""Artifacts for what this host lacks: run on an emulator against the reference."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engines import EngineError, Target
from engines.lanes import compilers
from pipeline.building.cache import StageCache
from pipeline.building.candidates import Recipe, Work, build_targets
from runtime.checked import default_tolerance
from stages import emulate
from stages.capture import Capture, capture
from stages.emulate import emulate_candidate
from stages.package import TargetResult
from stages.reference.answers import random_inputs
from stages.validate import ValidationReport
from tests.models.building import mlp_signature
from tests.models.shared import made_once

ARM, V3 = "cpu/armv8.2-a", "cpu/x86-64-v3"
HAVE_ARM = shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")

Arm = tuple[Capture, dict[str, TargetResult]]

needs_arm = pytest.mark.skipif(
    not HAVE_ARM or platform.machine() != "x86_64",
    reason="needs g++-aarch64-linux-gnu and qemu-user, on another processor",
)


class Functions(nn.Module):
    """A product, sums, functions in single and double precision, an order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.last = nn.Linear(6, 19), nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + torch.erf(x.sum(1, keepdim=True))
        found = torch.softmax(self.last(hidden), -1)
        return found + torch.sin(x[:, :3]) * 1e-3 + x.sort(1).values[:, :3].exp() * 1e-3


def captured(folder: Path) -> Capture:
    folder.mkdir(exist_ok=True)
    signature = mlp_signature(highest=40, lowest=0)
    inputs = random_inputs(signature, 1, {})
    return capture(Functions().eval(), signature, inputs, folder, "none")


def built(made: Capture, folder: Path, targets: Sequence[str]) -> dict[str, TargetResult]:
    tolerances = {b.name: default_tolerance("float32") for b in made.signature.outputs}
    recipe = Recipe(("lanes",), {}, 300.0, tolerances, frozenset(), None, 0.1)
    work = Work(StageCache(folder / "cache"), lambda text: None)
    return build_targets(work, made, [Target.parse(t) for t in targets], recipe, folder.name)


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`prove` takes ten seconds to compile: once a run."""
    where = made_once(tmp_path_factory, "emulators", lambda folder: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: where)
        yield


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    folder = tmp_path_factory.mktemp("arm")
    made = captured(folder / "captured")
    return made, built(made, folder, [V3, ARM])


@needs_arm
def test_arm_gives_the_bits_of_x86(arm: Arm) -> None:
    _, results = arm
    here, there = (results[target].reports["lanes"] for target in (V3, ARM))
    assert here.valid and there.verdict == "emulated"
    assert here.bits is not None and there.bits == here.bits
    assert results[ARM].status == "emulated" and results[ARM].chosen == "lanes"
    (deviation,) = there.worst.values()
    assert deviation.elements > 100 and deviation.outside == 0 and 0 < deviation.max_abs < 1e-5


def again(arm: Arm, folder: Path, reference: Path | None = None) -> ValidationReport:
    """The artifact for ARM once more, on its own reference or another one."""
    made, results = arm
    compiled = results[ARM].compiled["lanes"]
    tolerances = {b.name: default_tolerance("float32") for b in made.signature.outputs}
    return emulate_candidate(
        "lanes", compiled.folder / compiled.files[0], made.signature, reference or made.reference,
        tolerances, folder, 300, Target.parse(ARM),
    )  # fmt: skip


@needs_arm
def test_other_answers_are_refused(arm: Arm, tmp_path: Path) -> None:
    with safe_open(arm[0].reference, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    for name in tensors:
        if name.startswith("output/"):
            tensors[name] = tensors[name] * 1.001
    save_file(tensors, tmp_path / "reference.safetensors", metadata)
    report = again(arm, tmp_path, tmp_path / "reference.safetensors")
    assert report.verdict == "refused" and "outside" in str(report.reason)


@needs_arm
def test_an_artifact_that_ends_its_process_failed(
    arm: Arm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dies = emulate.Emulator("on a test's", "aarch64", ("/bin/sh", "-c", "kill -s SEGV $$"))
    monkeypatch.setattr(emulate, "emulator_of", lambda target: dies)
    report = again(arm, tmp_path)
    assert report.verdict == "failed" and "SIGSEGV" in str(report.reason)


@needs_arm
def test_without_qemu_it_compiles(
    arm: Arm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    report = again(arm, tmp_path)
    assert report.verdict == "compiles" and "apt-get install qemu-user" in str(report.reason)
    waiting = replace(arm[1][ARM], reports={"lanes": report})
    assert waiting.status == "compiles" and waiting.chosen == "lanes"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(EngineError, match=r"apt-get install g\+\+-") as said:
        compilers.compiler(other)
    assert "pip install ziglang" in str(said.value) and "\n" not in str(said.value)
