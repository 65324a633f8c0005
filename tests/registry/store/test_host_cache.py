"""The cache of a host: the first process fills it; no entry is half, or removed while in use."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from registry import Bundle, BundleError, Registry, RegistryError
from registry.bundle.digests import SUMS
from registry.errors import NotCachedError, RegistryUnavailableError
from registry.store.host_cache import Cache, cache_root, parse_size
from tests.models.bundles import MakeBundle, write_annex
from tests.models.forked import ended
from tests.registry.campaigns.write_points import stop_at

# Fetches with pauses, notes each fetch in a file, then holds the entry.
FETCHER = """
import shutil, sys, time
from pathlib import Path
from registry.store.host_cache import Cache
from registry.bundle import Bundle
source, root, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
def fill(partial):
    with log.open("a") as file:
        file.write("fetched\\n")
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        into = partial / path.relative_to(source)
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, into)
        time.sleep(float(pause))
    Bundle.open(partial)
held = Cache(root).hold(sys.argv[5], fill)
print(Bundle.open(held.path).digest, flush=True)
sys.stdin.read()
"""


class Host:
    """A cache, a source to fetch from, and processes that use both."""

    def __init__(self, folder: Path, source: Bundle) -> None:
        self.cache = Cache(folder / "cache")
        self.source = source
        self.log = folder / "fetches"
        self.children: list[subprocess.Popen[str]] = []

    def start(self, pause_s: float = 0.0) -> subprocess.Popen[str]:
        arguments = [self.source.path, self.cache.root, self.log, pause_s, self.source.digest]
        child = subprocess.Popen(
            [sys.executable, "-c", FETCHER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self.children.append(child)
        return child

    def wait_for_a_fetch(self) -> None:
        while not (self.cache.root.exists() and self.left_over()):
            time.sleep(0.01)

    def fetches(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def fill(self, partial: Path) -> None:
        shutil.copytree(self.source.path, partial, dirs_exist_ok=True)

    def left_over(self) -> list[str]:
        ends = (".partial", ".old", ".sig")
        return [path.name for path in self.cache.root.iterdir() if path.suffix in ends]


@pytest.fixture
def host(tmp_path: Path, bundle: Bundle) -> Iterator[Host]:
    """A host whose child processes end with the test."""
    made = Host(tmp_path / "host", bundle)
    yield made
    for child in made.children:
        child.kill()
        child.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_many_processes_fetch_once(host: Host) -> None:
    processes = [host.start(0.02) for _ in range(4)]
    assert [answer(process) for process in processes] == [host.source.digest] * 4
    assert host.fetches() == 1
    assert host.left_over() == []
    (entry,) = host.cache.entries()
    assert (entry.digest, entry.in_use) == (host.source.digest, True)
    assert entry.size == sum(p.stat().st_size for p in host.source.path.rglob("*") if p.is_file())


def test_killed_while_it_fetches(host: Host) -> None:
    """The waiting process fetches instead, and removes what the killed one left."""
    killed = host.start(60)
    host.wait_for_a_fetch()
    waiting = host.start()
    assert not (host.cache.root / host.source.digest).exists()
    killed.kill()
    assert answer(waiting) == host.source.digest
    assert host.fetches() == 2
    assert host.left_over() == []


def test_killed_at_each_write(host: Host) -> None:
    """The next process gets the whole bundle, and nothing is left over."""

    def fetch(number: int) -> None:
        stop_at(number, host.cache.root, signal.SIGKILL, lambda what: None)
        host.cache.hold(host.source.digest, host.fill)

    kills = 0
    while (code := ended(partial(fetch, kills))) != 0:
        assert code == -signal.SIGKILL
        kills += 1
        held = host.cache.hold(host.source.digest, host.fill)
        assert Bundle.open(held.path).digest == host.source.digest
        assert host.left_over() == []
        held.release()
        assert [e.digest for e in host.cache.shrink(0)] == [host.source.digest]
    assert kills > 20


def test_eviction_spares_what_is_used(host: Host, make_bundle: MakeBundle) -> None:
    """The entry unused for longest goes first; one in use, here or elsewhere, is never removed."""
    others = [Bundle.open(make_bundle(seed=seed)) for seed in (1, 2, 3)]
    mine, *free = [
        host.cache.hold(other.digest, Host(host.cache.root.parent, other).fill) for other in others
    ]
    for age, held in enumerate(free):
        held.release()
        os.utime(held.path, (1000 - age, 1000 - age))
    size = host.cache.entries()[0].size
    process = host.start()
    assert answer(process) == host.source.digest
    assert [e.digest for e in host.cache.entries()[:2]] == [others[2].digest, others[1].digest]
    assert [e.digest for e in host.cache.shrink(3 * size + 2000)] == [others[2].digest]
    assert [e.digest for e in host.cache.shrink(0)] == [others[1].digest]
    assert {e.digest for e in host.cache.entries()} == {others[0].digest, host.source.digest}
    process.kill()  # a lock dies with its holder
    process.wait()
    assert [e.digest for e in host.cache.shrink(0)] == [host.source.digest]
    assert Bundle.open(mine.path).digest == others[0].digest
    del mine
    assert len(host.cache.shrink(0)) == 1
    assert host.left_over() == []


def test_used_again_is_used_last(host: Host, make_bundle: MakeBundle) -> None:
    other = Bundle.open(make_bundle(seed=1))
    for made in (host.source, other):
        host.cache.hold(made.digest, Host(host.cache.root.parent, made).fill).release()
        os.utime(host.cache.root / made.digest, (1000, 1000))
    host.cache.hold(host.source.digest, None).release()
    assert [e.digest for e in host.cache.entries()] == [other.digest, host.source.digest]


def test_a_fetch_makes_room(
    host: Host, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "1kB")
    host.cache.hold(host.source.digest, host.fill).release()
    other = Bundle.open(make_bundle(seed=1))
    held = host.cache.hold(other.digest, Host(host.cache.root.parent, other).fill)
    assert [e.digest for e in host.cache.entries()] == [other.digest]  # in use: it stays
    held.release()


def test_an_empty_cache_is_not_made_without_a_fetch(host: Host) -> None:
    with pytest.raises(NotCachedError, match="is not in the cache"):
        host.cache.hold(host.source.digest, None)
    assert not host.cache.root.exists()


def test_a_fetch_that_fails_leaves_nothing(host: Host) -> None:
    def half(partial: Path) -> None:
        (partial / SUMS).write_text("")
        raise BundleError("the network went away")

    with pytest.raises(BundleError, match="the network went away"):
        host.cache.hold(host.source.digest, half)
    assert host.cache.entries() == []
    assert host.left_over() == []


def test_an_empty_folder_in_the_cache_is_filled(host: Host) -> None:
    (host.cache.root / host.source.digest).mkdir(parents=True)
    held = host.cache.hold(host.source.digest, host.fill)
    assert Bundle.open(held.path).digest == host.source.digest


def test_another_that_does_not_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("registry.store.host_cache.FETCH_WAIT_S", 0.1)
    host.start(60)
    host.wait_for_a_fetch()
    with pytest.raises(RegistryUnavailableError, match=r"has been fetching .* for 0\.1 s"):
        host.cache.hold(host.source.digest, host.fill)


def test_a_size_is_a_number_of_bytes() -> None:
    assert parse_size("1.5 MB", "") == 1_500_000


@pytest.mark.parametrize("text", ["", "20", "20 gigabytes", "-1GB"])
def test_a_size_without_a_number_or_a_unit_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match=r"--max-size: found .*; write a number and kB"):
        parse_size(text, "--max-size")


def test_a_size_of_the_environment_that_is_none(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "much")
    with pytest.raises(RegistryError, match="PIPELINE_CACHE_SIZE: found 'much'"):
        host.cache.hold(host.source.digest, host.fill)


def test_a_file_in_place_of_the_folder(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=r"Not a directory: name another folder with PIPELINE_C"):
        Cache(tmp_path / "file" / "cache").hold(host.source.digest, host.fill)


class TestOfARegistry:
    """`Registry.open` with `in_place=False` reads the cache, although the store is local."""

    def test_kept_when_the_store_has_gone(
        self, registry: Registry, bundle: Bundle, tmp_path: Path
    ) -> None:
        version = registry.register(bundle)
        annex = write_annex(tmp_path / "annex", bundle, "cuda/sm_90")
        version = registry.add_target(version, annex)
        opened = registry.open(version, in_place=False)
        root = tmp_path / "cache" / "soa-pipeline"
        assert opened.path == root / bundle.digest
        assert opened.annexes["cuda/sm_90"].path == root / annex.digest
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert registry.open(version, fetch=False) == opened
        assert all(entry.in_use for entry in Cache(root).entries())
        del opened
        assert len(Cache(root).shrink(0)) == 2
        with pytest.raises(NotCachedError):
            registry.open(version, fetch=False)
        with pytest.raises(BundleError, match="its files are gone"):
            registry.open(version, in_place=False)

    def test_a_flipped_bit(
        self, registry: Registry, bundle: Bundle, caplog: pytest.LogCaptureFixture
    ) -> None:
        version = registry.register(bundle)
        path = registry.open(version, in_place=False).path / "program.pt2"
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
            registry.open(version, fetch=False)
        with caplog.at_level(logging.WARNING, "soa-pipeline"):
            again = registry.open(version, in_place=False)
        assert "a damaged copy, which is fetched again" in caplog.text
        assert again.file("program.pt2").read_bytes() == bundle.file("program.pt2").read_bytes()
        assert registry.open(version, fetch=False) == again


@pytest.mark.parametrize(
    ("ours", "xdg", "expected"),
    [
        ("/ours", "/xdg", "/ours"),
        ("", "/xdg", "/xdg/soa-pipeline"),
        (None, "/xdg", "/xdg/soa-pipeline"),
        (None, "", "/home/x/.cache/soa-pipeline"),
        (None, None, "/home/x/.cache/soa-pipeline"),
        (None, "relative", "/home/x/.cache/soa-pipeline"),  # the XDG rule ignores it
    ],
)
def test_the_cache_is_where_the_environment_says(
    ours: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for name, value in (("PIPELINE_CACHE", ours), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected
