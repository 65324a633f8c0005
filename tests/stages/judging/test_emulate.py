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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

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


@dataclass(frozen=True)
class Compilations:
    """A model, and its artifacts of `lanes` by target."""

    model: Capture
    results: dict[str, TargetResult]

    def result(self, target: str) -> TargetResult:
        """The test is skipped where this host has no compiler for the target."""
        if target not in self.results:
            pytest.skip(f"no compiler for {target} is here")
        return self.results[target]

    def artifact(self, target: str) -> Compiled:
        return self.result(target).candidates["lanes"].compiled


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
        scores = torch.softmax(self.last(hidden), -1)
        return scores + torch.sin(x[:, :3]) * 1e-3 + x.sort(1).values[:, :3].exp() * 1e-3


class Attention(nn.Module):
    """Every kind of step on 32 x 24 numbers: too many intermediate values for one GPU thread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first, self.last = nn.Linear(6, 32 * 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).unflatten(1, (32, 24))
        weights = torch.softmax(hidden @ hidden.transpose(1, 2), -1)
        mixed = torch.cumsum(weights @ hidden, 1)
        best = mixed.topk(5, 1)
        added = torch.zeros_like(mixed).scatter_add(1, best.indices, best.values)
        scores: Tensor = self.last((added + mixed.sort(2).values).mean(1))
        return scores


def captured(folder: Path, model: type[nn.Module] = Functions) -> Capture:
    """The capture of a model for at most 40 rows."""
    folder.mkdir(exist_ok=True)
    signature = mlp_signature(highest=40, lowest=0)
    inputs = random_inputs(signature, 1, {})
    return capture(model().eval(), signature, inputs, folder, "none")


def built(model: Capture, folder: Path, targets: Sequence[str]) -> dict[str, TargetResult]:
    """The artifacts of `lanes` by target, as a run builds and judges them."""
    tolerances = tolerances_of(model.signature)
    recipe = Recipe(("lanes",), {}, 300.0, tolerances, frozenset(), None, 0.1)
    return build_targets(Work(folder / "cache"), model, [*map(Target.parse, targets)], recipe)


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Emulators are compiled once for all tests."""
    where = emulators(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: where)
        yield


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Compilations:
    """Artifacts for every target for which this host has a compiler."""
    folder = tmp_path_factory.mktemp("targets")
    model = captured(folder / "captured")
    have = {ARM: bool(HAVE_ARM), CUDA: works(devices.load_nvrtc), ROCM: works(devices.find_clang)}
    targets = [V3, *(target for target, yes in have.items() if yes)]
    return Compilations(model, built(model, folder, targets))


def works(compiler: Callable[[], object]) -> bool:
    """Whether a compiler is on this host."""
    try:
        compiler()
    except EngineError:
        return False
    return True


@pytest.mark.parametrize("target", [ARM, CUDA, ROCM])
def test_an_emulated_artifact_is_chosen_and_has_deviations(
    compilations: Compilations, target: str
) -> None:
    result = compilations.result(target)
    assert result.status == "emulated" and result.chosen == "lanes"
    report = result.candidates["lanes"].report
    assert report.verdict == "emulated", report.reason
    (deviation,) = report.worst.values()
    assert deviation.elements > 100 and deviation.outside == 0 and 0 < deviation.max_abs < 1e-5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the bits of x86-64")
@pytest.mark.parametrize("target", [ARM, CUDA, ROCM])
def test_other_devices_give_the_bits_of_x86(compilations: Compilations, target: str) -> None:
    x86, other = (compilations.result(t).candidates["lanes"].report.bits for t in (V3, target))
    assert x86 is not None and other == x86


@pytest.mark.parametrize("target", [CUDA, ROCM])
def test_the_facts_of_a_kernel_are_those_of_its_compiler(
    compilations: Compilations, target: str
) -> None:
    compiled = compilations.artifact(target)
    assert {"network.kernel", "network.image", "network.cu"} <= set(compiled.files)
    assert compiled.facts["store"] == "registers" and 0 < compiled.facts["registers"] <= 512
    assert compiled.facts["spilled_bytes"] == 0
    assert 0.2 < compiled.facts["occupancy"] <= 1
    machine = (compiled.folder / "network.image").read_bytes()[18:20]
    assert machine == {CUDA: b"\xbe\x00", ROCM: b"\xe0\x00"}[target]  # machine numbers in ELF


@pytest.mark.parametrize("target", [CUDA, pytest.param(ROCM, marks=pytest.mark.long)])
def test_a_block_of_threads_shares_a_large_row(target: str, tmp_path: Path) -> None:
    if not works({CUDA: devices.load_nvrtc, ROCM: devices.find_clang}[target]):
        pytest.skip(f"no compiler for {target} is here")
    results = built(captured(tmp_path / "captured", Attention), tmp_path, [V3, target])
    facts = results[target].candidates["lanes"].compiled.facts
    assert facts["store"] == "shared" and facts["local_bytes"] < 1000 and facts["occupancy"] > 0.05
    assert 8000 < facts["shared_bytes"] <= 48 << 10
    here, emulated = (results[name].candidates["lanes"].report for name in (V3, target))
    assert here.valid and emulated.verdict == "emulated", emulated.reason
    assert emulated.bits == here.bits is not None


