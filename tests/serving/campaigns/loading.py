"""Load campaign: versions are loaded into a Triton and unloaded while clients run events there.

    python -m tests.serving.campaigns.loading --rounds 20

One real Triton serves `other/1` and one or both of `tagged/1` and `tagged/2`. In each round the
missing version of `tagged` is loaded beside the present one; a version that the server cannot load
is refused; a third model comes and goes; and the version that was there first is unloaded. Clients
send events all the time: sessions on `other`; sessions on the version of `tagged` that is there,
which end before it is unloaded; sessions of a site on either version, which fall back meanwhile;
and clients that know only Triton's protocol and ask for any version. Every event's number stands in
each row of its input and comes back in each row of its output. No event may be lost, done twice,
mixed with another, or differ from the local session's answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient import grpc as triton_grpc

import pipeline
from pipeline.deployment import load_on, unload_from
from registry.store.registry import Registry
from runtime.loader import load as load_here
from runtime.session.session import Session
from serving.errors import RefusedError
from serving.local.triton import EXPLICIT, ServerOptions, TritonServer
from serving.remote.remote_session import RemoteSession
from serving.site.options import Site
from tests.models import served, tagged
from tests.models.project import PASSED, resealed
from tests.models.tagged import NAME, Event, Tags
from tests.serving.campaigns.load import Client, Tally

POLICY = {"deadline_s": 60.0, "attempt_s": 20.0, "health_s": 0.25, "queue_us": 1e9}
REMOTE = pipeline.RemoteOptions(deadline_s=60.0)
ELSEWHERE = "cpu/aarch64"
_BESIDE_S = 1.0  # how long both versions are served, at least


def registered(tags: Tags, folder: Path) -> str:
    """Registers `other/1` and `passing/1`, and a version of `tagged` for a CPU that no host here
    has; returns the last one's name."""

    def register(name: str, edit: Callable[[Path, dict[str, Any]], None]) -> str:
        bundle = resealed(tags.bundle, folder / name, edit)
        return tags.registry.promote(tags.registry.register(bundle), "production", PASSED).ref

    def add_target(_: Path, manifest: dict[str, Any]) -> None:
        (record,) = manifest["targets"].values()
        manifest["targets"][ELSEWHERE] = record

    register("other", lambda _, manifest: manifest.update(name="other"))
    register("passing", lambda _, manifest: manifest.update(name="passing"))
    return register(NAME, add_target)


class AnyVersion(threading.Thread):
    """A client that knows only Triton's protocol. It asks for any version of `tagged`."""

    def __init__(self, url: str, local: Session, tally: Tally, first: int) -> None:
        super().__init__(name=f"any-{first}", daemon=True)
        self._url, self._local, self._tally, self._number = url, local, tally, first
        self.by_version: Counter[str] = Counter()
        self.ended = threading.Event()

    def run(self) -> None:
        client = triton_grpc.InferenceServerClient(self._url.removeprefix("triton://"))
        while not self.ended.is_set():
            self._number += 1
            event = Event.make(self._local, self._number, 20)
            with self._tally.lock:
                self._tally.asked.add(event.number)
            try:
                answer = client.infer(NAME, [_input(event, name) for name in ("event", "x", "y")])
            except Exception as error:  # every one is a request that was lost
                with self._tally.lock:
                    self._tally.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                continue
            self.by_version[answer.get_response().model_version] += 1
            self._local.run(event.given, event.found)
            numbers, scores = (answer.as_numpy(f"found.{k}")[:, 0] for k in ("event", "score"))
            _, expected = event.answers()
            with self._tally.lock:
                self._tally.answered.update(set(numbers.tolist()))
                self._tally.mixed += bool((numbers != event.number).any())
                self._tally.wrong += not np.allclose(scores, expected.numpy(), rtol=1e-4, atol=1e-5)
        client.close()


def _input(event: Event, name: str) -> Any:
    """A column of the event, as Triton's client sends it."""
    values = np.asarray(event.given[name])[:, None].copy()
    kind = "INT64" if name == "event" else "FP32"
    column = triton_grpc.InferInput(f"given.{name}", list(values.shape), kind)
    column.set_data_from_numpy(values)
    return column


