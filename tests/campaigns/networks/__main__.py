"""Networks as people have them, from a file to production by the documents alone.

    python -m tests.campaigns.networks                    # all: about an hour on two cores
    python -m tests.campaigns.networks Tagger GravNet --work /tmp/networks
    python -m tests.campaigns.networks --compile      # by `pipeline.compile`, in this process

For each network: its weights and its data lie in files; `pipeline init` runs on a terminal where
Enter answers every question; then `run`, `promote` and `load`. All rows of the file go through the
session, and the answers are compared with the network's own. A network whose package is not
installed is left out, and named. A line: whether it went in at the first try (or what was said),
questions, engine, whether independence is shown or tried, seconds of init and run, and the largest
difference beside the largest answer.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.campaigns.networks.cases import CASES
from tests.campaigns.networks.walk import Walked, compiled, table, walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--work", type=Path, help="keep the folders here")
    parser.add_argument("--compile", action="store_true", help="in memory, without a file")
    parser.add_argument("--table", type=Path, help="write a table in Markdown")
    options = parser.parse_args()
    if unknown := {*options.names} - {*CASES}:
        parser.error(f"{unknown.pop()}: one of {', '.join(CASES)}")
    walked: list[Walked] = []
    with tempfile.TemporaryDirectory(prefix="networks-") as temporary:
        for name in options.names or CASES:
            case = CASES[name]
            if missing := [each for each in case.needs if find_spec(each) is None]:
                print(f"{name}: left out, {', '.join(missing)} is not installed", flush=True)
                continue
            folder = (options.work or Path(temporary)) / name
            walked.append(compiled(case) if options.compile else walk(case, folder))
            print(walked[-1].line(), flush=True)
    if options.table:
        options.table.write_text(table(walked, CASES), encoding="utf-8")
    right = [each for each in walked if each.right]
    print(f"{len(right)} of {len(walked)} at the first try")


if __name__ == "__main__":
    main()
