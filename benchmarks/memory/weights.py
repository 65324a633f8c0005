"""The memory of a model with about 100 MB of weights: `python -m benchmarks.memory.weights`.

Each row is a new process (or several at once) that loads the model and runs it. The numbers are
from /proc/PID/smaps_rollup, minus those of the same process before it loaded anything. PSS counts a
page that k processes share as 1/k in each. The last part runs a million events and prints RSS at
regular intervals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.row_major import onnx_options, onnx_session
from benchmarks.subject import Subject, Wide, subject
from benchmarks.table import Cell, Panel, print_machine, print_panels
from engines import engine
from runtime.session.binding import Binding
from runtime.session.session import Session
from soa import Signature

CAPTION = "MB above a process that has imported the library and loaded nothing."


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    wide = subject(features=6, highest=4096, model=Wide(6))
    print_panels(CAPTION, [measure(wide, (1, 16))])
    small = subject(features=6, highest=4096)
    million(small.session().bind(*small.collections(100)), 1_000_000)


def measure(wide: Subject, threads: Sequence[int]) -> Panel:
    """Ours, eager and ONNX Runtime: by the number of threads, and with four processes at once.

    With the most threads there is a second row, in which all threads share one malloc arena. The
    difference of the two rows is the memory of the threads' own arenas.
    """
    wide.executable("aoti")
    (library,) = (wide.folder / "aoti-cpu").glob("*.so")
    (wide.folder / "signature.json").write_text(json.dumps(wide.signature.to_dict()))
    files = {"ours": library, "eager": library}  # eager reads no file
    if onnx_session(wide.model, wide.signature, wide.inputs, wide.folder) is not None:
        files["ONNX Runtime"] = wide.folder / "row_major.onnx"
    rows: dict[str, tuple[Cell | None, ...]] = {}
    for way, file in files.items():
        for count in threads:
            name = f"{way}, {count} thread{'s' if count > 1 else ''}"
            rows[name] = _cells(_run(way, file, 1, count))
        rows[f"{way}, {threads[-1]} threads, one arena"] = _cells(
            _run(way, file, 1, threads[-1], {"MALLOC_ARENA_MAX": "1"})
        )
        rows[f"{way}, 4 processes, each"] = _cells(_run(way, file, 4, 1))
    return Panel("a model of 100 MB, n = 10", "", "MB", ("RSS", "PSS", "private"), rows)


def _cells(measured: Sequence[Mapping[str, float]]) -> tuple[Cell, ...]:
    """The means over processes of what `_smaps` returns."""
    keys = ("Rss", "Pss", "Private")
    return tuple(Cell(sum(memory[key] for memory in measured) / len(measured)) for key in keys)


def _run(
    way: str, file: Path, processes: int, threads: int, env: Mapping[str, str] | None = None
) -> list[dict[str, float]]:
    """The memory of each of several processes that have the model open at the same time. `env`:
    variables of the environment besides those of this process."""
    words = ("benchmarks.memory.weights", "child", way, str(file), str(threads))
    command = [sys.executable, "-m", *words]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        for _ in range(processes)
    ]
    for child in children:  # all have loaded and run before the first is measured
        assert child.stdout is not None
        child.stdout.readline()
    measured = []
    for child in children:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("measure\n")
        child.stdin.flush()
        measured.append(json.loads(child.stdout.readline()))
    for child in children:
        child.communicate("end\n")
    return measured


def _child(way: str, file: Path, threads: int) -> None:
    """A process of `_run`: opens and runs the model in threads, says so, prints its memory when it
    is told to, and ends when it is told to."""
    torch.set_num_threads(1)
    if way == "ONNX Runtime":
        import onnxruntime  # noqa: F401 - the library itself is not counted, as torch is not
    before = _smaps()
    run = {"ours": _ours, "eager": _eager, "ONNX Runtime": _onnx}[way](file)
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
    """RSS, PSS and private memory of this process in MB."""
    fields: dict[str, float] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = float(value.split()[0]) / 1000
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"Rss": fields["Rss"], "Pss": fields["Pss"], "Private": private}


def _ours(library: Path) -> Callable[[], None]:
    """Runs of a session of the artifact, on 10 rows."""
    signature = json.loads((library.parent.parent / "signature.json").read_text())
    session = Session(
        Signature.from_dict(signature), engine("aoti").open(library, torch.device("cpu"))
    )

    def run() -> None:
        binding = session.bind(session.collection("inputs", 10), session.collection("outputs", 10))
        for _ in range(20):
            binding()

    return run


def _eager(file: Path) -> Callable[[], None]:
    """Runs of the model itself, on 10 rows. It has its weights without a file."""
    model = Wide(6).eval().requires_grad_(False)

    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                model(torch.zeros(10, 6))

    return run


def _onnx(file: Path) -> Callable[[], None]:
    """Runs of a session of ONNX Runtime, on 10 rows."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(file), onnx_options(), providers=["CPUExecutionProvider"]
    )
    rows = {session.get_inputs()[0].name: torch.zeros(10, 6).numpy()}

    def run() -> None:
        for _ in range(20):
            session.run(None, rows)

    return run


def million(binding: Binding, events: int) -> list[float]:
    """Run `events` bound events of 0 to 99 rows.

    Prints and returns RSS in MB, before them and after each tenth of them.
    """
    begun = time.perf_counter()
    rss = [_smaps()["Rss"]]
    for _ in range(10):
        for event in range(events // 10):
            binding(event % 100)
        rss.append(_smaps()["Rss"])
    values = " ".join(f"{value:.1f}" for value in rss)
    seconds = time.perf_counter() - begun
    print(f"RSS over {events:,} bound events of 0 to 99 rows, MB: {values} ({seconds:.0f} s)")
    return rss


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
