"""Artifacts that need no torch give the same answers in a process without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from engines import DEFAULT_ENGINES, EngineError, Portable, Target, engine, host_cpu_levels
from engines.errors import RunError
from engines.native import NativeExecutable
from runtime.checked import Tolerance
from stages.capture import capture
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs
from tests.engines.native import sanitize
from tests.models import building, mlps
from tests.models.building import Built
from tests.models.shared import made_once

NAME = "aoti-standalone"
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    "x86-64-v3" not in host_cpu_levels(), reason=f"{NAME} is for x86-64-v3"
)


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The small model, built for this engine."""
    signature = building.mlp_signature(5000, (1000, 4099))

    def make(folder: Path) -> None:
        (folder / "made").mkdir()
        model = mlps.PointwiseFirst()
        # Compiling headers first takes longer than one library without that.
        with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
            built = building.build(model, signature, folder / "made", (NAME,))
        building.save(built, folder / "files.json")

    folder = made_once(tmp_path_factory, "standalone", make)
    artifacts, note = folder / "made", folder / "files.json"
    return building.opened(mlps.PointwiseFirst(), signature, artifacts, note)


def alone(library: Path, n: int, *words: str, **environment: str) -> dict[str, Any]:
    """What without_torch.py says of the artifact's answers to n rows, in a process of its own."""
    done = subprocess.run(
        [sys.executable, HERE / "without_torch.py", library, str(n), *words],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_it_is_valid_at_every_size(standalone: Built) -> None:
    report = validate_session(
        standalone.session(NAME),
        NAME,
        Reference.load(standalone.capture.reference),
        {"probabilities": Tolerance(1e-5, 1e-4)},
    )
    assert report.reason is None


@pytest.fixture(scope="module")
def bare(standalone: Built) -> dict[str, Any]:
    """The answer for 4,099 rows of a process without torch."""
    return alone(standalone.files[NAME], 4099)


def test_it_runs_in_a_process_without_torch(bare: dict[str, Any]) -> None:
    assert not bare["torch"]
    assert bare["total"] == pytest.approx(4099, rel=1e-5)  # the probabilities of a row sum to 1


def test_torchs_own_functions_change_no_bit(standalone: Built, bare: dict[str, Any]) -> None:
    """They have the names of the shim's."""
    assert alone(standalone.files[NAME], 4099, "global") == {**bare, "torch": True}


def test_an_older_processor_changes_no_bit(standalone: Built, bare: dict[str, Any]) -> None:
    """The C library has other functions for it, which the artifact must not use."""
    older = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA"}
    assert alone(standalone.files[NAME], 4099, **older) == bare


@pytest.mark.long  # it compiles for another level
def test_levels_give_the_same_bits(standalone: Built, tmp_path: Path) -> None:
    source = Portable(standalone.capture.program, None)
    files = engine(NAME).compile(source, Target.parse("cpu/x86-64-v3"), {}, tmp_path)
    assert alone(tmp_path / files[0], 1000) == alone(standalone.files[NAME], 1000)


class Foreign(nn.Module):
    """Needs a function and two operators that only torch has."""

    def forward(self, x: Tensor) -> Tensor:
        logarithms = torch.lgamma(x[:, :3].abs() + 1)  # line: a function
        sums = torch.cumsum(logarithms, 1)  # line: an operator
        inverse = torch.linalg.inv(x[:, :4].reshape(-1, 2, 2))  # line: by the dispatcher
        answer: Tensor = sums + inverse[:, :1, 0]
        return answer


@pytest.mark.long  # it compiles another model, which is refused
def test_a_refusal_names_what_needs_torch_with_its_line(tmp_path: Path) -> None:
    signature = building.mlp_signature()
    inputs = random_inputs(signature, 1, {})
    captured = capture(Foreign().eval(), signature, inputs, tmp_path, "none")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(EngineError, match="without torch: ") as refused:
        engine(NAME).compile(Portable(captured.program, None), Target.parse("cpu"), {}, out)
    lines = Path(__file__).read_text().splitlines()
    for name, mark in (
        ("Sleef_lgammaf8_u10", "a function"),
        ("aoti_torch_cpu_cumsum", "an operator"),
        ("aten.linalg_inv_ex.default", "by the dispatcher"),
    ):
        (line,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# line: {mark}")]
        assert re.search(rf"{name} \([^)]*{__file__}:{line}\b", str(refused.value))
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("target", ["cpu/x86-64-v2", "cuda/sm_90"])
def test_other_targets_are_refused(standalone: Built, tmp_path: Path, target: str) -> None:
    source = Portable(standalone.capture.program, None)
    with pytest.raises(EngineError, match="builds for cpu/x86-64-v3"):
        engine(NAME).compile(source, Target.parse(target), {}, tmp_path)


def test_an_older_shim_is_refused(standalone: Built, tmp_path: Path) -> None:
    library = standalone.files[NAME]
    shutil.copytree(library.parent, tmp_path / "copy")
    note = tmp_path / "copy" / "target.txt"
    note.write_text(note.read_text().replace("soa-shim 1", "soa-shim 99"))
    with pytest.raises(RunError, match="version 99"):
        NativeExecutable(tmp_path / "copy" / library.name, "cpu")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that calls the runner from many threads, with a shim beside it."""
    if sanitize.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return sanitize.build(tmp_path_factory.mktemp("stress"), None, torch_free=True)


@pytest.mark.long  # it compiles the runner and the shim
def test_each_of_many_threads_gets_right_answers(stress: Path, standalone: Built) -> None:
    done = sanitize.run(stress, standalone.files[NAME], 40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong" in done.stdout


@pytest.mark.long  # as above
def test_a_truncated_shim_is_an_error_and_no_crash(
    stress: Path, standalone: Built, tmp_path: Path
) -> None:
    folder = shutil.copytree(stress.parent, tmp_path / "copy")
    shim = folder / "libsoa_shim.so"
    shim.write_bytes(shim.read_bytes()[:50_000])
    done = sanitize.run(folder / stress.name, standalone.files[NAME], 1)
    assert done.returncode == 1  # not a signal
    assert "libsoa_shim.so: not a whole 64-bit ELF library" in done.stdout + done.stderr


def test_it_is_a_default_engine() -> None:
    assert NAME in DEFAULT_ENGINES
