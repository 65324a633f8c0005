"""An artifact for a CPU level holds no instruction above it, and runs right."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from engines import Portable, Target, engine
from engines.kinds import host_cpu_levels
from runtime.checked import default_tolerance
from runtime.checked.comparison import compare
from runtime.session.session import Session
from tests.engines.disassembly import BEYOND, above, level_of
from tests.models.building import Built, values
from tests.models.mlps import FEATURES

LEVELS = {"x86-64-v2": 2, "x86-64-v3": 3, "x86-64-v4": 4}
# A precompiled header takes as long as two compilations, for each set of flags; the code is the
# same.
ONCE = {"aot_inductor.precompile_headers": False}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("x86-64-v2", marks=pytest.mark.long),
        "x86-64-v3",
        pytest.param("x86-64-v4", marks=pytest.mark.long),
    ],
)
def arch(request: pytest.FixtureRequest) -> str:
    if request.param not in host_cpu_levels():
        pytest.skip(f"this host does not run {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def library(mlp: Built, arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model for a level; for this host's default level the fixture `mlp` has it."""
    if Target("cpu", arch) == Target.parse("cpu"):
        return mlp.files["aoti"]
    out = tmp_path_factory.mktemp(arch)
    source = Portable(mlp.capture.program, None)
    options = ONCE if arch == "x86-64-v4" else {}  # other tests compile for v2 too
    return out / engine("aoti").compile(source, Target("cpu", arch), options, out)[0]


@pytest.fixture(scope="module")
def disassembled(library: Path) -> Path:
    """The library, where objdump can list it."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump (binutils) is not installed")
    return library


def test_no_instruction_lies_above_the_level(disassembled: Path, arch: str) -> None:
    first_above = list(itertools.islice(above(disassembled, LEVELS[arch]), 5))
    assert first_above == []


def test_instructions_of_the_level_are_used(disassembled: Path, arch: str) -> None:
    if arch == "x86-64-v2":
        pytest.skip("it is the lowest level that a line can have")
    assert any(above(disassembled, LEVELS[arch] - 1))


def test_each_level_computes_the_models_answers(mlp: Built, library: Path) -> None:
    session = Session(mlp.signature, engine("aoti").open(library, torch.device("cpu")))
    for n in (0, 1, 33, 1000):
        inputs, written = mlp.collections({"n": n})
        session.run(inputs, written)
        rows = torch.stack([inputs["jets"].tensor(name) for name in FEATURES], dim=1)
        answers, tolerance = values(written["tags"]).T, default_tolerance("float32")
        assert compare(answers, mlp.model(rows), tolerance, classifier=False).outside == 0


@pytest.mark.parametrize(
    ("listed", "level"),
    [
        ("0f 58 c1 \taddps  %xmm1,%xmm0", 2),
        ("f3 48 0f bc c7 \ttzcnt  %rdi,%rax", 2),
        ("c5 f8 58 c1 \tvaddps %xmm1,%xmm0,%xmm0", 3),
        ("c4 e2 f9 f7 c7 \tshlx   %rax,%rdi,%rax", 3),
        ("f3 48 0f bd c7 \tlzcnt  %rdi,%rax", 3),
        ("62 f1 74 28 58 c2 \tvaddps %ymm2,%ymm1,%ymm0", 4),
        ("c5 f8 92 c8 \tkmovw  %eax,%k1", 4),
        ("62 f2 75 48 52 c2 \tvdpbf16ps %zmm2,%zmm1,%zmm0", BEYOND),
        ("66 0f 38 dc c1 \taesenc %xmm1,%xmm0", BEYOND),
    ],
)
def test_levels_of_single_instructions(listed: str, level: int) -> None:
    assert level_of(f"   17000:\t{listed}") == level
