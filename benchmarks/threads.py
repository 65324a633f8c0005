"""Events per second from several threads: `python -m benchmarks.threads [1 2 16]`.

Python threads that each run their own binding of one session, and `run_many` over native threads.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

from benchmarks.subject import Subject, subject
from benchmarks.table import print_machine
from pipeline.report import console, new_table
from runtime.session import Session

_ROUNDS = 9
_SECONDS = 0.3


def main(counts: list[int]) -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(features=6, highest=10_000)
    session = made.session()
    header = [f"{c} thread{'s' if c > 1 else ''}" for c in counts]
    table = new_table("events a second: median of rounds in turn, ratio to 1 thread", "", *header)
    for n in (10, 1000, 10_000):
        for name, way in (("Python threads", _python), ("run_many", _many)):
            rates: dict[int, list[float]] = {c: [] for c in counts}
            workers = {c: way(made, session, n, c) for c in counts}
            for _ in range(_ROUNDS):
                for c in counts:
                    rates[c].append(workers[c]())
            middle = {c: statistics.median(values) for c, values in rates.items()}
            cells = [
                f"{middle[c]:,.0f} ({min(rates[c]):,.0f} … {max(rates[c]):,.0f}) "
                f"x{middle[c] / middle[counts[0]]:.2f}"
                for c in counts
            ]
            table.add_row(f"n={n}, {name}", *cells)
    console().print(table)
    print(f"the machine itself: {_machine():.2f} times the work of one process with two at once")


def _machine() -> float:
    """What a second core is worth here and now: separate processes that share nothing."""
    code = (
        "import time; b = time.perf_counter(); sum(range(30_000_000)); "
        "print(time.perf_counter() - b)"
    )

    def seconds(count: int) -> float:
        children = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        return statistics.mean(float(child.communicate()[0]) for child in children)

    return 2 * seconds(1) / seconds(2)


def _python(made: Subject, session: Session, n: int, count: int) -> Callable[[], float]:
    bindings = [session.bind(*made.collections(n)) for _ in range(count)]

    def measure() -> float:
        start = threading.Barrier(count + 1)
        done = [0] * count
        stop = threading.Event()

        def work(index: int) -> None:
            binding, events = bindings[index], 0
            start.wait()
            while not stop.is_set():
                for _ in range(20):
                    binding()
                events += 20
            done[index] = events

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        start.wait()
        begun = time.perf_counter()
        time.sleep(_SECONDS)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begun)

    return measure


def _many(made: Subject, session: Session, n: int, count: int) -> Callable[[], float]:
    size = 2000 if n < 1000 else 200
    bindings = [session.bind(*made.collections(n)) for _ in range(size)]
    session.run_many(bindings, count)

    def measure() -> float:
        begun, events = time.perf_counter(), 0
        while time.perf_counter() - begun < _SECONDS:
            session.run_many(bindings, count)
            events += size
        return events / (time.perf_counter() - begun)

    return measure


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1, 2])
