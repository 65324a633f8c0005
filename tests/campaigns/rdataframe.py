"""A network's header in ROOT's RDataFrame, on a real file: the bits of the library, and times.

    python -m tests.campaigns.rdataframe --python PATH --data shared/data

`--python`: a Python with ROOT (`pip install root numpy` in a venv of its own). The file is read
`--times` times in a row, so that there are enough events to time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import uproot
from torch import Tensor, nn

from engines import Portable, Target, engine
from pipeline.building.header import add_self_test
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column
from soa.memory import as_collection, to_numpy
from stages.capture import capture

COLUMNS = ("E1", "pt1", "eta1", "phi1", "E2", "pt2", "eta2", "phi2", "M")

_IN_ROOT = """
import json, sys, time
import numpy as np, ROOT
header, files, names, threads = json.loads(sys.argv[1])
if threads > 1:
    ROOT.EnableImplicitMT(threads)
ROOT.gInterpreter.Declare(f'#include "{header}"')
wrong = ROOT.net.self_test()
frame = ROOT.RDataFrame("events", files)
call = f"net::row({', '.join(names)})"
times = []
for expression in ("0.5f", call):
    begun = time.perf_counter()
    total = frame.Define("score", expression).Sum("score").GetValue()
    times.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    total = frame.Define("score", expression).Sum("score").GetValue()
    times[-1] = min(times[-1], time.perf_counter() - begun)
first = ROOT.RDataFrame("events", files[0]) if threads == 1 else None
scores = []
if first is not None:
    found = first.Define("score", call).AsNumpy(["score"])["score"]
    scores = found.view("u4").tolist()
print(json.dumps([wrong, times, scores]))
"""


class Muons(nn.Module):
    """Nine columns of two muons, 9 -> 64 -> 64 -> 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        hidden = [nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x / 50)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="a Python with ROOT")
    parser.add_argument("--data", type=Path, required=True, help="where uproot-Zmumu.root lies")
    parser.add_argument("--times", type=int, default=200)
    given = parser.parse_args()
    file = (given.data / "uproot-Zmumu.root").resolve()
    arrays = uproot.open(file)["events"].arrays(COLUMNS, library="np")
    n = len(arrays["M"])
    signature = Signature.build(
        {"muons": Layout([column(name, "float64") for name in COLUMNS]),
         "out": Layout([column("score", "float32")])},
        [Block("x", "muons", COLUMNS, "float32")],
        [Block("score", "out", ("score",))],
        {"n": RowRange(0, n)},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        inputs = {"muons": {k: torch.from_numpy(np.array(arrays[k])) for k in COLUMNS}}
        (folder / "captured").mkdir()
        captured = capture(Muons().eval(), signature, inputs, folder / "captured")
        source = Portable(captured.program, None, signature)
        first, *_ = engine("lanes").compile(source, Target("source", "cpp"), {}, folder)
        opened = engine("lanes").open(folder / first, torch.device("cpu"))
        session = Session(signature, opened, torch.device("cpu"))
        header = (folder / "network.h").read_text()
        text = add_self_test(header, "net", session, captured.reference).text
        (folder / "net.h").write_text(text)
        muons, out = as_collection(arrays, signature.layouts["muons"]), session.collection("out", n)
        session.run({"muons": muons}, {"out": out})
        wanted = to_numpy(out)["score"].view("u4")
        (folder / "in_root.py").write_text(_IN_ROOT)
        for threads in (1, 2):
            job = json.dumps([str(folder / "net.h"), [str(file)] * given.times, COLUMNS, threads])
            done = subprocess.run(
                [given.python, "-W", "ignore", folder / "in_root.py", job],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            wrong, (reading, both), scores = json.loads(done.stdout.splitlines()[-1])
            same = not scores or np.array_equal(np.array(scores, "u4"), wanted)
            ns = (both - reading) / (n * given.times) * 1e9
            print(
                f"{threads} thread(s): self-test {wrong} wrong, {len(scores):,} scores compared, "
                f"{n * given.times:,} events: reading {reading:.2f} s, with the network {both:.2f} "
                f"s: {ns:.0f} ns an event"
            )
            assert wrong == 0 and same
        begun = time.perf_counter()
        for _ in range(given.times):
            session.run({"muons": muons}, {"out": out})
        took = (time.perf_counter() - begun) / (n * given.times) * 1e9
        print(f"`rows` of the same header on columns in memory: {took:.0f} ns an event")
        with torch.no_grad():
            matrix = torch.stack([inputs["muons"][k].float() for k in COLUMNS], 1)
            net = Muons().eval()
            begun = time.perf_counter()
            for _ in range(given.times):
                net(matrix)
        took = (time.perf_counter() - begun) / (n * given.times) * 1e9
        print(f"eager torch on a matrix, {torch.get_num_threads()} threads: {took:.0f} ns an event")


if __name__ == "__main__":
    main()
