"""A live session moves to a newly promoted version: each event runs once, on one version."""

from __future__ import annotations

import gc
import itertools
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
    """A session that follows `NAME`, with the artifacts of one engine."""
    return load(NAME, live=True, registry=registry, **({"engine_name": "aoti"} | options))


def event(session: LiveSession | Session, n: int = N) -> tuple[Collection, Collection]:
    """Jets, the same for the same `n`, and tags."""
    jets = session.collection("jets", n)
    columns = torch.randn(6, n, generator=torch.Generator().manual_seed(n))
    for name, values in zip("abcdef", columns, strict=True):
        jets.tensor(name).copy_(values)
    return jets, session.collection("tags", n)


def read(tags: Collection, n: int = N) -> torch.Tensor:
    """A copy of the answers."""
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
    """The answers of jets/1 and jets/2; they differ in every row."""
    answers_1, answers_2 = answers(jets.bundle.path), answers(second.path)
    assert not torch.isclose(answers_1, answers_2).all(dim=0).any()
    return [answers_1, answers_2]


def which(answer: torch.Tensor, both: list[torch.Tensor]) -> int:
    """The version that gave this answer: every bit of every row must agree."""
    (number,) = (i for i, expected in enumerate(both, 1) if torch.equal(answer, expected))
    return number


def test_a_child_stays_at_the_version_in_place(
    registry: Registry, both: list[torch.Tensor]
) -> None:
    session = live_session(registry)
    jets, tags = event(session)
    binding = session.bind(jets, tags)

    def run() -> None:
        session.bind(*event(session))()
        binding()
        assert which(read(tags), both) == 1

    with session.watch(every_s=3600), session._refreshing, session._listing:
        error = "RunError: this session was opened before a fork"
        assert in_a_child(session.refresh).startswith(error)
        assert in_a_child(session.watch).startswith(error)
        assert in_a_child(run) == "nothing"
        assert in_a_child(session.close) == "nothing"
    binding()
    assert which(read(tags), both) == 1


