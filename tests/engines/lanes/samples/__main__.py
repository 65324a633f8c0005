"""Compares each operator that torch tests itself with, on torch's own samples, with eager torch.

    python -m tests.engines.lanes.samples --table docs/reference/operators.md

Some operators together run in a process of their own. Wrong answers and errors end the campaign
with a non-zero status. `--out` keeps the results; a second run goes on with those that it has,
except for the operators named by `--operators`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engines.exported import quiet_torch
from tests.engines.lanes.samples import table
from tests.engines.lanes.samples.cases import Case, NoSampleError, cases_of, title_of
from tests.engines.lanes.samples.judging import Way, judged
from tests.engines.lanes.samples.modes import MODES, cases_of_modes
from tests.engines.lanes.samples.operators import operators

_PATIENCE_S = 1800


@dataclass(frozen=True)
class Task:
    """An operator, or a function with modes, and what makes its cases."""

    title: str
    cases: Callable[[], Sequence[Case]]


def tasks(samples: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Those of torch's operators, and those of functions with modes."""
    found = [
        Task(title_of(each), lambda each=each: cases_of(each, samples, seed))  # type: ignore[misc]
        for each in operators()
    ]
    modes = [Task(f"modes of {name}", lambda name=name: cases_of_modes(name)) for name in MODES]  # type: ignore[misc]
    return found, modes


def examined(group: Sequence[Task], way: Way) -> list[dict[str, Any]]:
    """What the campaign finds out about each task, as JSON. Their cases are compiled together."""
    found: dict[str, dict[str, Any]] = {}
    every: list[Case] = []
    owners: dict[str, str] = {}
    for task in group:
        found[task.title] = {"operator": task.title, "cases": []}
        try:
            own = task.cases()
        except NoSampleError as why:
            found[task.title]["no_sample"] = str(why)
            continue
        owners.update((case.title, task.title) for case in own)
        every += own
    with quiet_torch():
        for verdict in judged(every, way):
            found[owners[verdict.case]]["cases"].append(asdict(verdict))
    return list(found.values())


def _child(group: Sequence[Task], given: argparse.Namespace, answer: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # torch prints graphs
    os.dup2(nowhere, 2)
    answer.send(examined(group, Way(given.engine, given.capture, given.device)))


def apart(group: Sequence[Task], given: argparse.Namespace) -> list[dict[str, Any]]:
    """`examined` in a process of its own. If this dies, each task gets a process of its own."""
    processes = multiprocessing.get_context("fork")
    answer, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_child, args=(group, given, theirs))
    process.start()
    theirs.close()
    try:
        if answer.poll(_PATIENCE_S):
            return list(answer.recv())
        why = f"no result in {_PATIENCE_S} s"
    except EOFError:
        process.join()
        why = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if len(group) > 1:
        return [result for task in group for result in apart([task], given)]
    verdict = {"case": group[0].title, "what": "error", "why": why, "special": []}
    return [{"operator": group[0].title, "cases": [verdict]}]


def campaign(waiting: Sequence[Task], given: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Examines the tasks, and writes each result to the file of results. A GPU does not work in a
    child of this process, in which torch has opened it."""
    way = Way(given.engine, given.capture, given.device)
    for begin in range(0, len(waiting), given.together):
        group = waiting[begin : begin + given.together]
        for found in apart(group, given) if given.device == "cpu" else examined(group, way):
            kept[found["operator"]] = found
            print(table.line(found), flush=True)
        given.out.write_text(json.dumps(list(kept.values()), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operators", nargs="*", help="their names, as in the table; else all")
    parser.add_argument("--engine", default="lanes", help="lanes, aoti, onnxruntime or exported")
    parser.add_argument("--device", default="cpu", help="or cuda:0")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=10, help="so many are one artifact")
    parser.add_argument(
        "--capture", action="store_true", help="with torch.export; other engines always do"
    )
    parser.add_argument("--out", type=Path, default=Path("operators.json"), help="the results")
    parser.add_argument("--table", type=Path, help="write the table of results here")
    given = parser.parse_args()
    given.capture |= given.engine != "lanes"
    torch.set_num_threads(1)
    operators, modes = tasks(given.samples, given.seed)
    every = {task.title: task for task in (*operators, *modes)}
    if unknown := set(given.operators or ()) - set(every):
        parser.error(f"torch has no samples of {', '.join(sorted(unknown))}")
    known = json.loads(given.out.read_text()) if given.out.is_file() else []
    kept = {each["operator"]: each for each in known}
    examined([every["abs"]], Way(given.engine, given.capture))  # loads what each process needs
    names = given.operators or [name for name in every if name not in kept]
    campaign([every[name] for name in names], given, kept)
    results = [
        [kept[task.title] for task in each if task.title in kept] for each in (operators, modes)
    ]
    if given.table:
        given.table.write_text(
            table.page(results[0], results[1], len(operators) - len(results[0]), given.engine)
        )
    counts = table.counts([*results[0], *results[1]])
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    sys.exit(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