class Load:
    """The clients, and which of them run on a version of `tagged` itself."""

    def __init__(self, url: str, registry: Registry, local: Session, stack: ExitStack) -> None:
        self.tally = Tally()
        self._url, self._registry, self._local, self._stack = url, registry, local, stack
        self._clients: list[Any] = []
        self._seeds = 0
        self._of_version: dict[int, list[Client]] = {}

    def start(self) -> None:
        """Starts the clients of `other`, those of sites on both versions, and those of any."""
        self._start(self._remote("other/1"))
        for number in (1, 2):
            servers = [{"name": "triton", "url": self._url}]
            site = Site.model_validate({"servers": servers, "policy": POLICY})
            ref = f"{NAME}/{number}"
            self._start(self._opened(pipeline.load(ref, site=site, registry=self._registry)))
        for first in (10**9, 2 * 10**9):  # numbers that no other client uses
            client = AnyVersion(self._url, self._local, self.tally, first)
            self._clients.append(client)
            client.start()

    def on_version(self, number: int) -> None:
        self._of_version[number] = self._start(self._remote(f"{NAME}/{number}"))

    def off_version(self, number: int) -> None:
        _end(self._of_version.pop(number))

    def end(self) -> list[str]:
        """Ends all clients; returns the names of those that hang."""
        _end(self._clients)
        return [client.name for client in self._clients if client.is_alive()]

    def by_version(self) -> dict[str, int]:
        """The requests to any version, by the version that answered."""
        counts = Counter[str]()
        for client in self._clients:
            if isinstance(client, AnyVersion):
                counts += client.by_version
        return dict(counts)

    def _remote(self, ref: str) -> RemoteSession:
        return self._opened(
            pipeline.load(ref, device=self._url, registry=self._registry, remote=REMOTE)
        )

    def _opened(self, session: Any) -> RemoteSession:
        assert isinstance(session, RemoteSession)
        self._stack.callback(session.close)
        return session

    def _start(self, session: RemoteSession) -> list[Client]:
        """Two clients of a session: one waits for each answer, one sends several at once."""
        clients = []
        for ahead in (False, True):
            self._seeds += 1
            client = Client(
                session, self._local, self.tally, self._seeds, ahead=ahead, patient=False
            )
            clients.append(client)
            client.start()
        self._clients += clients
        return clients


def _end(clients: list[Any]) -> None:
    for client in clients:
        client.ended.set()
    for client in clients:
        client.join(120)


def refusal(registry: Registry, ref: str, url: str) -> str:
    """The one line about a version that the server cannot load; empty if it loads it."""
    try:
        load_on(registry, ref, url, target=ELSEWHERE)
    except RefusedError as error:
        return str(error)
    return ""


@contextmanager
def _log_after_an_error(server: TritonServer, say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        say("the server's last lines:\n" + "\n".join(server.log().splitlines()[-40:]))
        raise


def run(rounds: int, tags: Tags, folder: Path, say: Callable[[str], None]) -> bool:
    """Runs the campaign in a new folder; returns whether all was right. `say` gets each step, and
    the counts."""
    begun, registry = time.monotonic(), tags.registry
    foreign = registered(tags, folder)
    (folder / "empty").mkdir()
    unexpected = []
    with ExitStack() as stack:
        local = load_here(f"{NAME}/1", registry=registry)
        stack.callback(local.close)
        server = TritonServer(folder / "empty", ServerOptions(extra=EXPLICIT))
        url = stack.enter_context(server).url
        stack.enter_context(_log_after_an_error(server, say))
        for ref in ("other/1", f"{NAME}/1"):
            load_on(registry, ref, url)
        load = Load(url, registry, local, stack)
        load.start()
        load.on_version(1)
        for step in range(rounds):
            old, new = step % 2 + 1, 2 - step % 2
            versions = load_on(registry, f"{NAME}/{new}", url).versions
            load.on_version(new)
            deadline = time.monotonic() + _BESIDE_S
            reason = refusal(registry, foreign, url)
            load_on(registry, "passing/1", url)
            unload_from(registry, "passing/1", url)
            time.sleep(max(0.0, deadline - time.monotonic()))
            load.off_version(old)
            _, left = unload_from(registry, f"{NAME}/{old}", url)
            say(f"round {step + 1}: {versions} were served, then {left}; refused: {reason}")
            if (versions, left) != ([1, 2], [new]) or not reason:
                unexpected.append(step)
        stuck = load.end()
        tally = load.tally
    say(f"requests to any version, by the version that answered: {load.by_version()}")
    for line in tally.lines():
        say(line)
    say(f"{time.monotonic() - begun:.0f} s")
    if stuck:
        say(f"clients stuck: {stuck}")
    if unexpected:
        say(f"rounds that went otherwise: {unexpected}")
    return tally.clean and not stuck and not unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-loading-") as name:
        folder = Path(name)
        bundle = served.make_bundle(folder / "first", NAME, tagged.Tagged(), tagged.SIGNATURE)
        (folder / "tagged").mkdir()
        tags = tagged.make(folder / "tagged", bundle)
        (folder / "run").mkdir()
        clean = run(options.rounds, tags, folder / "run", lambda text: print(text, flush=True))
    print("clean" if clean else "NOT CLEAN")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
