"""Networks as people have them, from a file to production by the documents alone.

    python -m tests.campaigns.networks                    # all: an hour and a half on two cores
    python -m tests.campaigns.networks Tagger hzz --work /tmp/networks
    python -m tests.campaigns.networks --compile      # by `pipeline.compile`, in this process

For each network: its weights and its data lie in files; `pipeline init` runs on a terminal where
Enter answers every question; then `run`, `promote` and `load`. All rows of the file go through the
session, and the answers are compared with the network's own. Names in small letters have real
files (`files.py`). A network whose package or file is missing is left out, and named. A line:
whether it went in at the first try (or what was said), questions, engine, whether independence is
shown or tried, seconds of init and run, and the largest difference beside the largest answer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.campaigns.networks.cases import CASES
from tests.campaigns.networks.files import FILES
from tests.campaigns.networks.walk import Walked, compiled, owned, table, walk

MADE: dict[str, Callable[..., Any]] = {name: case.made for name, case in CASES.items()}
MADE |= FILES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MADE)}")
    parser.add_argument("--work", type=Path, help="keep the folders here")
    parser.add_argument("--compile", action="store_true", help="in memory, without a file")
    parser.add_argument("--table", type=Path, help="write a table in Markdown")
    options = parser.parse_args()
    if unknown := {*options.names} - {*MADE}:
        parser.error(f"{unknown.pop()}: one of {', '.join(MADE)}")
    walked: list[Walked] = []
    with tempfile.TemporaryDirectory(prefix="networks-") as temporary:
        for name in options.names or (CASES if options.compile else MADE):
            folder = (options.work or Path(temporary)) / name
            folder.mkdir(parents=True)
            try:
                walked.append(went(name, folder, in_memory=options.compile))
            except (ImportError, FileNotFoundError) as missing:
                print(f"{name}: left out, {missing}", flush=True)
                continue
            print(walked[-1].line(), flush=True)
    if options.table:
        options.table.write_text(table(walked, MADE), encoding="utf-8")
    right = [each for each in walked if each.right]
    print(f"{len(right)} of {len(walked)} at the first try")


def went(name: str, folder: Path, *, in_memory: bool) -> Walked:
    if name in FILES:
        return walk(name, FILES[name](folder), folder)
    case = CASES[name]
    for each in case.needs:
        if find_spec(each) is None:
            raise ModuleNotFoundError(f"{each} is not installed")
    return compiled(case) if in_memory else walk(name, owned(case, folder), folder)


if __name__ == "__main__":
    main()
