"""Fault campaign: a site's servers fail in every way while clients run events on them.

    python -m tests.serving.campaigns.faults --faults 100 --seed 1

Two real Tritons and a server that answers wrongly (campaigns/servers.py), each with its own seeded
list of faults; these overlap in time. A third of the requests are too long for one message. Clients
call `run` and `run_async`, with and without falling back; every event's number stands in each row
of its input and comes back in each row of its output. At the end all servers must be in use again;
no event may be lost, done twice, mixed with another or differ from the local session's answer; and
no output may have changed after it was returned. The seed decides the faults, their order and
lengths; which requests they hit depends on the machine's timing.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pipeline
from runtime.loader import load as load_here
from runtime.session.session import Session
from serving.client.options import HEADERS
from serving.site.options import Site
from serving.site.site_session import SiteSession
from tests.models import served, tagged
from tests.models.tagged import Tags
from tests.serving.campaigns.load import Client, Tally
from tests.serving.campaigns.servers import Behind, Liar, Triton
from tests.serving.grpc_server import Server
from tests.serving.proxy import Proxy

POLICY = {"deadline_s": 5.0, "attempt_s": 1.0, "health_s": 0.25, "queue_us": 50_000}
_RECOVER_S = 60.0
_ROWS = 40  # rows in a message; events have up to 60
_SHARES = {"direct": 0.15, "liar": 0.4}  # `behind` gets the rest


class Faults(threading.Thread):
    """A server's faults, one after the other; each kind comes once before any is repeated."""

    def __init__(
        self, server: str, faults: dict[str, Callable[[], None]], count: int,
        chance: random.Random, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(name=f"faults-{server}", daemon=True)
        self._faults, self._chance, self._say, self._server = faults, chance, say, server
        kinds = itertools.chain.from_iterable(
            chance.sample(sorted(faults), len(faults)) for _ in itertools.count()
        )
        self.planned = list(itertools.islice(kinds, count))
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread: an error of a fault itself ends it, and is kept in `error`."""
        try:
            for kind in self.planned:
                self._say(f"{self._server}: {kind}")
                self._faults[kind]()
                self.done[kind] += 1
                time.sleep(self._chance.uniform(0.1, 1.0))
        except BaseException as error:
            self.error = error
            raise


def run(
    plan: dict[str, int], seed: int, tags: Tags, folder: Path, say: Callable[[str], None]
) -> bool:
    """Runs the campaign; returns whether all was right. `say` gets each fault, and the counts.

    `plan` is the number of faults of each server; without `direct`, that server is not started.
    """
    begun = time.monotonic()
    chance = random.Random(seed)
    with ExitStack() as stack:
        local = load_here("tagged/1", registry=tags.registry)
        stack.callback(local.close)
        tritons: dict[str, Triton] = {}
        for name in sorted(plan.keys() - {"liar"}):
            tritons[name] = Triton(tags, folder / name, random.Random(chance.random()))
            stack.callback(tritons[name].stop)
        proxy = stack.enter_context(Proxy(tritons["behind"].ports.grpc))
        liar = Server(local, tags.deployed.service)
        address = stack.enter_context(liar.listening())
        behind = Behind(tritons["behind"], proxy, random.Random(chance.random()))
        kinds: dict[str, Any] = {
            "behind": behind.faults(),
            "liar": Liar(liar, random.Random(chance.random())).faults(),
        }
        if "direct" in tritons:
            kinds["direct"] = tritons["direct"].faults()
        sessions = (
            _session(tags, tritons, proxy, address, fall_back=True),
            _session(tags, tritons, proxy, address, fall_back=False),
        )
        for session in sessions:
            stack.callback(session.close)
        threads = [
            Faults(name, kinds[name], count, random.Random(f"{seed} {name}"), say)
            for name, count in plan.items()
        ]
        tally = Tally()
        clients = _clients(*sessions, local, tally, seed * 100)
        for thread in (*clients, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        recovered = all([_recovered(session) for session in sessions])
        stuck = _end(clients)
        _report(say, threads, sessions, tally)
        say(f"{time.monotonic() - begun:.0f} s")
    broken = [thread.error for thread in threads if thread.error]
    problems = {
        "clients stuck": stuck,
        "servers not taken in again": not recovered,
        "faults that failed": broken,
    }
    for problem, extent in problems.items():
        if extent:
            say(f"{problem}: {extent}")
    return tally.clean and not any(problems.values())


def _clients(
    falling_back: SiteSession, waiting: SiteSession, local: Session, tally: Tally, seed: int
) -> list[Client]:
    """Clients of both sessions. One has calls ahead; one waits for the servers."""
    usual = [
        Client(falling_back, local, tally, seed + i, ahead=i == 3, patient=False) for i in range(4)
    ]
    return [*usual, Client(waiting, local, tally, seed + 4, ahead=False, patient=True)]


def _end(clients: Sequence[Client]) -> int:
    """End the clients; returns how many still run after a minute each."""
    for client in clients:
        client.ended.set()
    for client in clients:
        client.join(60)
    return sum(client.is_alive() for client in clients)


def _plan(faults: int) -> dict[str, int]:
    """The number of faults of each server, at least one."""
    counts = {name: max(1, int(faults * share)) for name, share in _SHARES.items()}
    return {**counts, "behind": max(1, faults - sum(counts.values()))}


def _session(
    tags: Tags, tritons: dict[str, Triton], proxy: Proxy, liar: str, *, fall_back: bool
) -> SiteSession:
    """A session of a site with the Tritons and the liar, and with a local session."""
    servers: list[dict[str, Any]] = [
        {
            "name": name,
            "url": proxy.url if name == "behind" else triton.server.url,
            "metrics": triton.server.endpoints()["metrics"],
            "shared_memory": name == list(tritons)[-1],  # `direct`, if it runs
        }
        for name, triton in tritons.items()
    ]
    servers.append({"name": "liar", "url": liar})
    for server in servers:
        server["message_bytes"] = HEADERS + _ROWS * tagged.ROW_BYTES
    described = {"servers": servers, "local": {"fall_back": fall_back}, "policy": POLICY}
    return pipeline.load("tagged/1", site=Site.model_validate(described), registry=tags.registry)


def _recovered(session: SiteSession) -> bool:
    """Whether every server answers requests again, while the load continues."""
    before = {place.name: place.answered for place in session.report().places}
    deadline = time.monotonic() + _RECOVER_S
    while time.monotonic() < deadline:
        places = session.report().places
        if all(place.state == "good" and place.answered > before[place.name] for place in places):
            return True
        time.sleep(0.1)
    return False


def _report(
    say: Callable[[str], None], threads: list[Faults], sessions: Sequence[SiteSession], tally: Tally
) -> None:
    """Says how often each fault came, and what the sessions and clients counted."""
    done = Counter[str]()
    for thread in threads:
        done += thread.done
    say(f"faults {done.total()}: " + ", ".join(f"{fault} {n}" for fault, n in sorted(done.items())))
    for label, session in zip(("falling back", "not falling back"), sessions, strict=True):
        report = session.report()
        say(
            f"{label}: fell back {report.fell_back}, retried {report.retried}, "
            f"nowhere {report.nowhere}"
        )
        for place in report.places:
            failed = ", ".join(f"{kind} {n}" for kind, n in sorted(place.failed.items()))
            say(f"  {place.name}: answered {place.answered}; failed: {failed or 'none'}")
    for line in tally.lines():
        say(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", action="store_true", help="print each change of a server's state")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="soa-faults-") as folder:
        model, signature = tagged.Tagged(), tagged.SIGNATURE
        bundle = served.make_bundle(Path(folder) / "first", tagged.NAME, model, signature)
        (Path(folder) / "tagged").mkdir()
        tags = tagged.make(Path(folder) / "tagged", bundle)
        plan = _plan(options.faults)
        clean = run(plan, options.seed, tags, Path(folder), lambda text: print(text, flush=True))
    print("clean" if clean else "NOT CLEAN")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
