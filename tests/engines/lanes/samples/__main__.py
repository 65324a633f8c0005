"""Compares each operator that torch tests itself with, on torch's own samples, with eager torch.

    python -m tests.engines.lanes.samples --out operators.json --table docs/reference/operators.md

An operator runs in a process of its own. It is *right* or *not applicable*, with a reason; wrong
answers and errors end the campaign with a non-zero status. `--resume` keeps what an earlier run
wrote, except for the operators named by `--operators`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from engines.exported import quiet_torch
from tests.engines.lanes.samples import table
from tests.engines.lanes.samples.cases import NoSampleError, cases_of, title_of
from tests.engines.lanes.samples.judging import judged

_PATIENCE_S = 400


def examined(operator: Any, engine: str, most: int, seed: int) -> dict[str, Any]:
    """What the campaign finds out about an operator, as JSON."""
    begun = time.monotonic()
    found: dict[str, Any] = {"operator": title_of(operator), "cases": []}
    with quiet_torch():
        try:
            cases = [case for cases in cases_of(operator, most, seed) for case in cases]
            found["cases"] = [asdict(verdict) for verdict in judged(cases, engine)]
        except NoSampleError as why:
            found["not_tried"] = str(why)
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def _child(operator: Any, given: argparse.Namespace, answer: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # torch prints graphs
    os.dup2(nowhere, 2)
    answer.send(examined(operator, given.engine, given.samples, given.seed))


def _failed(operator: Any, why: str) -> dict[str, Any]:
    verdict = {"case": title_of(operator), "what": "error", "why": why, "special": []}
    return {"operator": title_of(operator), "cases": [verdict], "seconds": 0}


class _Running:
    """An operator's process."""

    def __init__(self, operator: Any, given: argparse.Namespace) -> None:
        processes = multiprocessing.get_context("fork")
        self.operator, self.begun = operator, time.monotonic()
        self.answer, theirs = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_child, args=(operator, given, theirs))
        self.process.start()
        theirs.close()

    def result(self) -> dict[str, Any] | None:
        """What it found; None if it is still at work."""
        if self.answer.poll():
            try:
                found: dict[str, Any] = self.answer.recv()
            except EOFError:
                self.process.join()
                found = _failed(self.operator, f"its process ended by {self.process.exitcode}")
        elif time.monotonic() - self.begun > _PATIENCE_S:
            self.process.kill()
            found = _failed(self.operator, f"no result in {_PATIENCE_S} s")
        else:
            return None
        self.process.join()
        return found


def campaign(operators: list[Any], given: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Examines the operators and writes each result to the file of results."""
    waiting, running = list(reversed(operators)), list[_Running]()
    while waiting or running:
        while waiting and len(running) < given.jobs:
            running.append(_Running(waiting.pop(), given))
        wait([each.answer for each in running], timeout=5)
        for each in list(running):
            if (found := each.result()) is not None:
                running.remove(each)
                kept[found["operator"]] = found
                given.out.write_text(json.dumps(list(kept.values()), indent=1))
                print(table.line(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operators", nargs="*", help="their names; all without it")
    parser.add_argument("--engine", default="lanes", help="lanes, aoti, onnxruntime or exported")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="a file of results to go on with")
    parser.add_argument("--out", type=Path, default=Path("operators.json"))
    parser.add_argument("--table", type=Path, help="write the table of results here")
    given = parser.parse_args()
    from torch.testing._internal.common_methods_invocations import op_db

    known = json.loads(given.resume.read_text()) if given.resume else []
    kept = {each["operator"]: each for each in known}
    torch.set_num_threads(1)
    examined(next(each for each in op_db if each.name == "abs"), "lanes", 1, 0)  # loads the rest
    names = given.operators or [title_of(each) for each in op_db if title_of(each) not in kept]
    campaign([each for each in op_db if title_of(each) in names], given, kept)
    results = [kept[name] for name in dict.fromkeys(map(title_of, op_db)) if name in kept]
    if given.table:
        given.table.write_text(table.page(results, given.engine))
    counts = table.counts(results)
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    sys.exit(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
