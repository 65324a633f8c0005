"""The kernel of two networks: tracks and bits as NumPy finds with the library's scores."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.speed.nvcc import nvcc
from tests.engines.lanes.harness import MOST, Compiled, prepared
from tests.engines.lanes.test_header import CPP, CUDA, Network, written
from tests.models.cplusplus import ROOT

Array = np.ndarray[Any, Any]
N = 3000
COLUMNS = (
    "pt", "eta", "phi", "dxy", "dz", "pt_error", "dxy_error", "dz_error", "chi2", "ndof", "hits",
    "pixel_hits", "lost_hits",
)  # fmt: skip
DERIVED = ("pt_over_error", "dxy_over_error")
INPUTS = {"purity": (*COLUMNS, *DERIVED), "vertex": ("pt", "eta", "dxy", "dz", *DERIVED)}
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


class Scores(nn.Module):
    """A score from features of a track."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.sigmoid(self.layers(x)),)


@dataclass(frozen=True)
class Example:
    """The program, and the networks' libraries."""

    program: Path
    libraries: dict[str, Compiled]


def networks(layers: Mapping[str, nn.Sequential]) -> dict[str, Network]:
    """The network of each score, with random rows."""
    by_name: dict[str, Network] = {}
    for name, own in layers.items():
        rows = torch.randn(MOST, len(INPUTS[name]))
        by_name[name] = Network(prepared(Scores(own), [rows], ["score"]), rows)
    return by_name


def has_alpaka() -> bool:
    """Whether g++ finds alpaka (CPLUS_INCLUDE_PATH), of version 1.2 or 2.0."""
    words = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    text = "#include <alpaka/exec/UniformElements.hpp>"
    return subprocess.run(words, input=text, text=True, capture_output=True).returncode == 0


@pytest.fixture(scope="module", params=["stand-in", "alpaka"])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    if request.param == "alpaka" and not has_alpaka():
        pytest.skip("g++ does not find alpaka")
    folder = tmp_path_factory.mktemp("kernel")
    torch.manual_seed(5)
    layers = {
        "purity": nn.Sequential(nn.Linear(15, 32), nn.ELU(), nn.Linear(32, 1)),
        "vertex": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)),
    }
    by_name = networks(layers)
    written(by_name, folder, CPP)
    program = folder / "select_tracks"
    command = ["g++", "-std=c++17", "-O1", *WARNINGS, "-pthread", "-I", folder, "-o", program]
    if request.param == "alpaka":
        command += ["-std=c++20", "-DWITH_ALPAKA"]
    command.append(ROOT / "examples" / "kernel" / "main.cpp")
    subprocess.run([str(word) for word in command], check=True)
    return Example(program, {name: network.library for name, network in by_name.items()})


def random_tracks(n: int) -> dict[str, Array]:
    """Columns of the file, and the derived ones."""
    draw = np.random.default_rng(5)
    drawn = {name: draw.normal(size=n) for name in COLUMNS}
    drawn |= {name: draw.uniform(0.5, 2, n) for name in COLUMNS if name.endswith("_error")}
    drawn |= {"pt": draw.exponential(2, n), "eta": draw.uniform(-3, 3, n)}
    tracks = {name: drawn[name].astype("float32") for name in COLUMNS}
    tracks["pt_over_error"] = np.abs(tracks["pt"]) / tracks["pt_error"]
    tracks["dxy_over_error"] = np.abs(tracks["dxy"]) / tracks["dxy_error"]
    return tracks


def scores(library: Compiled, name: str, tracks: dict[str, Array]) -> Array:
    """The library's scores of all tracks."""
    rows = torch.from_numpy(np.stack([tracks[column] for column in INPUTS[name]], 1))
    parts = [library(part)["score"].reshape(-1).clone() for part in rows.split(MOST)]
    return np.asarray(torch.cat(parts).numpy())


def selected(file: Path) -> tuple[Array, Array, Array]:
    """Index and scores of the selected tracks, in order."""
    index, purity, vertex = np.fromfile(file, "int32").reshape(3, -1)
    order = np.argsort(index)
    return index[order], purity[order].view("float32"), vertex[order].view("float32")


@pytest.mark.parametrize("n", [0, 1, N])
def test_one_launch_selects_with_the_bits_of_the_library(
    example: Example, n: int, tmp_path: Path
) -> None:
    tracks = {name: values[:n] for name, values in random_tracks(N).items()}
    purity, vertex = (scores(example.libraries[name], name, tracks) for name in INPUTS)
    preselected = (tracks["pt"] > np.float32(0.75)) & (np.abs(tracks["eta"]) < np.float32(2.5))
    purity_cut, vertex_cut = (cut(own[preselected]) for own in (purity, vertex))
    wanted = np.flatnonzero(preselected & (purity > purity_cut) & (vertex > vertex_cut))
    np.concatenate([tracks[name] for name in COLUMNS]).tofile(tmp_path / "tracks")
    done = run(example, tmp_path / "tracks", 0.75, float(purity_cut), float(vertex_cut))
    assert done.returncode == 0, done.stderr
    assert f"{len(wanted)} of {n} tracks" in done.stdout
    index, own_purity, own_vertex = selected(tmp_path / "selected")
    assert np.array_equal(index, wanted)
    assert own_purity.tobytes() == purity[wanted].tobytes()
    assert own_vertex.tobytes() == vertex[wanted].tobytes()
    if n == N:  # each cut takes some tracks, and leaves enough
        assert N / 20 < len(wanted) < preselected.sum() < N


def cut(scores: Array) -> np.float32:
    """A cut that a third of the scores do not pass; it is the score of a track, which does not."""
    return np.float32(np.sort(scores)[len(scores) // 3] if len(scores) > 1 else 0.1)


def run(
    example: Example, tracks: Path, pt: float, purity: float, vertex: float
) -> subprocess.CompletedProcess[str]:
    """Runs the program with these cuts; it writes `selected` beside the tracks."""
    words = [example.program, tracks, tracks.with_name("selected"), pt, purity, vertex]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


@pytest.mark.parametrize(("name", "says"), [("short", "13 columns"), ("missing", "cannot read")])
def test_wrong_files_are_refused(example: Example, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "short").write_bytes(b"short")
    done = run(example, tmp_path / name, 1, 0.5, 0.5)
    assert done.returncode == 1 and says in done.stderr


@pytest.mark.long
def test_nvcc_takes_the_program_for_a_gpu(tmp_path: Path) -> None:
    try:
        compiler = nvcc()
    except RuntimeError as error:
        pytest.skip(str(error))
    layers = {"purity": nn.Linear(15, 1), "vertex": nn.Linear(6, 1)}
    by_name = networks({name: nn.Sequential(layer) for name, layer in layers.items()})
    written(by_name, tmp_path, CUDA)
    words = ["-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-I", tmp_path, "-cubin"]
    words += ["-o", tmp_path / "main.cubin", ROOT / "examples" / "kernel" / "main.cu"]
    done = subprocess.run([compiler, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
