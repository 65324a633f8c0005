"""The levels of CPUs, and native refusals of artifacts for another CPU."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engines.errors import RunError
from engines.kinds import cpu_flags, host_cpu_levels
from engines.native.runner import NativeExecutable
from engines.target import Target
from tests.engines.native import sanitize
from tests.models.building import Built

LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
FAMILY = "another processor family"


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of levels.cpp: the features that C++ names, by `lacks x86-64-v3` and so on."""
    compiler = sanitize.compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler and an x86-64 host")
    program = tmp_path_factory.mktemp("levels") / "levels"
    source = sanitize.HERE / "levels.cpp"
    subprocess.run(
        [compiler, "-std=c++17", f"-I{sanitize.NATIVE}", source, "-o", program], check=True
    )
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {key: value for key, _, value in (line.partition(": ") for line in lines.splitlines())}


@pytest.mark.parametrize("level", LEVELS)
def test_this_processor_has_what_linux_says(features: dict[str, str], level: str) -> None:
    needed = features[f"needs {level}"].split(", ")
    assert features[f"lacks {level}"] == ", ".join(
        name for name in needed if name not in cpu_flags()
    )


def test_what_levels_of_arm_need(features: dict[str, str]) -> None:
    assert features["arm needs aarch64"] == "fp, asimd"
    assert features["arm needs armv8.2-a"] == "fp, asimd, asimdrdm, atomics, crc32"


def test_arm_runs_its_levels_and_no_other_ones(features: dict[str, str]) -> None:
    assert features["arm lacks armv8.2-a"] == ""
    assert features["arm lacks x86-64-v2"] == FAMILY


def test_a_system_that_saves_no_wide_registers_has_no_wide_level(features: dict[str, str]) -> None:
    assert features["saves x86-64-v2"] == ""
    assert features["saves x86-64-v3"] == "avx, avx2, f16c, fma"
    assert "avx512f" in features["saves x86-64-v4"]


@pytest.mark.parametrize("arch", ["x86-64-v5", "aarch64", "armv8.2-a", "x86-64-v", ""])
def test_what_is_no_level_runs_nowhere(features: dict[str, str], arch: str) -> None:
    assert (
        features[f"needs {arch}"]
        == features[f"lacks {arch}"]
        == features[f"saves {arch}"]
        == FAMILY
    )


RUN_HERE = [arch for arch in (*LEVELS, "aarch64") if arch in host_cpu_levels()]
NOT_HERE = [arch for arch in (*LEVELS, "aarch64") if arch not in RUN_HERE]


def for_target(mlp: Built, tmp_path: Path, arch: str) -> Path:
    """A library whose folder says that it is for this level."""
    library = copied(mlp, tmp_path)
    (library.parent / "target.txt").write_text(f"soa-target 1\ncpu/{arch}\n")
    return library


@pytest.mark.parametrize("arch", RUN_HERE)
def test_an_artifact_opens_where_its_target_runs(mlp: Built, tmp_path: Path, arch: str) -> None:
    """There is no answer to check: it must not raise."""
    NativeExecutable(for_target(mlp, tmp_path, arch), torch.device("cpu")).close()


@pytest.mark.parametrize("arch", NOT_HERE)
def test_an_artifact_is_refused_elsewhere(mlp: Built, tmp_path: Path, arch: str) -> None:
    with pytest.raises(RunError, match=f"this host cannot run cpu/{arch}: it lacks"):
        NativeExecutable(for_target(mlp, tmp_path, arch), torch.device("cpu"))


def test_the_artifact_names_its_own_target(mlp: Built, tmp_path: Path) -> None:
    library = copied(mlp, tmp_path)
    text = (library.parent / "target.txt").read_text()
    assert text == f"soa-target 1\n{Target.parse('cpu')}\n"


def copied(mlp: Built, tmp_path: Path) -> Path:
    """The library in a copy of the artifact's folder."""
    source = mlp.files["aoti"]
    return Path(shutil.copytree(source.parent, tmp_path / "artifact")) / source.name
