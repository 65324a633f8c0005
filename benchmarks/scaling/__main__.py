"""`python -m benchmarks.scaling [REF]`: measure, check the model with it, and predict.

It prints the tables, writes them into docs/results/scaling.md and draws the plots beside it. REF is
jet-tagger@production (`make demo`) by default. It takes about three minutes on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.scaling.answers import answer
from benchmarks.scaling.records import Measured
from benchmarks.scaling.report import PAGE, report
from soa.errors import SoaPipelineError

STORED = Path(__file__).parent / "measured.json"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("ref", nargs="?", default="jet-tagger@production")
    parser.add_argument("--from", dest="stored", type=Path, help="a measurement made before")
    parser.add_argument("--to", type=Path, default=STORED, help="where a new one is stored")
    parser.add_argument(
        "--envoy",
        help="Envoy's binary, to measure it too; else as serving/local/fleet.py finds one",
    )
    parser.add_argument("--no-docs", action="store_true", help="leave the page as it is")
    given = parser.parse_args(arguments)
    try:
        measured = _measured(given.ref, given.to, given.envoy, given.stored)
    except (SoaPipelineError, OSError, ValueError, RuntimeError) as error:
        print(f"benchmarks.scaling: {error}", file=sys.stderr)
        return 1
    report(answer(measured, _say), None if given.no_docs else PAGE)
    return 0


def _measured(ref: str, into: Path, envoy: str | None, stored: Path | None) -> Measured:
    if stored is not None:
        return Measured.load(stored)
    from benchmarks.scaling.measure import measure
    from registry.store.registry import Registry
    from serving.errors import ServerError
    from serving.local.fleet import find_envoy

    binary = None
    try:
        binary = find_envoy(envoy)
    except ServerError as error:
        if envoy is not None:
            raise
        _say(f"a proxy is not measured: {error}")

    with tempfile.TemporaryDirectory(prefix="soa-bench-") as folder:
        found = measure(Registry(), ref, Path(folder), envoy=binary, say=_say)
    found.save(into)
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
