"""The C++ examples: built with CMake, run without Python, equal to Python bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pipeline
from engines.target import Target
from tests.models.project import Built

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    build = tmp_path_factory.mktemp("cpp")
    source = str(ROOT / "examples" / "cpp")
    configure = ["cmake", "-S", source, "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build


def artifact(jets: Built) -> Path:
    return jets.bundle.path / "targets" / str(Target.parse("cpu")) / "aoti"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
def test_cpp_prints_the_bits_that_python_computes(programs: Path, jets: Built, n: int) -> None:
    done = run(programs / "run_bundle", artifact(jets), n, "jets", "tags")
    assert done.returncode == 0, done.stderr
    session = pipeline.load(jets.bundle.path, mode="test", engine_name="aoti")
    inputs, outputs = session.collection("jets", n), session.collection("tags", n)
    rows = np.arange(n)
    for j, column in enumerate(inputs.layout.columns):
        pattern = ((7 * rows + 13 * j) % 101).astype(np.float32) / np.float32(101) + np.float32(1)
        inputs.numpy(column.name)[...] = pattern
    session.run(inputs, outputs)
    expected = [
        f"{column.name} {i} {bits:08x}"
        for column in outputs.layout.columns
        for i, bits in enumerate(outputs.numpy(column.name).view(np.uint32))
    ]
    assert done.stdout.splitlines() == expected


def test_cpp_refuses_what_does_not_fit(programs: Path, jets: Built, tmp_path: Path) -> None:
    program = programs / "run_bundle"
    above = run(program, artifact(jets), 1001, "jets", "tags")
    assert above.returncode == 1
    assert "n = 1001 is outside the compiled range 0 ... 1000" in above.stderr
    nowhere = run(program, tmp_path, 1, "jets", "tags")
    assert (nowhere.returncode, "arguments.txt" in nowhere.stderr) == (1, True)
    unknown = run(program, artifact(jets), 1, "jets", "labels")
    assert (unknown.returncode, "no collection 'labels'" in unknown.stderr) == (1, True)
    assert run(program).returncode == 2


def test_the_producer_wants_the_demos_columns(programs: Path, jets: Built) -> None:
    done = run(programs / "producer", artifact(jets), 20)
    assert done.returncode == 1
    assert "no column 'pt'" in done.stderr
