"""Artifacts that need no torch give the same answers in a process without torch."""

from __future__ import annotations

import json
import os
import platform
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
    signature = building.mlp_signature(5000, (1000, 4099))

    def make(folder: Path) -> None:
        (folder / "made").mkdir()
        model = mlps.PointwiseFirst()
        # Compiling headers first takes longer than one library without that.
        with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
            built = building.build(model, signature, folder / "made", (NAME,))
        building.save(built, folder / "files.json")

    folder = made_once(tmp_path_factory, "standalone", make)
    made = folder / "made"
    return building.opened(mlps.PointwiseFirst(), signature, made, folder / "files.json")


def alone(library: Path, n: int, *words: str, **more: str) -> dict[str, Any]:
    """The artifact's answer in a process of its own, with NumPy and without torch."""
    done = subprocess.run(
        [sys.executable, HERE / "without_torch.py", library, str(n), *words],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_valid_at_every_size(standalone: Built) -> None:
    report = validate_session(
        standalone.session(NAME),
        NAME,
        Reference.load(standalone.capture.reference),
        {"probabilities": Tolerance(1e-5, 1e-4)},
    )
    assert report.reason is None


def test_a_process_without_torch_gives_the_same_bits(standalone: Built) -> None:
    library = standalone.files[NAME]
    bare = alone(library, 4099)
    assert not bare["torch"]
    assert bare["total"] == pytest.approx(4099, rel=1e-5)  # probabilities
    # The same bits if torch's functions are loaded too, and if the C library sees an older
    # processor.
    older = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA"}
    assert alone(library, 4099, "global") == {**bare, "torch": True}
    assert alone(library, 4099, **older) == bare


@pytest.mark.long  # it compiles for another level
def test_levels_give_the_same_bits(standalone: Built, tmp_path: Path) -> None:
    source = Portable(standalone.capture.program, None)
    made = engine(NAME).compile(source, Target.parse("cpu/x86-64-v3"), {}, tmp_path)
    assert alone(tmp_path / made[0], 1000) == alone(standalone.files[NAME], 1000)


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.lgamma(x[:, :3].abs() + 1)  # line: a function
        found = torch.cumsum(found, 1)  # line: an operator
        turned = torch.linalg.inv(x[:, :4].reshape(-1, 2, 2))  # line: by the dispatcher
        needs_torch: Tensor = found + turned[:, :1, 0]
        return needs_torch


@pytest.mark.long  # it compiles another model, which is refused
def test_what_needs_torch_is_named(tmp_path: Path) -> None:
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
        [line] = [i for i, text in enumerate(lines, 1) if text.endswith(f"# line: {mark}")]
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


def test_it_is_among_those_that_nobody_has_to_name() -> None:
    assert NAME in DEFAULT_ENGINES
    assert platform.machine() == "x86_64"
