"""Events per second from several threads: `python -m benchmarks.speed.threads [1 2 16]`.

It times Python threads, each with its own binding of one session, and `run_many`, which uses native
threads. Then what `load(threads=2)` does: two threads share the rows of one call of `lanes`.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.subject import CPU, Subject, Wide, subject
from benchmarks.table import SPREAD, Cell, Panel, print_machine, print_panels
from engines import engine
from runtime.session.binding import Binding
from runtime.session.session import Session

CAPTION = f"Events a second of a small MLP.\nx: to one thread; {SPREAD}."
_ROUNDS = 9
_SECONDS = 0.3


def main(counts: list[int]) -> None:
    torch.set_num_threads(1)
    print_machine()
    made = subject(features=6, highest=10_000)
    panels = measure(made, made.session(), (10, 1000, 10_000), counts, _ROUNDS, _SECONDS)
    print_panels(CAPTION, panels)
    print(by_length(made, made.session(), (64, 256, 1000, 4000), _ROUNDS))
    show_shared_rows()
    print(f"the machine itself: {_machine():.2f} times the work of one process with two at once")


def measure(
    made: Subject,
    session: Session,
    sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    seconds: float,
) -> list[Panel]:
    """A panel for every size.

    Each way is measured `rounds` times for `seconds` with each thread count, in turns.
    """
    panels = []
    for n in sizes:
        rows: dict[str, tuple[Cell, ...]] = {}
        for name, way in (("Python threads", _python), ("run_many", _many)):
            workers = [way(made, session, n, count) for count in counts]
            rates = np.array([[worker(seconds) for worker in workers] for _ in range(rounds)])
            low, middle, high = np.percentile(rates, (5, 50, 95), axis=0)
            rows[name] = tuple(
                Cell(float(m), float(lo), float(hi), float(m / middle[0]))
                for m, lo, hi in zip(middle, low, high, strict=True)
            )
        panels.append(
            Panel(f"{n:,} rows", "threads: events a second", "1/s",
                  tuple(counts), rows)
        )  # fmt: skip
    return panels


def by_length(made: Subject, session: Session, lengths: Sequence[int], rounds: int) -> str:
    """How much faster `run_many` is with a second thread, by the length of its list, at 10 rows."""
    found = []
    for length in lengths:
        bindings = [session.bind(*made.collections(10)) for _ in range(length)]
        took: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for count, times in took.items():
                begun = time.perf_counter()
                for _ in range(max(1, 8000 // length)):
                    session.run_many(bindings, count)
                times.append(time.perf_counter() - begun)
        ratio = statistics.median(took[1]) / statistics.median(took[2])
        found.append(f"{length}: {ratio:.2f}")
    return f"run_many with 2 threads against 1, 10 rows, by events a call: {', '.join(found)}"


def shared_rows(made: Subject, sizes: Sequence[int], rounds: int, seconds: float) -> str:
    """For each n: the median time of a call with one thread and with two that share its rows, in
    µs, and their ratio. `busy`: the processor time of the second, divided by its wall time; 2 if
    both threads work all the time. `two callers`: what this machine gives in the same rounds to two
    threads that share nothing, as their calls a second over those of one."""
    name = "lanes"
    file = made.compiled(name)
    sessions = [
        Session(made.signature, engine(name).open(file, CPU, threads), any_start=True)
        for threads in (1, 2)
    ]
    lines = [
        f"{'':14} {'1 thread':>10} {'2 threads':>10} {'ratio':>6} {'busy':>6} {'two callers':>12}"
    ]
    for n in sizes:
        bindings = [session.bind(*made.collections(n)) for session in sessions]
        callers = _python(made, sessions[0], n, 2)
        took, rates = [], []
        for _ in range(rounds):
            took.append([_busy(binding, seconds) for binding in bindings])
            rates.append(callers(seconds))
        (one, _), (two, busy) = np.median(np.array(took), axis=0)
        lines.append(
            f"{n:>9,} rows {one:10.1f} {two:10.1f} {one / two:6.2f} {busy:6.2f} "
            f"{statistics.median(rates) * one / 1e6:12.2f}"
        )
    return "\n".join(lines)


def _busy(binding: Binding, seconds: float) -> tuple[float, float]:
    """The time of a call in µs, and processor time over wall time."""
    binding()
    count, begun, before = 0, time.perf_counter(), _processor_s()
    while (wall := time.perf_counter() - begun) < seconds or not count:
        binding()
        count += 1
    return wall / count * 1e6, (_processor_s() - before) / wall


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _machine() -> float:
    """The work of two processes at once, which share nothing, relative to the work of one."""
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


def _python(made: Subject, session: Session, n: int, count: int) -> Callable[[float], float]:
    bindings = [session.bind(*made.collections(n)) for _ in range(count)]

    def rate(seconds: float) -> float:
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
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begun)

    return rate


def _many(made: Subject, session: Session, n: int, count: int) -> Callable[[float], float]:
    size = 2000 if n < 1000 else 200
    bindings = [session.bind(*made.collections(n)) for _ in range(size)]
    session.run_many(bindings, count)

    def rate(seconds: float) -> float:
        begun, events = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            session.run_many(bindings, count)
            events += size
        return events / (time.perf_counter() - begun)

    return rate


def show_shared_rows() -> None:
    for hidden, sizes in ((48, (10, 100, 1000, 8192, 20_000)), (256, (8, 64, 512, 8192, 20_000))):
        made = subject(features=20, highest=20_000, model=Wide(20, hidden))
        print(f"An MLP 20 → {hidden} → {hidden} → 3")
        print(shared_rows(made, sizes, 5, _SECONDS), flush=True)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1, 2])
