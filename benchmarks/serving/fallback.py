"""The cost of a site's fall-back to the local CPU: `python -m benchmarks.serving.fallback`.

The same version runs on this CPU, opened directly and through a site whose only server does not
answer. A bound call and a call that binds first are timed. Needs the demo in the registry
(`make demo`).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.table import SPREAD, Panel, print_machine, print_panels, race_panel
from pipeline.loading import load
from registry.store.registry import Registry
from runtime.opening import Opening, open_version
from runtime.session.session import Session
from serving.site.options import Site, SiteServer
from soa.errors import SoaPipelineError
from stages.reference.answers import Arrays, Reference, filled_collections
from stages.timing import race

CAPTION = f"Local CPU fall-back against a local session; ratios to it; {SPREAD}."
_DIRECT = "local session, bound"
_SIZES = (1, 10, 100, 1000)


def main(ref: str) -> int:
    print_machine()
    registry = Registry()
    try:
        bundle = open_version(Opening(ref, registry=registry)).bundle
        inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
        direct = load(ref, registry=registry)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens
            url = f"triton://127.0.0.1:{nobody.getsockname()[1]}"
            where = Site(servers=(SiteServer(name="away", url=url),))
            falling = load(ref, site=where, registry=registry)
            most = min(each.max for each in direct.signature.ranges.values())
            sizes = [n for n in _SIZES if n <= most]
            panel = measure(direct, falling, inputs, sizes, seconds=2.0)
            falling.close()
        direct.close()
    except SoaPipelineError as error:
        print(f"benchmarks.serving.fallback: {error}", file=sys.stderr)
        return 1
    print_panels(CAPTION, [panel])
    return 0


def measure(
    direct: Session, falling: Session, inputs: Arrays, sizes: Sequence[int], seconds: float
) -> Panel:
    """Time both sessions, `seconds` for each size; no server answers the requests of `falling`."""
    races = {}
    for n in sizes:
        runs: dict[str, Callable[[], object]] = {}
        for name, session in (("local session", direct), ("fall-back", falling)):
            case = dict.fromkeys(session.signature.dims, n)
            given, written = filled_collections(session.signature, inputs, case, session.device)
            runs[f"{name}, bound"] = session.bind(given, written)
            runs[f"{name}, binding each time"] = partial(session.run, given, written)
        races[n] = race(runs, seconds)
    return race_panel("", "rows", races, _DIRECT)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["jet-tagger@production"])))
