"""Artifacts for processors that this host lacks: emulated, and compared with the reference."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engines import EngineError, Portable, Target, engine
from engines.errors import NotApplicableError
from engines.lanes.compiling import compilers, devices
from pipeline.building.candidates import build_targets
from pipeline.building.steps import Recipe
from pipeline.building.work import Work
from runtime.session.session import Session
from soa.signature_lines import describe
from stages.capture import Capture, capture
from stages.compile import Compiled
from stages.judging import emulate
from stages.judging.emulate import emulate_candidate
from stages.judging.validate import Trial
from stages.package import TargetResult
from stages.reference.answers import random_inputs
from stages.reports import ValidationReport
from tests.models.building import mlp_signature, tolerances_of
from tests.models.cplusplus import ROOT, computed, installed
from tests.models.emulators import emulators

ARM, V3, CUDA, ROCM = "cpu/armv8.2-a", "cpu/x86-64-v3", "cuda/sm_90", "rocm/gfx90a"
ON_DRIVER = Path(__file__).parents[2] / "engines" / "native" / "on_driver.py"
HAVE_ARM = shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")

Arm = tuple[Capture, dict[str, TargetResult]]

needs_arm = pytest.mark.skipif(
    not HAVE_ARM or platform.machine() != "x86_64",
    reason="needs g++-aarch64-linux-gnu and qemu-user, on another processor",
)


class Functions(nn.Module):
    """A product, sums, functions in single and double precision, and sorting."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.last = nn.Linear(6, 19), nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + torch.erf(x.sum(1, keepdim=True))
        found = torch.softmax(self.last(hidden), -1)
        return found + torch.sin(x[:, :3]) * 1e-3 + x.sort(1).values[:, :3].exp() * 1e-3


