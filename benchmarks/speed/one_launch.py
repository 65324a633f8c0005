"""Tracks selected by two networks: in one loop, or by calls with the selection between them.

    python -m benchmarks.speed.one_launch

The loop is that of examples/kernel, in one thread: a track that fails a cut is not computed
further. The calls compute all tracks from columns: two features with NumPy, then each network with
a bound session of `lanes`, then the selection with NumPy. Both must select the same tracks, with
the same bits.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.speed.headers import written_header_of
from benchmarks.subject import Subject, subject
from benchmarks.table import SPREAD, print_machine, print_panels, race_panel
from stages.timing import race

_EXAMPLE = Path(__file__).parents[2] / "examples" / "kernel"
_TRACKS = 20_000
_CUT, _MOST_ETA = 0.3, 2.5
_FEATURES = {"purity": 15, "vertex": 6}
_VERTEX = (0, 1, 3, 4, 13, 14)  # the columns that the second network reads
_LOOP = """\
#include "accelerator.hpp"
#define SOA_FN FN_ACC
#include "select_tracks.hpp"
extern "C" std::uint32_t selected(const float *c, std::int64_t n, float pt, float cut,
                                  std::int32_t *index, float *scores) {
  const Tracks tracks = {n, c, c + n, c + 2 * n, c + 3 * n, c + 4 * n, c + 5 * n, c + 6 * n,
                         c + 7 * n, c + 8 * n, c + 9 * n, c + 10 * n, c + 11 * n, c + 12 * n};
  std::uint32_t count = 0;
  const Selected out = {&count, index, scores, scores + n};
  SelectTracks{}(accelerator::Accelerator{0, 1}, tracks, Cuts{pt, cut, cut}, out);
  return count;
}
"""


@dataclass(frozen=True)
class Tracks:
    """The tracks that pass, with the scores of both networks."""

    index: np.ndarray[Any, Any]
    purity: np.ndarray[Any, Any]
    vertex: np.ndarray[Any, Any]

    def same_as(self, other: Tracks) -> bool:
        """Whether the tracks are the same, and the bits of their scores."""
        return (
            np.array_equal(self.index, other.index)
            and self.purity.tobytes() == other.purity.tobytes()
            and self.vertex.tobytes() == other.vertex.tobytes()
        )


class Calls:
    """The selection by calls, on memory that two sessions are bound to."""

    def __init__(self, tracks: np.ndarray[Any, Any], purity: Subject, vertex: Subject) -> None:
        self.inputs, self.scores, self.bound = [], [], []
        for network in (purity, vertex):
            inputs, outputs = network.collections(_TRACKS)
            self.inputs.append(inputs)
            self.scores.append(outputs["y0"])
            self.bound.append(network.session().bind({"inputs": inputs}, {"outputs": outputs}))
        for i, column in enumerate(tracks):
            self.inputs[0][f"x{i}"][:] = column
        for i, column in enumerate(_VERTEX[:4]):
            self.inputs[1][f"x{i}"][:] = tracks[column]

    def selected(self, pt: float) -> Tracks:
        """The tracks that pass, with a transverse momentum above `pt`."""
        tracks, vertex_inputs = self.inputs
        # The last two features of both networks: pt and dxy, over their errors.
        for value, error, feature, copy in (("x0", "x5", "x13", "x4"), ("x3", "x6", "x14", "x5")):
            np.divide(np.abs(tracks[value]), tracks[error], out=tracks[feature])
            vertex_inputs[copy][:] = tracks[feature]
        for call in self.bound:
            call()
        purity, vertex = self.scores
        passes = (tracks["x0"] > pt) & (np.abs(tracks["x1"]) < _MOST_ETA)
        index = np.flatnonzero(passes & (purity > _CUT) & (vertex > _CUT))
        return Tracks(index, purity[index], vertex[index])


class Loop:
    """The selection by the loop of examples/kernel, compiled for this host."""

    def __init__(self, tracks: np.ndarray[Any, Any], folder: Path) -> None:
        (folder / "loop.cpp").write_text(_LOOP)
        command = ["g++", "-std=c++17", "-O2", "-march=native", "-shared", "-fPIC", "-pthread"]
        command += ["-I.", f"-I{_EXAMPLE}", "-o", "loop.so", "loop.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        self.tracks = tracks
        self.function = ctypes.CDLL(str(folder / "loop.so")).selected
        self.index = np.empty(_TRACKS, np.int32)
        self.scores = np.empty((2, _TRACKS), np.float32)

    def selected(self, pt: float) -> Tracks:
        """The tracks that pass, as of `Calls`; the next call overwrites them."""
        arrays = (self.tracks, self.index, self.scores)
        tracks, index, scores = (array.ctypes.data_as(ctypes.c_void_p) for array in arrays)
        n, cuts = ctypes.c_int64(_TRACKS), (ctypes.c_float(pt), ctypes.c_float(_CUT))
        count = self.function(tracks, n, *cuts, index, scores)
        return Tracks(self.index[:count], *self.scores[:, :count])


def main() -> None:
    print_machine()
    torch.manual_seed(5)
    layers = {
        "purity": nn.Sequential(nn.Linear(15, 32), nn.ELU(), nn.Linear(32, 1), nn.Sigmoid()),
        "vertex": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()),
    }
    networks = {n: subject(_FEATURES[n], _TRACKS, layer, 1) for n, layer in layers.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, network in networks.items():
            (folder / name).mkdir()
            written_header_of(network, "cpp", folder / name, name)
            (folder / name / f"{name}.h").rename(folder / f"{name}.h")
        tracks = random_tracks()
        loop, calls = Loop(tracks, folder), Calls(tracks, **networks)
    races = {}
    for percent in (5, 20, 50):
        pt = float(np.quantile(tracks[0], 1 - percent / 100))
        if not loop.selected(pt).same_as(calls.selected(pt)):
            raise SystemExit(f"{percent} %: the two ways select different tracks or bits")
        ways = {"one loop": partial(loop.selected, pt), "calls": partial(calls.selected, pt)}
        races[percent] = race(ways, 1.0, stay=ways)
    caption = f"{_TRACKS:,} tracks, of which so many pass the cut on pt; {SPREAD}."
    print_panels(caption, [race_panel("Selection by two networks", "% pass", races, "one loop")])


def random_tracks() -> np.ndarray[Any, Any]:
    """13 columns of tracks, in the order of examples/kernel/select_tracks.hpp."""
    draw = np.random.default_rng(5)
    columns = draw.normal(size=(13, _TRACKS))
    columns[0] = draw.exponential(2, _TRACKS)
    columns[5:8] = draw.uniform(0.5, 2, (3, _TRACKS))
    return columns.astype(np.float32)


if __name__ == "__main__":
    main()
