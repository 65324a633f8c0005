"""Compares each operator that torch tests itself with, on torch's own samples, with eager torch.

    python -m tests.engines.lanes.samples --table docs/reference/operators.md

Each operator runs in a process of its own. Wrong answers and errors end the campaign with a
non-zero status. `--out` keeps the results; a second run goes on with those that it has, except for
the operators named by `--operators`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from engines.exported import quiet_torch
from tests.engines.lanes.samples import table
from tests.engines.lanes.samples.cases import Case, NoSampleError, cases_of, title_of
from tests.engines.lanes.samples.judging import judged
from tests.engines.lanes.samples.modes import MODES, cases_of_modes

_PATIENCE_S = 1200


@dataclass(frozen=True)
class Task:
    """An operator, or a function with modes, and what makes its cases."""

    title: str
    cases: Callable[[], Sequence[Case]]


def tasks(samples: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Those of torch's operators, and those of functions with modes."""
    from torch.testing._internal.common_methods_invocations import op_db

    operators = [
        Task(title_of(each), lambda each=each: cases_of(each, samples, seed))  # type: ignore[misc]
        for each in op_db
    ]
    modes = [Task(f"modes of {name}", lambda name=name: cases_of_modes(name)) for name in MODES]  # type: ignore[misc]
    return operators, modes


def examined(task: Task, engine: str) -> dict[str, Any]:
    """What the campaign finds out about a task, as JSON."""
    begun = time.monotonic()
    found: dict[str, Any] = {"operator": task.title, "cases": []}
    with quiet_torch():
        try:
            found["cases"] = [asdict(verdict) for verdict in judged(task.cases(), engine)]
        except NoSampleError as why:
            found["no_sample"] = str(why)
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def _child(task: Task, engine: str, answer: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # torch prints graphs
    os.dup2(nowhere, 2)
    answer.send(examined(task, engine))


def _failed(task: Task, why: str) -> dict[str, Any]:
    verdict = {"case": task.title, "what": "error", "why": why, "special": []}
    return {"operator": task.title, "cases": [verdict], "seconds": 0}


class _Running:
    """A task's process."""

    def __init__(self, task: Task, engine: str) -> None:
        processes = multiprocessing.get_context("fork")
        self.task, self.begun = task, time.monotonic()
        self.answer, theirs = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_child, args=(task, engine, theirs))
        self.process.start()
        theirs.close()

    def result(self) -> dict[str, Any] | None:
        """What it found; None if it is still at work."""
        if self.answer.poll():
            try:
                found: dict[str, Any] = self.answer.recv()
            except EOFError:
                self.process.join()
                found = _failed(self.task, f"its process ended with {self.process.exitcode}")
        elif time.monotonic() - self.begun > _PATIENCE_S:
            self.process.kill()
            found = _failed(self.task, f"no result in {_PATIENCE_S} s")
        else:
            return None
        self.process.join()
        return found


def campaign(waiting: list[Task], given: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Examines the tasks, and writes each result to the file of results."""
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < given.jobs:
            running.append(_Running(waiting.pop(0), given.engine))
        wait([each.answer for each in running], timeout=5)
        for each in list(running):
            if (found := each.result()) is not None:
                running.remove(each)
                kept[found["operator"]] = found
                given.out.write_text(json.dumps(list(kept.values()), indent=1))
                print(table.line(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operators", nargs="*", help="their names, as in the table; else all")
    parser.add_argument("--engine", default="lanes", help="lanes, aoti, onnxruntime or exported")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("operators.json"), help="the results")
    parser.add_argument("--table", type=Path, help="write the table of results here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    operators, modes = tasks(given.samples, given.seed)
    every = {task.title: task for task in (*operators, *modes)}
    if unknown := set(given.operators or ()) - set(every):
        parser.error(f"torch has no samples of {', '.join(sorted(unknown))}")
    known = json.loads(given.out.read_text()) if given.out.is_file() else []
    kept = {each["operator"]: each for each in known}
    examined(every["abs"], given.engine)  # loads what each process needs
    names = given.operators or [name for name in every if name not in kept]
    campaign([every[name] for name in names], given, kept)
    results = [[kept[task.title] for task in each if task.title in kept] for each in (operators, modes)]
    if given.table:
        given.table.write_text(table.page(results[0], results[1], given.engine))
    counts = table.counts([*results[0], *results[1]])
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    sys.exit(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