class Attention(nn.Module):
    """Every kind of step on 32 x 24 numbers: too many intermediate values for one GPU thread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first, self.last = nn.Linear(6, 32 * 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        given = torch.tanh(self.first(x)).unflatten(1, (32, 24))
        weights = torch.softmax(given @ given.transpose(1, 2), -1)
        mixed = torch.cumsum(weights @ given, 1)
        best = mixed.topk(5, 1)
        added = torch.zeros_like(mixed).scatter_add(1, best.indices, best.values)
        found: Tensor = self.last((added + mixed.sort(2).values).mean(1))
        return found


def captured(folder: Path, model: type[nn.Module] = Functions) -> Capture:
    folder.mkdir(exist_ok=True)
    signature = mlp_signature(highest=40, lowest=0)
    inputs = random_inputs(signature, 1, {})
    return capture(model().eval(), signature, inputs, folder, "none")


def built(made: Capture, folder: Path, targets: Sequence[str]) -> dict[str, TargetResult]:
    tolerances = tolerances_of(made.signature)
    recipe = Recipe(("lanes",), {}, 300.0, tolerances, frozenset(), None, 0.1)
    return build_targets(Work(folder / "cache"), made, [*map(Target.parse, targets)], recipe)


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    where = emulators(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: where)
        yield


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """Artifacts for every target for which this host has a compiler."""
    folder = tmp_path_factory.mktemp("arm")
    made = captured(folder / "captured")
    have = {ARM: bool(HAVE_ARM), CUDA: there(devices.nvrtc), ROCM: there(devices.clang)}
    return made, built(made, folder, [V3, *(target for target, yes in have.items() if yes)])


def artifact(arm: Arm, target: str) -> Compiled:
    """The artifact of `lanes` for a target for which this host has a compiler."""
    if target not in arm[1]:
        pytest.skip(f"no compiler for {target} is here")
    return arm[1][target].candidates["lanes"].compiled


def there(compiler: Callable[[], object]) -> bool:
    try:
        compiler()
    except EngineError:
        return False
    return True


@pytest.mark.parametrize("target", [ARM, CUDA, ROCM])
def test_an_emulated_artifact_is_chosen_and_has_deviations(arm: Arm, target: str) -> None:
    _, results = arm
    if target not in results:
        pytest.skip(f"no compiler for {target} is here")
    assert results[target].status == "emulated" and results[target].chosen == "lanes"
    report = results[target].candidates["lanes"].report
    assert report.verdict == "emulated", report.reason
    (deviation,) = report.worst.values()
    assert deviation.elements > 100 and deviation.outside == 0 and 0 < deviation.max_abs < 1e-5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the bits of x86-64")
@pytest.mark.parametrize("target", [ARM, CUDA, ROCM])
def test_other_devices_give_the_bits_of_x86(arm: Arm, target: str) -> None:
    _, results = arm
    if target not in results:
        pytest.skip(f"no compiler for {target} is here")
    x86, other = (results[each].candidates["lanes"].report.bits for each in (V3, target))
    assert x86 is not None and other == x86


@pytest.mark.parametrize("target", [CUDA, ROCM])
def test_the_compiler_s_word_on_a_kernel(arm: Arm, target: str) -> None:
    compiled = artifact(arm, target)
    assert {"network.kernel", "network.image", "network.cu"} <= set(compiled.files)
    assert compiled.facts["store"] == "registers" and 0 < compiled.facts["registers"] <= 512
    assert compiled.facts["spilled_bytes"] == 0
    assert 0.2 < compiled.facts["occupancy"] <= 1
    machine = (compiled.folder / "network.image").read_bytes()[18:20]
    assert machine == {CUDA: b"\xbe\x00", ROCM: b"\xe0\x00"}[target]  # machine numbers in ELF


@pytest.mark.parametrize("target", [CUDA, pytest.param(ROCM, marks=pytest.mark.long)])
def test_a_block_of_threads_shares_a_large_row(target: str, tmp_path: Path) -> None:
    if not there({CUDA: devices.nvrtc, ROCM: devices.clang}[target]):
        pytest.skip(f"no compiler for {target} is here")
    made = captured(tmp_path / "captured", Attention)
    results = built(made, tmp_path, [V3, target])
    facts = results[target].candidates["lanes"].compiled.facts
    assert facts["store"] == "shared" and facts["local_bytes"] < 1000 and facts["occupancy"] > 0.05
    assert 8000 < facts["shared_bytes"] <= 48 << 10
    here, emulated = (results[each].candidates["lanes"].report for each in (V3, target))
    assert here.valid and emulated.verdict == "emulated", emulated.reason
    assert emulated.bits == here.bits is not None


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        grown = torch.tanh(x.repeat(1, 25))
        seen = torch.softmax(grown.unsqueeze(2) * grown.unsqueeze(1), -1)
        return (seen @ grown.unsqueeze(2)).squeeze(2)[:, :3]


@pytest.mark.parametrize("target", [CUDA, ROCM])
def test_a_row_that_needs_too_much_memory_is_refused(target: str, tmp_path: Path) -> None:
    portable = Portable(captured(tmp_path / "captured", Large).program, None)
    with pytest.raises(NotApplicableError, match="bytes of local memory"):
        engine("lanes").compile(portable, Target.parse(target), {}, tmp_path)


@pytest.fixture(scope="module")
def driver(arm: Arm, tmp_path_factory: pytest.TempPathFactory) -> emulate.Emulator:
    """The CUDA driver that is emulated on the CPU, with the CUDA kernel."""
    folder = artifact(arm, CUDA).folder
    return emulate.emulator_of(Target.parse(CUDA), folder, tmp_path_factory.mktemp("driver"))


def on_driver(
    arm: Arm, driver: emulate.Emulator, case: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a case of tests/engines/native/on_driver.py."""
    kernel = artifact(arm, CUDA).folder / "network.kernel"
    return subprocess.run(
        [sys.executable, ON_DRIVER, kernel, case],
        capture_output=True, text=True,
        env={**os.environ, **driver.environment, "PYTHONPATH": str(ON_DRIVER.parents[3]),
             "SOA_EMULATED_DEVICES": "2", **settings},
    )  # fmt: skip