def test_another_version_runs_after_refresh(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    with live_session(registry) as session:
        jets, tags = event(session)
        binding = session.bind(jets, tags)
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
        jets, tags = event(session)
        binding = session.bind(jets, tags)
        promoted(registry, second)
        session.refresh()
        session.run(jets, tags)
        assert which(read(tags), both) == 2
        registry.rollback("jets")
        assert session.refresh() is True
        session.run_many([binding, session.bind(*event(session))], threads=2)
        assert (session.ref, which(read(tags), both)) == ("jets/1", 1)


def test_an_old_version_that_no_binding_uses_is_closed(registry: Registry, second: Bundle) -> None:
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
    assert [entry.digest for entry in cache.shrink(0)] == [registry.find("jets/1").digest]


def test_rebound_memory_moves_along(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    session = live_session(registry)
    binding = session.bind(*event(session, 11))
    jets, tags = event(session)
    binding.rebind(jets, tags)
    with pytest.raises(BindError):  # and the binding stays as it is
        binding.rebind(jets, session.collection("jets", N))
    promoted(registry, second)
    session.refresh()
    binding()
    assert which(read(tags), both) == 2


def test_rows_are_limited_by_the_new_version_too(registry: Registry, second: Bundle) -> None:
    session = live_session(registry)
    binding = session.bind(*event(session))
    promoted(registry, second)
    session.refresh()
    with pytest.raises(BindError, match="outside"):
        binding(N + 5000)


def test_in_test_mode_each_version_has_its_report(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    session = live_session(registry, mode="test")
    binding = session.bind(*event(session))
    binding()
    first = session.current
    promoted(registry, described(jets.bundle, tmp_path / "other", "other"))
    session.refresh()
    binding(5)
    for checked in (first, session.current):
        assert isinstance(checked, CheckedSession)
        assert checked.report.events == 1


def test_a_version_with_bounded_rows_takes_no_place_of_one_without_a_bound(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    def unbind_rows(_: Path, manifest: dict[str, Any]) -> None:
        manifest["signature"]["rows"]["n"] |= {"unbounded": True, "typical": [7]}
        for record in manifest["targets"].values():
            for candidate in record["candidates"].values():
                candidate["tile"] = 256

    unbounded = resealed(jets.bundle, tmp_path / "unbounded", unbind_rows)
    session = live_session(registry)
    promoted(registry, unbounded)
    assert session.refresh()
    session = live_session(registry)
    promoted(registry, jets.bundle)
    with pytest.raises(LoadError, match="another signature"):
        session.refresh()


def test_a_live_session_for_all_devices_moves_on_each(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    session = live_session(registry, device="auto")
    jets, tags = event(session)
    binding = session.bind(jets, tags)
    binding()
    promoted(registry, second)
    assert session.refresh()
    assert isinstance(session.current, MultiDeviceSession)
    assert [device.type for device in session.current.devices] == ["cpu"]
    binding()
    assert which(read(tags), both) == 2


class TestRefused:
    """The old version keeps serving, and one line says why."""

    def require_serves(self, session: LiveSession) -> None:
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
        self.require_serves(session)

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
        self.require_serves(session)

    def test_a_registry_that_has_gone(self, registry: Registry, tmp_path: Path) -> None:
        session = live_session(registry)
        (tmp_path / "store").rename(tmp_path / "moved")
        with pytest.raises(NotFoundError):
            session.refresh()
        self.require_serves(session)

    def test_a_registry_that_has_gone_is_a_warning_with_a_kept_version(
        self, registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        session = live_session(registry, lookup="prefer-cache")
        (tmp_path / "store").rename(tmp_path / "moved")
        with caplog.at_level(logging.WARNING, "soa-pipeline"):
            assert session.refresh() is False
        assert "the registry cannot be asked, so jets/1 is served" in caplog.text
        self.require_serves(session)

    def test_files_that_cannot_be_copied(
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
        self.require_serves(session)
        assert session.refresh() is True
        assert session.ref == "jets/2"


def require_not_followed(ref: str | Path, registry: Registry) -> None:
    with pytest.raises(LoadError, match="is always the same version"):
        load(ref, live=True, registry=registry)


def test_a_number_cannot_be_followed(registry: Registry) -> None:
    require_not_followed("jets/1", registry)


def test_a_folder_cannot_be_followed(registry: Registry, jets: Built) -> None:
    require_not_followed(jets.bundle.path, registry)


class Load:
    """Threads that run events without a pause, and the versions that each of them saw, in order."""

    def __init__(self, session: LiveSession, both: list[torch.Tensor]) -> None:
        self.session, self.both = session, both
        self.stop = threading.Event()
        self.started = threading.Semaphore(0)
        self.seen_new = threading.Semaphore(0)

    def bound(self) -> list[int]:
        """By a binding of its own."""
        jets, tags = event(self.session)
        binding = self.session.bind(jets, tags)
        return self._until_told(binding, tags)

    def two_bindings(self) -> list[int]:
        """By two bindings in turn: the order of versions holds over all bindings of a thread."""
        jets, tags = event(self.session)
        other_jets, other_tags = event(self.session)
        turns = itertools.cycle(
            [(self.session.bind(jets, tags), tags),
             (self.session.bind(other_jets, other_tags), other_tags)]
        )  # fmt: skip

        def run() -> None:
            binding, own_tags = next(turns)
            binding()
            tags.memory()[0].copy_(own_tags.memory()[0])

        return self._until_told(run, tags)

    def unbound(self) -> list[int]:
        """By `run`, without a binding."""
        jets, tags = event(self.session)
        return self._until_told(lambda: self.session.run(jets, tags), tags)

    def many(self) -> list[int]:
        """By `run_many`: all events of a call are of one version."""
        pairs = [event(self.session) for _ in range(3)]
        bindings = [self.session.bind(*pair) for pair in pairs]

        def run() -> None:
            self.session.run_many(bindings, threads=2)
            assert len({which(read(tags), self.both) for _, tags in pairs}) == 1

        return self._until_told(run, pairs[0][1])

    def _until_told(self, run: Callable[[], object], tags: Collection) -> list[int]:
        """Runs until `stop` is set; the version of each answer."""
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


def test_a_swap_under_load_never_goes_back_to_the_old_version(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
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
                deadline = time.monotonic() + 120
                while session.ref == "jets/1" and time.monotonic() < deadline:
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


def test_events_of_a_scheduler_follow_the_new_version(
    registry: Registry, second: Bundle, both: list[torch.Tensor]
) -> None:
    session = live_session(registry)

    def versions() -> set[int]:
        """The versions that answer four events."""
        events = [event(session) for _ in range(4)]
        for future in [scheduler.submit(jets, tags) for jets, tags in events]:
            future.result(60)
        return {which(read(tags), both) for _, tags in events}

    with Scheduler([session], workers=2) as scheduler:
        assert versions() == {1}
        promoted(registry, second)
        session.refresh()
        assert versions() == {2}


def test_a_watcher_outlives_errors(
    registry: Registry, second: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert condition()

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
