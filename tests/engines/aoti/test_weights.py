"""Weights in their own file: kept in their strides, mapped read-only, refused if they differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engines.aoti.build import can_be_written, write_weights
from engines.errors import RunError
from engines.native.runner import NativeExecutable
from tests.models.building import Built

CPU = torch.device("cpu")


@pytest.fixture
def artifact(mlp: Built, tmp_path: Path) -> Path:
    """The library in a copy of the artifact's folder."""
    source = mlp.files["aoti"]
    shutil.copytree(source.parent, tmp_path / "artifact")
    return tmp_path / "artifact" / source.name


def test_each_tensor_lies_aligned_in_its_own_strides(tmp_path: Path) -> None:
    """A line of the index: name, dtype, itemsize, offset, dimensions, sizes, strides."""
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()  # sizes 4 3, strides 1 4
    half = torch.tensor([1.5, -2.0], dtype=torch.float16)
    assert write_weights({"m": matrix, "h": half, "e": torch.empty(0, 3)}, tmp_path) == [
        "weights.bin",
        "weights.txt",
    ]
    assert (tmp_path / "weights.txt").read_text().splitlines() == [
        "soa-weights 1",
        "m float32 4 0 2 4 3 1 4",
        "h float16 2 64 1 2 1",
        "e float32 4 128 2 0 3 3 1",
    ]
    stored = (tmp_path / "weights.bin").read_bytes()
    assert stored[:48] == torch.arange(12, dtype=torch.float32).numpy().tobytes()
    assert stored[48:64] == bytes(16)
    assert stored[64:68] == half.numpy().tobytes()


@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        (torch.zeros(2, dtype=torch.int64), True),
        (torch.zeros(2, dtype=torch.complex64), False),
        (torch.eye(2).to_sparse(), False),
    ],
    ids=["integers", "complex", "sparse"],
)
def test_the_format_holds_dense_numbers(weight: torch.Tensor, fits: bool) -> None:
    """Others stay in the library."""
    assert can_be_written({"a": weight}) == fits


def test_weights_are_mapped_read_only_and_shared(artifact: Path) -> None:
    executable = NativeExecutable(artifact, CPU, instances=8)
    maps = Path("/proc/self/maps").read_text().splitlines()
    executable.close()
    (mapping,) = [line for line in maps if line.endswith(str(artifact.parent / "weights.bin"))]
    assert mapping.split()[1] == "r--s"  # one for eight instances: readable, shared


def test_closing_unmaps_the_weights(artifact: Path) -> None:
    NativeExecutable(artifact, CPU).close()
    assert str(artifact.parent / "weights") not in Path("/proc/self/maps").read_text()


def test_an_index_of_more_weights_than_there_are_is_refused(artifact: Path) -> None:
    """stress.cpp tries other wrong files."""
    index = artifact.parent / "weights.txt"
    text = index.read_text()
    assert text.count(" 2 48 6 6 1") == 1  # 2 dimensions, sizes 48 and 6, strides 6 and 1
    index.write_text(text.replace(" 2 48 6 6 1", " 2 48000 6 6 1"))
    with pytest.raises(RunError, match=r"does not fit weights\.bin"):
        NativeExecutable(artifact, CPU)


def test_an_index_without_its_weights_is_refused(artifact: Path) -> None:
    (artifact.parent / "weights.bin").unlink()
    with pytest.raises(RunError, match=r"weights\.bin: No such file"):
        NativeExecutable(artifact, CPU)


def test_a_library_without_its_index_is_refused(artifact: Path) -> None:
    (artifact.parent / "weights.txt").unlink()
    with pytest.raises(RunError, match=r"holds no weights, and there is no weights\.txt"):
        NativeExecutable(artifact, CPU)