def test_the_example_in_cpp_gives_on_a_gpu_what_it_gives_here(
    arm: Arm, driver: emulate.Emulator, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("needs an artifact for this processor")
    made, _ = arm
    here, there = artifact(arm, V3), artifact(arm, CUDA)
    (there.folder / "arguments.txt").write_text(describe(made.signature, None))
    prefix, program = installed(tmp_path_factory), tmp_path / "on_gpu"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    command += [str(ROOT / "examples" / "cpp" / "on_gpu.cpp"), f"-I{prefix}/include"]
    command += [f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lsoa_model"]
    command += [f"-L{driver.environment['LD_LIBRARY_PATH']}", "-l:libcuda.so.1"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [program, there.folder, "33", "jets", "tags"], capture_output=True, text=True,
        env={**os.environ, **driver.environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    executable = engine("lanes").open(here.folder / here.files[0], torch.device("cpu"))
    assert done.stdout.splitlines() == computed(Session(made.signature, executable), 33)


def said(arm: Arm, driver: emulate.Emulator, case: str, **settings: str) -> dict[str, Any]:
    done = on_driver(arm, driver, case, **settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_work_on_streams(arm: Arm, driver: emulate.Emulator) -> None:
    def found(case: str) -> Any:
        return said(arm, driver, case)["found"]

    whole = torch.tensor(found("answers"))
    assert whole[:, :131].isfinite().all() and (whole[:, 131:] == -7).all()
    assert (torch.tensor(found("no rows")) == -7).all()
    assert found("several streams") == [True] * 4
    assert found("on the other device") is True
    # Errors of the caller show: a wrong pitch, or a copy on a stream without synchronisation.
    assert not torch.equal(torch.tensor(found("another pitch")), whole)
    assert not torch.equal(torch.tensor(found("no order")), whole)


def test_memory_beyond_the_end_ends_the_process(arm: Arm, driver: emulate.Emulator) -> None:
    done = on_driver(arm, driver, "beyond the end")
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS)


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        ("no such device", {}, "no GPU 7 here: the driver sees 2"),
        ("memory of another device", {}, "argument 1: its memory is of device 1"),
        ("memory of the host", {}, "argument 1: address 0x"),
        ("stream of another context", {}, "the stream is not one of device 0"),
        ("runs", {"SOA_EMULATED_ARCH": "80"}, "cuda/sm_90, and device 0 is of architecture 8.0"),
        ("opens", {"SOA_EMULATED_FAULT": "cuInit 100"}, "no device"),
        ("runs", {"SOA_EMULATED_FAULT": "cuLaunchKernel 719 2"}, "takes no more work"),
        ("opens", {"SOA_EMULATED_FAULT": "cuModuleLoadData 222"}, "the driver is too old"),
        ("opens", {"SOA_EMULATED_FAULT": "cuDevicePrimaryCtxRetain 2"}, "out of device memory"),
    ],
)
def test_mistakes_on_a_device_are_named(
    arm: Arm, driver: emulate.Emulator, case: str, settings: dict[str, str], says: str
) -> None:
    found = said(arm, driver, case, **settings)["refused"]
    assert says in found and "\n" not in found


def test_without_a_driver(arm: Arm) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a host without a GPU")
    kernel = artifact(arm, CUDA).folder / "network.kernel"
    with pytest.raises(EngineError, match="libcuda"):
        engine("lanes").open(kernel, torch.device("cuda"))


@pytest.mark.parametrize(
    ("right", "wrong", "code"),
    [
        ("row < given.rows", "row + 1 < given.rows", "candidate-deviates"),  # misses the last row
        (r"weights\[\] = \{0x\w+u", "weights[] = {0x3f000000u", "candidate-deviates"),
        (r"row < given.rows", "row < given.rows + 1", "candidate-elsewhere"),
    ],
)
def test_a_wrong_kernel_is_refused(
    arm: Arm, tmp_path: Path, right: str, wrong: str, code: str
) -> None:
    """The fault is put into the generated source."""
    folder = tmp_path / "artifact"
    shutil.copytree(artifact(arm, CUDA).folder, folder)
    text = (folder / "network.cu").read_text()
    planted = re.sub(right, wrong, text)
    assert planted != text
    (folder / "network.cu").write_text(planted)
    report = again(arm, tmp_path, target=CUDA, folder=folder)
    assert (report.verdict, report.code) == ("refused", code), report.reason
    assert "[" not in str(report.reason)


def test_what_cannot_be_opened_failed(arm: Arm, driver: emulate.Emulator, tmp_path: Path) -> None:
    fault = {**driver.environment, "SOA_EMULATED_FAULT": "cuModuleLoadData 222"}
    report = again(arm, tmp_path, target=CUDA, emulator=replace(driver, environment=fault))
    assert (report.verdict, report.code) == ("failed", "candidate-failed"), report.reason


def test_an_architecture_that_nobody_knows(arm: Arm, tmp_path: Path) -> None:
    for target, known in (("cuda/sm_33", "sm_90"), ("rocm/gfx1", "gfx1")):
        if {"cuda": CUDA, "rocm": ROCM}[target[:4]] in arm[1]:
            with pytest.raises(EngineError, match=known) as refused:
                portable = Portable(arm[0].program, None)
                engine("lanes").compile(portable, Target.parse(target), {}, tmp_path)
            assert "\n" not in str(refused.value)


def test_compilers_for_gpus_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="apt-get install clang-19 lld-19"):
        devices.clang()
    monkeypatch.setattr("ctypes.CDLL", lambda name: missing())
    with pytest.raises(EngineError, match="pip install nvidia-cuda-nvrtc"):
        devices.nvrtc()


def missing() -> None:
    raise OSError("it is not here")


def again(
    arm: Arm, scratch: Path, reference: Path | None = None, target: str = ARM,
    folder: Path | None = None, emulator: emulate.Emulator | None = None,
) -> ValidationReport:  # fmt: skip
    """Emulates an artifact again, on its own reference or another one."""
    made, _ = arm
    compiled = artifact(arm, target)
    tolerances = tolerances_of(made.signature)
    file = (folder or compiled.folder) / compiled.files[0]
    trial = Trial("lanes", file, made.signature, reference or made.reference, tolerances)
    return emulate_candidate(trial, scratch, 300, Target.parse(target), emulator=emulator)


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
    assert (report.verdict, report.code) == ("refused", "candidate-deviates"), report.reason


@needs_arm
def test_an_artifact_that_ends_its_process_failed(arm: Arm, tmp_path: Path) -> None:
    dies = emulate.Emulator("on a test's", "aarch64", ("/bin/sh", "-c", "kill -s SEGV $$"))
    report = again(arm, tmp_path, emulator=dies)
    assert report.verdict == "failed" and "SIGSEGV" in str(report.reason)
    assert not report.ended_early


@needs_arm
@pytest.mark.parametrize("script", ["kill -s KILL $$", "echo std::bad_alloc >&2; exit 1"])
def test_without_enough_memory_nothing_is_known(arm: Arm, script: str, tmp_path: Path) -> None:
    killed = emulate.Emulator("on a test's", "aarch64", ("/bin/sh", "-c", script))
    report = again(arm, tmp_path, emulator=killed)
    assert report.verdict == "failed" and report.ended_early, report.reason


@needs_arm
def test_without_qemu_it_compiles(
    arm: Arm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    report = again(arm, tmp_path)
    assert report.verdict == "compiles" and "apt-get install qemu-user" in str(report.reason)
    made = arm[1][ARM]
    candidate = replace(made.candidates["lanes"], report=report)
    waiting = replace(made, candidates={"lanes": candidate})
    assert waiting.status == "compiles" and waiting.chosen == "lanes"


@needs_arm
def test_qemu_that_was_installed_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is not up to date if it was made without it."""
    there = emulate.processor_here(Target.parse(ARM))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert emulate.processor_here(Target.parse(ARM)) != there


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(EngineError, match=r"apt-get install g\+\+-") as said:
        compilers.compiler(other)
    assert "pip install ziglang" in str(said.value) and "\n" not in str(said.value)
