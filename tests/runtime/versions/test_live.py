"""A live session moves to a newly promoted version: each event runs once, on one version."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import RunError
from pipeline.loading import load
from registry.bundle.bundle import Bundle
from registry.errors import NotFoundError, RegistryUnavailableError
from registry.store.host_cache import Cache, cache_root
from registry.store.registry import Registry
from runtime.checked.test_mode import CheckedSession
from runtime.devices.everywhere import MultiDeviceSession
from runtime.devices.scheduler import Scheduler
from runtime.errors import BindError, LoadError
from runtime.session.session import Session
from runtime.versions.live import LiveSession, Watcher
from soa.memory import Collection
from tests.models.forked import in_a_child
from tests.models.project import Built, described, resealed
from tests.models.versions import negated, promoted

NAME = "jets@production"
N = 37


@pytest.fixture(scope="module")
def second(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A version with the same code and other weights."""
    return negated(jets.bundle, tmp_path_factory.mktemp("second") / "jets")


def live_session(registry: Registry, **options: Any) -> LiveSession:
    return load(NAME, live=True, registry=registry, **({"engine_name": "aoti"} | options))


def event(session: LiveSession | Session, n: int = N) -> tuple[Collection, Collection]:
    jets = session.collection("jets", n)
    columns = torch.randn(6, n, generator=torch.Generator().manual_seed(n))
    for name, values in zip("abcdef", columns, strict=True):
        jets.tensor(name).copy_(values)
    return jets, session.collection("tags", n)


def read(tags: Collection, n: int = N) -> torch.Tensor:
    return torch.stack([tags.tensor(name)[:n] for name in "xyz"]).clone()


def answers(folder: Path, n: int = N) -> torch.Tensor:
    """The answers of one version, to compare with."""
    session = load(folder, mode="test", engine_name="aoti")
    plain = Session(session.signature, session.executable)
    jets, tags = event(plain, n)
    plain.run(jets, tags)
    return read(tags, n)


@pytest.fixture(scope="module")
def both(jets: Built, second: Bundle) -> list[torch.Tensor]:
    one, two = answers(jets.bundle.path), answers(second.path)
    assert not torch.isclose(one, two).all(dim=0).any()  # the versions differ in every row
    return [one, two]


def which(found: torch.Tensor, both: list[torch.Tensor]) -> int:
    """The version that gave this answer: every bit of every row must agree."""
    (number,) = [i for i, answer in enumerate(both, 1) if torch.equal(found, answer)]
    return number


def test_a_child_stays_at_the_version_in_place(
    registry: Registry, both: list[torch.Tensor]
) -> None:
    session = live_session(registry)
    given, tags = event(session)
    binding = session.bind(given, tags)

    def run() -> None:
        session.bind(*event(session))()
        binding()
        assert which(read(tags), both) == 1

    with session.watch(every_s=3600), session._refreshing, session._listing:
        refused = "RunError: this session was opened before a fork"
        assert in_a_child(session.refresh).startswith(refused)
        assert in_a_child(session.watch).startswith(refused)
        assert in_a_child(run) == "nothing"
        assert in_a_child(session.close) == "nothing"
    binding()
    assert which(read(tags), both) == 1