class Large(nn.Module):
    """Attention of 150 numbers of a row to each other: 22,500 intermediate values."""

    def forward(self, x: Tensor) -> Tensor:
        values = torch.tanh(x.repeat(1, 25))
        weights = torch.softmax(values.unsqueeze(2) * values.unsqueeze(1), -1)
        return (weights @ values.unsqueeze(2)).squeeze(2)[:, :3]


@pytest.mark.parametrize("target", [CUDA, ROCM])
def test_a_row_that_needs_too_much_memory_is_refused(target: str, tmp_path: Path) -> None:
    portable = Portable(captured(tmp_path / "captured", Large).program, None)
    with pytest.raises(NotApplicableError, match="bytes of local memory"):
        engine("lanes").compile(portable, Target.parse(target), {}, tmp_path)


@pytest.fixture(scope="module")
def driver(
    compilations: Compilations, tmp_path_factory: pytest.TempPathFactory
) -> emulate.Emulator:
    """The CUDA driver that is emulated on the CPU, with the CUDA kernel."""
    folder = compilations.artifact(CUDA).folder
    return emulate.emulator_of(Target.parse(CUDA), folder, tmp_path_factory.mktemp("driver"))


def on_driver(
    compilations: Compilations, driver: emulate.Emulator, case: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a case of tests/engines/native/on_driver.py."""
    kernel = compilations.artifact(CUDA).folder / "network.kernel"
    return subprocess.run(
        [sys.executable, ON_DRIVER, kernel, case],
        capture_output=True, text=True,
        env={**os.environ, **driver.environment, "PYTHONPATH": str(ON_DRIVER.parents[3]),
             "SOA_EMULATED_DEVICES": "2", **settings},
    )  # fmt: skip


def test_the_example_in_cpp_gives_on_a_gpu_what_it_gives_here(
    compilations: Compilations,
    driver: emulate.Emulator,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("needs an artifact for this processor")
    signature = compilations.model.signature
    on_cpu, on_gpu = compilations.artifact(V3), compilations.artifact(CUDA)
    (on_gpu.folder / "arguments.txt").write_text(describe(signature, None))
    prefix, program = installed(tmp_path_factory), tmp_path / "on_gpu"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    command += [str(ROOT / "examples" / "cpp" / "on_gpu.cpp"), f"-I{prefix}/include"]
    command += [f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lsoa_model"]
    command += [f"-L{driver.environment['LD_LIBRARY_PATH']}", "-l:libcuda.so.1"]
    subprocess.run(command, check=True)
    process = subprocess.run(
        [program, on_gpu.folder, "33", "jets", "tags"], capture_output=True, text=True,
        env={**os.environ, **driver.environment},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    executable = engine("lanes").open(on_cpu.folder / on_cpu.files[0], torch.device("cpu"))
    assert process.stdout.splitlines() == computed(Session(signature, executable), 33)


def answer_of(
    compilations: Compilations, driver: emulate.Emulator, case: str, **settings: str
) -> dict[str, Any]:
    """The JSON that a case prints: `found`, or `refused` with the error."""
    process = on_driver(compilations, driver, case, **settings)
    assert process.returncode == 0, process.stderr
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


ResultOf = Callable[[str], Any]


@pytest.fixture
def result_of(compilations: Compilations, driver: emulate.Emulator) -> ResultOf:
    """What a case on the emulated driver found."""
    return lambda case: answer_of(compilations, driver, case)["found"]


def test_a_kernel_writes_its_rows_and_no_other_memory(result_of: ResultOf) -> None:
    answers = torch.tensor(result_of("answers"))
    assert answers[:, :131].isfinite().all() and (answers[:, 131:] == -7).all()
    assert (torch.tensor(result_of("no rows")) == -7).all()


def test_a_kernel_runs_on_several_streams_and_devices(result_of: ResultOf) -> None:
    assert result_of("several streams") == [True] * 4
    assert result_of("on the other device") is True


@pytest.mark.parametrize("mistake", ["another pitch", "no order"])
def test_the_emulated_driver_shows_mistakes_of_the_caller(
    result_of: ResultOf, mistake: str
) -> None:
    """A wrong pitch, or a copy on a stream without synchronisation, gives other answers."""
    assert not torch.equal(torch.tensor(result_of(mistake)), torch.tensor(result_of("answers")))


def test_memory_beyond_the_end_ends_the_process(
    compilations: Compilations, driver: emulate.Emulator
) -> None:
    process = on_driver(compilations, driver, "beyond the end")
    assert -process.returncode in (signal.SIGSEGV, signal.SIGBUS)


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
    compilations: Compilations,
    driver: emulate.Emulator,
    case: str,
    settings: dict[str, str],
    says: str,
) -> None:
    refusal = answer_of(compilations, driver, case, **settings)["refused"]
    assert says in refusal and "\n" not in refusal


def test_without_a_driver_its_library_is_named(compilations: Compilations) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a host without a GPU")
    kernel = compilations.artifact(CUDA).folder / "network.kernel"
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
    compilations: Compilations, tmp_path: Path, right: str, wrong: str, code: str
) -> None:
    """The fault is put into the generated source."""
    folder = tmp_path / "artifact"
    shutil.copytree(compilations.artifact(CUDA).folder, folder)
    text = (folder / "network.cu").read_text()
    planted = re.sub(right, wrong, text)
    assert planted != text
    (folder / "network.cu").write_text(planted)
    report = emulated_again(compilations, tmp_path, target=CUDA, folder=folder)
    assert (report.verdict, report.code) == ("refused", code), report.reason
    assert "[" not in str(report.reason)


def test_a_kernel_that_cannot_be_opened_failed(
    compilations: Compilations, driver: emulate.Emulator, tmp_path: Path
) -> None:
    fault = {**driver.environment, "SOA_EMULATED_FAULT": "cuModuleLoadData 222"}
    report = emulated_again(
        compilations, tmp_path, target=CUDA, emulator=replace(driver, environment=fault)
    )
    assert (report.verdict, report.code) == ("failed", "candidate-failed"), report.reason


@pytest.mark.parametrize(
    ("target", "compiler", "known"), [("cuda/sm_33", CUDA, "sm_90"), ("rocm/gfx1", ROCM, "gfx1")]
)
def test_an_architecture_that_nobody_knows_is_refused(
    compilations: Compilations, tmp_path: Path, target: str, compiler: str, known: str
) -> None:
    compilations.result(compiler)  # skips where it is not here
    portable = Portable(compilations.model.program, None)
    with pytest.raises(EngineError, match=known) as refused:
        engine("lanes").compile(portable, Target.parse(target), {}, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_missing_clang_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="apt-get install clang-19 lld-19"):
        devices.find_clang()


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> NoReturn:
        raise OSError("it is not here")

    monkeypatch.setattr("ctypes.CDLL", no_library)
    with pytest.raises(EngineError, match="pip install nvidia-cuda-nvrtc"):
        devices.load_nvrtc()


def emulated_again(
    compilations: Compilations, scratch: Path, reference: Path | None = None, target: str = ARM,
    folder: Path | None = None, emulator: emulate.Emulator | None = None,
) -> ValidationReport:  # fmt: skip
    """The report on an artifact, or on the files in `folder`, on its own reference or another."""
    model, compiled = compilations.model, compilations.artifact(target)
    tolerances = tolerances_of(model.signature)
    file = (folder or compiled.folder) / compiled.files[0]
    trial = Trial("lanes", file, model.signature, reference or model.reference, tolerances)
    return emulate_candidate(trial, scratch, 300, Target.parse(target), emulator=emulator)


@needs_arm
def test_an_artifact_with_other_answers_than_the_reference_is_refused(
    compilations: Compilations, tmp_path: Path
) -> None:
    with safe_open(compilations.model.reference, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    for name in tensors:
        if name.startswith("output/"):
            tensors[name] = tensors[name] * 1.001
    save_file(tensors, tmp_path / "reference.safetensors", metadata)
    report = emulated_again(compilations, tmp_path, tmp_path / "reference.safetensors")
    assert (report.verdict, report.code) == ("refused", "candidate-deviates"), report.reason


@needs_arm
def test_an_artifact_that_ends_its_process_failed(
    compilations: Compilations, tmp_path: Path
) -> None:
    dies = emulate.Emulator("on a test's", "aarch64", ("/bin/sh", "-c", "kill -s SEGV $$"))
    report = emulated_again(compilations, tmp_path, emulator=dies)
    assert report.verdict == "failed" and "SIGSEGV" in str(report.reason)
    assert not report.ended_early


@needs_arm
@pytest.mark.parametrize("script", ["kill -s KILL $$", "echo std::bad_alloc >&2; exit 1"])
def test_an_emulator_without_enough_memory_gives_no_verdict(
    compilations: Compilations, script: str, tmp_path: Path
) -> None:
    killed = emulate.Emulator("on a test's", "aarch64", ("/bin/sh", "-c", script))
    report = emulated_again(compilations, tmp_path, emulator=killed)
    assert report.verdict == "failed" and report.ended_early, report.reason


@needs_arm
def test_without_qemu_an_artifact_compiles_and_waits_for_its_validation(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    report = emulated_again(compilations, tmp_path)
    assert report.verdict == "compiles" and "apt-get install qemu-user" in str(report.reason)
    result = compilations.result(ARM)
    candidate = replace(result.candidates["lanes"], report=report)
    waiting = replace(result, candidates={"lanes": candidate})
    assert waiting.status == "compiles" and waiting.chosen == "lanes"


@needs_arm
def test_qemu_that_was_installed_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is not up to date if it was made without it."""
    with_qemu = emulate.how_cpu_target_runs(Target.parse(ARM))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert emulate.how_cpu_target_runs(Target.parse(ARM)) != with_qemu


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(EngineError, match=r"apt-get install g\+\+-") as caught:
        compilers.compiler(other)
    assert "pip install ziglang" in str(caught.value) and "\n" not in str(caught.value)
