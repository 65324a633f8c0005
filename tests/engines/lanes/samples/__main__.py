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
from dataclasses import asdict, dataclass, replace
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
    of_operators = [
        Task(title_of(info), lambda info=info: cases_of(info, samples, seed))  # type: ignore[misc]
        for info in operators()
    ]
    modes = [Task(f"modes of {name}", lambda name=name: cases_of_modes(name)) for name in MODES]  # type: ignore[misc]
    return of_operators, modes


def examined(group: Sequence[Task], way: Way) -> list[dict[str, Any]]:
    """What the campaign finds out about each task, as JSON. Their cases are compiled together."""
    results: dict[str, dict[str, Any]] = {}
    cases: list[Case] = []
    owners: dict[str, str] = {}
    for task in group:
        results[task.title] = {"operator": task.title, "cases": []}
        try:
            own = task.cases()
        except NoSampleError as why:
            results[task.title]["no_sample"] = str(why)
            continue
        owners.update((case.title, task.title) for case in own)
        cases += own
    with quiet_torch():
        for verdict in judged(cases, way):
            results[owners[verdict.case]]["cases"].append(asdict(verdict))
    return list(results.values())


def _child(group: Sequence[Task], way: Way, answer: Connection) -> None:
    """Sends the results of `examined`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # torch prints graphs
    os.dup2(nowhere, 2)
    answer.send(examined(group, way))


def apart(group: Sequence[Task], way: Way) -> list[dict[str, Any]]:
    """`examined` in a process of its own. If this dies, each task gets a process of its own."""
    processes = multiprocessing.get_context("fork")
    answer, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_child, args=(group, way, theirs))
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
        return [result for task in group for result in apart([task], way)]
    verdict = {"case": group[0].title, "what": "error", "why": why, "special": []}
    return [{"operator": group[0].title, "cases": [verdict]}]


def campaign(
    waiting: Sequence[Task], options: argparse.Namespace, way: Way, kept: dict[str, Any]
) -> None:
    """Examines the tasks, and writes each result to the file of results. A GPU does not work in a
    child of this process, in which torch has opened it."""
    examine = apart if way.device == "cpu" else examined
    for begin in range(0, len(waiting), options.together):
        for result in examine(waiting[begin : begin + options.together], way):
            kept[result["operator"]] = result
            print(table.line(result), flush=True)
        options.out.write_text(json.dumps(list(kept.values()), indent=1))


def main() -> None:
    """Runs the campaign; the status is 1 if an operator is wrong or an error."""
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    operators, modes = tasks(options.samples, options.seed)
    by_title = {task.title: task for task in (*operators, *modes)}
    if unknown := set(options.operators or ()) - set(by_title):
        parser.error(f"torch has no samples of {', '.join(sorted(unknown))}")
    known = json.loads(options.out.read_text()) if options.out.is_file() else []
    kept = {result["operator"]: result for result in known}
    way = Way(options.engine, options.capture or options.engine != "lanes", options.device)
    examined([by_title["abs"]], replace(way, device="cpu"))  # loads what each process needs
    names = options.operators or [name for name in by_title if name not in kept]
    campaign([by_title[name] for name in names], options, way, kept)
    of_operators, of_modes = (
        [kept[task.title] for task in tried if task.title in kept] for tried in (operators, modes)
    )
    if options.table:
        missing = len(operators) - len(of_operators)
        options.table.write_text(table.page(of_operators, of_modes, missing, options.engine))
    counts = table.counts([*of_operators, *of_modes])
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    sys.exit(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    main()