def test_another_version_runs_after_refresh(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    with live_session(registry) as session:
        given, tags = event(session)
        binding = session.bind(given, tags)
        assert session.refresh() is False
        promoted(registry, second)
        binding()
        assert (session.ref, which(read(tags), both)) == ("jets/1", 1)
        assert session.refresh() is True
        assert session.refresh() is False
        assert which(read(tags), both) == 1  # refresh does not write to the caller's memory
        binding()
        assert (session.ref, which(read(tags), both)) == ("jets/2", 2)
        assert session.current.origin is not None
        assert session.current.origin.digest == second.digest


def test_bound_rows_stay_after_refresh(registry: Registry, second: Bundle) -> None:
    with live_session(registry) as session:
        fewer = session.bind(*event(session))
        fewer.resize(5)
        fewer(7)
        promoted(registry, second)
        session.refresh()
        fewer()
        assert fewer.rows == {"n": 5}


def test_a_rollback_is_followed(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    with live_session(registry) as session:
        given, tags = event(session)
        binding = session.bind(given, tags)
        promoted(registry, second)
        session.refresh()
        session.run(given, tags)
        assert which(read(tags), both) == 2
        registry.rollback("jets")
        assert session.refresh() is True
        session.run_many([binding, session.bind(*event(session))], threads=2)
        assert (session.ref, which(read(tags), both)) == ("jets/1", 1)


def test_what_nobody_uses_is_closed(registry: Registry, second: Bundle) -> None:
    """The old artifact is closed when the last binding has moved; so is its cache entry."""
    session = live_session(registry, lookup="prefer-cache")
    busy, idle = session.bind(*event(session)), session.bind(*event(session))
    assert isinstance(session.current, Session)
    old = weakref.ref(session.current.executable)
    promoted(registry, second)
    session.refresh()
    cache = Cache(cache_root())
    assert [entry.in_use for entry in cache.entries()] == [True, True]
    busy()
    gc.collect(1)  # only young objects: visiting all takes a second
    assert old() is not None
    idle()
    assert old() is None  # closed at once
    assert [e.digest for e in cache.shrink(0)] == [registry.find("jets/1").digest]


def test_rebound_memory_moves_along(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    session = live_session(registry)
    binding = session.bind(*event(session, 11))
    jets, tags = event(session)
    binding.rebind(jets, tags)
    with pytest.raises(BindError):
        binding.rebind(jets, session.collection("jets", N))
    promoted(registry, second)
    session.refresh()
    binding()
    assert which(read(tags), both) == 2
    with pytest.raises(BindError, match="outside"):
        binding(N + 5000)


def test_test_mode(registry: Registry, jets: Built, tmp_path: Path) -> None:
    session = live_session(registry, mode="test")
    binding = session.bind(*event(session))
    binding()
    first = session.current
    promoted(registry, described(jets.bundle, tmp_path / "other", "other"))
    session.refresh()
    binding(5)
    for checked in (first, session.current):
        assert isinstance(checked, CheckedSession) and checked.report.events == 1


def test_a_version_with_bounded_rows_takes_no_place_of_one_without_a_bound(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    def unbound(_: Path, manifest: dict[str, Any]) -> None:
        manifest["signature"]["rows"]["n"] |= {"unbounded": True, "typical": [7]}
        for record in manifest["targets"].values():
            for candidate in record["candidates"].values():
                candidate["tile"] = 256

    unbounded = resealed(jets.bundle, tmp_path / "unbounded", unbound)
    session = live_session(registry)
    promoted(registry, unbounded)
    assert session.refresh()
    session = live_session(registry)
    promoted(registry, jets.bundle)
    with pytest.raises(LoadError, match="another signature"):
        session.refresh()


def test_wherever_the_data_is(registry: Registry, second: Bundle, both: list[torch.Tensor]) -> None:
    session = live_session(registry, device="auto")
    jets, tags = event(session)
    binding = session.bind(jets, tags)
    binding()
    promoted(registry, second)
    assert session.refresh()
    assert isinstance(session.current, MultiDeviceSession)
    assert [d.type for d in session.current.devices] == ["cpu"]
    binding()
    assert which(read(tags), both) == 2


class TestRefused:
    """The old version keeps serving, and one line says why."""

    def still_serves(self, session: LiveSession) -> None:
        assert session.ref == "jets/1"
        session.run(*event(session))

    def test_another_signature(self, registry: Registry, jets: Built, tmp_path: Path) -> None:
        def narrower(folder: Path, manifest: dict[str, Any]) -> None:
            manifest["signature"]["rows"]["n"]["min"] = 1
            for card in folder.glob("targets/**/arguments.txt"):
                card.write_text(card.read_text().replace("rows n 0 ", "rows n 1 "))

        session = live_session(registry)
        promoted(registry, resealed(jets.bundle, tmp_path / "narrower", narrower))
        with pytest.raises(LoadError, match="jets/2 has another signature than jets/1, which goes"):
            session.refresh()
        self.still_serves(session)

    def test_an_artifact_that_does_not_open(
        self, registry: Registry, jets: Built, tmp_path: Path
    ) -> None:
        def broken(folder: Path, _: dict[str, Any]) -> None:
            (library,) = folder.glob("targets/*/*/aoti/*.so")
            library.write_bytes(b"\x7fELF" + bytes(1000))

        session = live_session(registry)
        promoted(registry, resealed(jets.bundle, tmp_path / "broken", broken))
        with pytest.raises(RunError):
            session.refresh()
        self.still_serves(session)

    def test_the_registry_has_gone(
        self, registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fresh = live_session(registry)
        kept = live_session(registry, lookup="prefer-cache")
        (tmp_path / "store").rename(tmp_path / "moved")
        with pytest.raises(NotFoundError):
            fresh.refresh()
        with caplog.at_level(logging.WARNING, "soa-pipeline"):
            assert kept.refresh() is False
        assert "the registry cannot be asked, so jets/1 is served" in caplog.text
        self.still_serves(kept)

    def test_the_files_cannot_be_had(
        self, registry: Registry, second: Bundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The registry answers, but not its store; when the store is back, the session moves."""
        session = live_session(registry, lookup="prefer-cache")
        promoted(registry, second)

        def away(*_: object) -> None:
            raise RegistryUnavailableError("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr("registry.store.bundle_files.copy_sealed", away)
            assert session.refresh() is False
        self.still_serves(session)
        assert session.refresh() is True
        assert session.ref == "jets/2"


def test_what_cannot_be_followed(registry: Registry, jets: Built) -> None:
    for ref in (jets.bundle.path, "jets/1"):
        with pytest.raises(LoadError, match="is always the same version"):
            load(ref, live=True, registry=registry)


class Load:
    """Threads that run events without a pause, and the versions that each of them saw, in order."""

    def __init__(self, session: LiveSession, both: list[torch.Tensor]) -> None:
        self.session, self.both = session, both
        self.stop = threading.Event()
        self.started = threading.Semaphore(0)
        self.seen_new = threading.Semaphore(0)

    def bound(self) -> list[int]:
        jets, tags = event(self.session)
        binding = self.session.bind(jets, tags)
        return self._until_told(binding, tags)

    def two_bindings(self) -> list[int]:
        """The order of versions holds over all bindings of a thread."""
        pairs = [event(self.session) for _ in range(2)]
        bindings = [self.session.bind(*pair) for pair in pairs]
        turns = [0]

        def run() -> None:
            bindings[turns[0] % 2]()
            pairs[0][1].memory()[0].copy_(pairs[turns[0] % 2][1].memory()[0])
            turns[0] += 1

        return self._until_told(run, pairs[0][1])

    def unbound(self) -> list[int]:
        jets, tags = event(self.session)
        return self._until_told(lambda: self.session.run(jets, tags), tags)

    def many(self) -> list[int]:
        pairs = [event(self.session) for _ in range(3)]
        bindings = [self.session.bind(*pair) for pair in pairs]

        def run() -> None:
            self.session.run_many(bindings, threads=2)
            assert len({which(read(tags), self.both) for _, tags in pairs}) == 1

        return self._until_told(run, pairs[0][1])

    def _until_told(self, run: Callable[[], object], tags: Collection) -> list[int]:
        seen: list[int] = []
        while not self.stop.is_set():
            for name in "xyz":
                tags.tensor(name).fill_(float("nan"))  # shows an event that was not run
            run()
            seen.append(which(read(tags), self.both))
            if len(seen) == 1:
                self.started.release()
            if seen[-2:] == [1, 2]:
                self.seen_new.release()
        return seen


def test_a_swap_under_load(registry: Registry, second: Bundle, both: list[torch.Tensor]) -> None:
    """A watcher swaps the version while events run in every way at once."""
    session = live_session(registry)
    work = Load(session, both)
    ways = [work.bound, work.two_bindings, work.unbound, work.many]
    with ThreadPoolExecutor(len(ways)) as pool:
        futures = [pool.submit(way) for way in ways]
        try:
            for _ in ways:
                assert work.started.acquire(timeout=60)
            promoted(registry, second)
            with session.watch(every_s=0.05):
                end = time.monotonic() + 120
                while session.ref == "jets/1" and time.monotonic() < end:
                    time.sleep(0.01)
            for _ in ways:
                assert work.seen_new.acquire(timeout=60)
        finally:
            work.stop.set()
        results = [future.result() for future in futures]
    assert session.ref == "jets/2"
    for seen in results:
        assert seen == sorted(seen)  # after a new one, never an old one
        assert (seen[0], seen[-1]) == (1, 2)


def test_a_scheduler_over_it(registry: Registry, second: Bundle, both: list[torch.Tensor]) -> None:
    session = live_session(registry)
    with Scheduler([session], workers=2) as scheduler:
        for number in (1, 2):
            events = [event(session) for _ in range(4)]
            for future in [scheduler.submit(*each) for each in events]:
                future.result(60)
            assert {which(read(tags), both) for _, tags in events} == {number}
            if number == 1:
                promoted(registry, second)
                session.refresh()


def test_a_watcher_outlives_errors(
    registry: Registry, second: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"

    def wait_for(seen: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not seen() and time.monotonic() < end:
            time.sleep(0.01)
        assert seen()

    caplog.set_level(logging.WARNING, "soa-pipeline")
    with live_session(registry) as session, session.watch(every_s=0.02) as watcher:
        store.rename(tmp_path / "moved")
        wait_for(lambda: "nothing is registered" in (watcher.error or ""))
        (tmp_path / "moved").rename(store)
        promoted(registry, second)
        wait_for(lambda: session.ref == "jets/2")
        wait_for(lambda: watcher.error is None)
    assert "not refreshed, jets/1 goes on serving: nothing is registered" in caplog.text


def test_closing_a_session_ends_its_watcher(registry: Registry) -> None:
    session = live_session(registry)
    session.watch(every_s=0.02)
    assert "soa-watch" in {thread.name for thread in threading.enumerate()}
    session.close()
    assert "soa-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_closed_session_runs_nothing_and_stays_at_its_version(
    registry: Registry, second: Bundle
) -> None:
    session = live_session(registry)
    session.close()
    promoted(registry, second)
    with pytest.raises(RunError, match="closed"):
        session.run(*event(session))
    assert session.refresh() is False


def test_a_watcher_needs_a_time_between_its_looks(registry: Registry) -> None:
    with pytest.raises(ValueError, match="every_s=0"):
        Watcher(live_session(registry), 0)
