"""A canary under load: its share is exact and repeats itself, and no call is lost when it fails.

    python -m tests.campaigns.canary --calls 1000000 --threads 16

In two processes, threads call a canary session: once the numbers of the calls decide, once keys.
Then the canary begins to fail in one call of two, leaves NaN behind, and is withdrawn. After each
call the answer must be wholly that of one version.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from registry.shadow_record import ShadowRecord
from runtime.session.session import Session
from runtime.versions.canary import CanaryBinding, CanaryLimits, CanarySession
from runtime.versions.second import Results
from tests.models.building import mlp_signature
from tests.models.rogues import Rogue

BEGUN = ShadowRecord(
    version="jets/2", digest="2" * 64, production="jets/1", production_digest="1" * 64
)
SHARE, ROWS, ERRORS = 0.05, 5, 100
PRODUCTION, CANARY = 1.0, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--inside", action="store_true", help="Run here, and print JSON.")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(campaign(options.calls, options.threads)))
        return
    runs = [in_a_process(options.calls, options.threads) for _ in range(2)]
    for run in runs:
        print(*(f"{name}: {value}" for name, value in run.items()), sep="\n", end="\n\n")
    first, second = ({k: v for k, v in run.items() if k != "seconds"} for run in runs)
    assert first == second
    print("both processes found the same")


def in_a_process(calls: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.campaigns.canary", "--inside", "--calls", str(calls)]
    done = subprocess.run([*command, "--threads", str(threads)], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def campaign(calls: int, threads: int) -> dict[str, Any]:
    """Counts that every run must repeat. Raises AssertionError if a call is lost or wrong."""
    begun = time.perf_counter()
    session, kept = opened(Rogue(lambda n, x, y: y[:, :n].fill_(CANARY)))
    by_number = called(session, calls, threads, lambda binding, event: binding())
    assert len(by_number) == calls * SHARE
    session.close()
    assert (kept[0].canary_calls, kept[0].production_calls) == (
        len(by_number),
        calls - len(by_number),
    )
    session, _ = opened(Rogue(lambda n, x, y: y[:, :n].fill_(CANARY)))
    by_key = called(session, calls, threads, lambda binding, event: binding(key=event))
    session.close()

    session, kept = opened(Rogue(every_second_fails()), max_errors=ERRORS)
    before = called(session, calls, threads, lambda binding, event: binding())
    session.close()
    record = BEGUN.plus(kept)
    assert session.withdrawn == "RuntimeError: out of luck"
    assert record.canary_calls == len(before)
    assert record.canary_calls + record.production_calls == calls
    # Threads that are in a call of the canary when it is withdrawn finish that call.
    assert ERRORS < record.errors <= ERRORS + threads and record.withdrawals == 1
    return {
        "calls": calls,
        "threads": threads,
        "answered by the canary, by number": len(by_number),
        "answered by the canary, by key": len(by_key),
        "these keys": hashlib.sha256(str(sorted(by_key)).encode()).hexdigest()[:16],
        "failing canary withdrawn after errors above": ERRORS,
        "calls lost": calls - record.canary_calls - record.production_calls,
        "seconds": round(time.perf_counter() - begun),
    }


def opened(canary: Rogue, **limits: Any) -> tuple[CanarySession, list[ShadowRecord]]:
    signature, kept = mlp_signature(), list[ShadowRecord]()
    production = Session(signature, Rogue(lambda n, x, y: y[:, :n].fill_(PRODUCTION)))
    results = Results(BEGUN, kept.append)
    second = Session(signature, canary)
    return CanarySession(production, second, SHARE, CanaryLimits(**limits), results), kept


def every_second_fails() -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    calls = itertools.count()

    def run(n: int, x: torch.Tensor, y: torch.Tensor) -> None:
        y[:, :n] = CANARY
        if next(calls) % 2:
            y[0, :n] = torch.nan
            raise RuntimeError("out of luck")

    return run


def called(
    session: CanarySession, calls: int, threads: int, call: Callable[[CanaryBinding, int], None]
) -> list[int]:
    """Calls the session from threads; the events, counted from 0, that the canary answered."""
    found: list[list[int]] = []

    def work(first: int) -> None:
        tags = session.collection("tags", ROWS)
        binding = session.bind(session.collection("jets", ROWS), tags)
        columns = [tags[name] for name in "xyz"]
        own = []
        for event in range(first, calls, threads):
            for column in columns:
                column[:] = -1
            call(binding, event)
            answers = {float(value) for column in columns for value in column}
            assert answers in ({PRODUCTION}, {CANARY}), (event, answers)
            if answers == {CANARY}:
                own.append(event)
        found.append(own)

    running = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(found) == threads  # none ended with an error
    return [event for own in found for event in own]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
