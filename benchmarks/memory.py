"""What a model with about 100 MB of weights costs in memory: `python -m benchmarks.memory`.

Each row is a fresh process (or several at once) that loads the model and runs it; figures are from
/proc/PID/smaps_rollup, above the same process before it loaded anything. PSS counts a page that k
processes share as 1/k each. The last part runs a million events and prints RSS as it goes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.subject import Subject, subject
from benchmarks.table import print_machine
from engines import engine
from pipeline.report import console, new_table
from runtime.session import Session
from soa import Signature

_HIDDEN = 5000


class Wide(nn.Module):
    """6 → 5000 → 5000 → 3: 25 million weights, 100 MB."""

    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(features, _HIDDEN)
        self.middle = nn.Linear(_HIDDEN, _HIDDEN)
        self.last = nn.Linear(_HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(torch.log1p(x.abs())))
        return torch.softmax(self.last(torch.relu(self.middle(hidden))), dim=-1)


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(features=6, highest=4096, model=Wide(6))
    made.executable("aoti")
    (library,) = (made.folder / "aoti").glob("*.so")
    (made.folder / "signature.json").write_text(json.dumps(made.signature.to_dict()))
    table = new_table("MB above an idle process, n = 10", "", "RSS", "PSS", "private")
    for way in ("ours", "eager"):
        for processes, threads in ((1, 1), (1, 16), (4, 1)):
            found = _measure(made, way, library, processes, threads)
            mean = {key: sum(f[key] for f in found) / len(found) for key in found[0]}
            table.add_row(
                f"{way}, {processes} process{'es' if processes > 1 else ''}, {threads} threads",
                *(f"{mean[key]:.0f}" for key in ("Rss", "Pss", "Private")),
            )
    console().print(table)
    _million(subject(features=6, highest=4096))


def _measure(
    made: Subject, way: str, library: Path, processes: int, threads: int
) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.memory", "child", way, str(library), str(threads)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for child in children:  # all have loaded and run before anyone is measured
        assert child.stdout is not None
        child.stdout.readline()
    found = []
    for child in children:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("measure\n")
        child.stdin.flush()
        found.append(json.loads(child.stdout.readline()))
    for child in children:
        child.communicate("end\n")
    return found


def _child(way: str, library: Path, threads: int) -> None:
    torch.set_num_threads(1)
    signature = Signature.from_dict(
        json.loads((library.parent.parent / "signature.json").read_text())
    )
    before = _smaps()
    if way == "ours":
        session = Session(signature, engine("aoti").open(library, torch.device("cpu")))

        def run() -> None:
            binding = session.bind(
                session.collection("inputs", 10), session.collection("outputs", 10)
            )
            for _ in range(20):
                binding()
    else:
        model = Wide(6).eval().requires_grad_(False)

        def run() -> None:
            with torch.no_grad():
                for _ in range(20):
                    model(torch.zeros(10, 6))

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("ready", flush=True)
    sys.stdin.readline()
    after = _smaps()
    print(json.dumps({key: after[key] - before[key] for key in after}), flush=True)
    sys.stdin.readline()


def _smaps() -> dict[str, float]:
    """MB: resident, proportional, private."""
    fields: dict[str, float] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = float(value.split()[0]) / 1000
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"Rss": fields["Rss"], "Pss": fields["Pss"], "Private": private}


def _million(made: Subject) -> None:
    session = made.session()
    binding = session.bind(*made.collections(100))
    begun = time.perf_counter()
    print("RSS over 1,000,000 bound events of 0 to 99 rows, MB:", end=" ")
    for part in range(11):
        print(f"{_smaps()['Rss']:.1f}", end=" ", flush=True)
        for event in range(100_000 if part < 10 else 0):
            binding(event % 100)
    print(f"({time.perf_counter() - begun:.0f} s)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
