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

from registry import Bundle, BundleError, Registry, RegistryError, Version
from registry.bundle.digests import SUMS
from registry.errors import NotCachedError, RegistryUnavailableError
from registry.store.host_cache import Cache, EntryInUse, cache_root, parse_size
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
        """A process that holds the source's entry; a fetch pauses after each file."""
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

    def hold(self, bundle: Bundle) -> EntryInUse:
        """Holds the entry of a bundle, which is copied if the cache lacks it."""

        def fill(partial: Path) -> None:
            shutil.copytree(bundle.path, partial, dirs_exist_ok=True)

        return self.cache.hold(bundle.digest, fill)

    def digests(self) -> list[str]:
        """The entries of the cache, the one unused for longest first."""
        return [entry.digest for entry in self.cache.entries()]

    def shrink(self, size: int) -> list[str]:
        """Removes entries until `size` bytes are left; the digests of those removed."""
        return [entry.digest for entry in self.cache.shrink(size)]

    def wait_for_a_fetch(self) -> None:
        while not (self.cache.root.exists() and self.left_over()):
            time.sleep(0.01)

    def fetches(self) -> int:
        """How often a started process has fetched."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def left_over(self) -> list[str]:
        """The names of temporary files and folders in the cache."""
        suffixes = (".partial", ".old", ".sig")
        return [path.name for path in self.cache.root.iterdir() if path.suffix in suffixes]


@pytest.fixture
def host(tmp_path: Path, bundle: Bundle) -> Iterator[Host]:
    """A host whose child processes end with the test."""
    host = Host(tmp_path / "host", bundle)
    yield host
    for child in host.children:
        child.kill()
        child.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    """The digest that a started process prints when it holds its entry."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_many_processes_fetch_once(host: Host) -> None:
    processes = [host.start(0.02) for _ in range(4)]
    assert [answer(process) for process in processes] == [host.source.digest] * 4
    assert host.fetches() == 1
    assert host.left_over() == []


def test_an_entry_has_the_size_of_its_files(host: Host) -> None:
    cached = host.hold(host.source)
    (entry,) = host.cache.entries()
    assert (entry.digest, entry.in_use) == (host.source.digest, True)
    files = [file for file in host.source.path.rglob("*") if file.is_file()]
    assert entry.size == sum(file.stat().st_size for file in files)
    cached.release()


def test_a_process_that_waits_fetches_instead_of_a_killed_one(host: Host) -> None:
    """It removes what the killed one left."""
    killed = host.start(60)
    host.wait_for_a_fetch()
    waiting = host.start()
    assert not (host.cache.root / host.source.digest).exists()
    killed.kill()
    assert answer(waiting) == host.source.digest
    assert host.fetches() == 2
    assert host.left_over() == []


def test_a_fetch_after_one_that_was_killed_at_any_write_is_whole(host: Host) -> None:
    def fetch(number: int) -> None:
        stop_at(number, host.cache.root, signal.SIGKILL, lambda description: None)
        host.hold(host.source)

    kills = 0
    while (code := ended(partial(fetch, kills))) != 0:
        assert code == -signal.SIGKILL
        kills += 1
        entry = host.hold(host.source)
        assert Bundle.open(entry.path).digest == host.source.digest
        assert host.left_over() == []
        entry.release()
        assert host.shrink(0) == [host.source.digest]
    assert kills > 20  # nine files are created and then filled, beside the folders


def leave_unused(host: Host, bundle: Bundle, used_at: float) -> None:
    """Puts an entry into the cache that was used last at a time in the past."""
    entry = host.hold(bundle)
    entry.release()
    os.utime(entry.path, (used_at, used_at))


def test_the_entry_unused_for_longest_is_removed_first(host: Host, make_bundle: MakeBundle) -> None:
    younger, older = (Bundle.open(make_bundle(seed=seed)) for seed in (1, 2))
    leave_unused(host, younger, used_at=1000)
    leave_unused(host, older, used_at=999)
    size = host.cache.entries()[0].size
    assert host.digests() == [older.digest, younger.digest]
    assert host.shrink(size + 2000) == [older.digest]  # sizes differ by less than 2000 bytes
    assert host.shrink(0) == [younger.digest]
    assert host.left_over() == []


def test_eviction_spares_what_is_used(host: Host, make_bundle: MakeBundle) -> None:
    """An entry in use, here or in another process, is never removed, but counts towards the size;
    of the others the one unused for longest goes first."""
    mine = host.hold(Bundle.open(make_bundle(seed=1)))
    size = host.cache.entries()[0].size
    younger, older = (Bundle.open(make_bundle(seed=seed)) for seed in (2, 3))
    leave_unused(host, younger, used_at=1000)
    leave_unused(host, older, used_at=999)
    process = host.start()
    assert answer(process) == host.source.digest
    assert host.digests()[:2] == [older.digest, younger.digest]
    assert host.shrink(3 * size + 2000) == [older.digest]  # sizes differ by less than 2000 bytes
    assert host.shrink(0) == [younger.digest]
    assert host.shrink(0) == []
    process.kill()  # a lock dies with its holder
    process.wait()
    assert host.shrink(0) == [host.source.digest]
    Bundle.open(mine.path).verify()
    del mine
    assert len(host.shrink(0)) == 1


def test_an_entry_that_is_used_again_becomes_the_last(host: Host, make_bundle: MakeBundle) -> None:
    other = Bundle.open(make_bundle(seed=1))
    for bundle in (host.source, other):
        leave_unused(host, bundle, used_at=1000)
    host.cache.hold(host.source.digest, None).release()
    assert host.digests() == [other.digest, host.source.digest]


def test_a_fetch_makes_room(
    host: Host, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "1kB")
    host.hold(host.source).release()
    other = Bundle.open(make_bundle(seed=1))
    entry = host.hold(other)
    assert host.digests() == [other.digest]  # in use: it stays
    entry.release()


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
    entry = host.hold(host.source)
    assert Bundle.open(entry.path).digest == host.source.digest


def test_a_fetch_of_another_process_that_does_not_end_is_given_up(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry.store.host_cache.FETCH_WAIT_S", 0.1)
    host.start(60)
    host.wait_for_a_fetch()
    with pytest.raises(RegistryUnavailableError, match=r"has been fetching .* for 0\.1 s"):
        host.hold(host.source)


def test_a_size_is_a_number_of_bytes() -> None:
    assert parse_size("1.5 MB", "") == 1_500_000


@pytest.mark.parametrize("text", ["", "20", "20 gigabytes", "-1GB"])
def test_a_size_without_a_number_or_a_unit_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match=r"--max-size: found .*; write a number and kB"):
        parse_size(text, "--max-size")


def test_text_in_the_environment_that_is_no_size_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_CACHE_SIZE", "much")
    with pytest.raises(RegistryError, match="PIPELINE_CACHE_SIZE: found 'much'"):
        host.hold(host.source)


def test_a_file_in_place_of_the_folder_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    host = Host(tmp_path / "file", bundle)
    with pytest.raises(BundleError, match=r"Not a directory: name another folder with PIPELINE_C"):
        host.hold(bundle)


class TestOfARegistry:
    """`Registry.open` with `in_place=False` reads the cache, although the store is local."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Cache:
        """Where `Registry.open` puts copies in these tests."""
        return Cache(tmp_path / "cache" / "soa-pipeline")

    @pytest.fixture
    def version(self, registry: Registry, bundle: Bundle, tmp_path: Path) -> Version:
        """A version with a target that was built later."""
        annex = write_annex(tmp_path / "annex", bundle, "cuda/sm_90")
        return registry.add_target(registry.register(bundle), annex)

    def test_bundle_and_annex_are_entries_of_their_own(
        self, registry: Registry, version: Version, cache: Cache
    ) -> None:
        opened = registry.open(version, in_place=False)
        assert opened.path == cache.root / version.digest
        annex = opened.annexes["cuda/sm_90"]
        assert annex.path == cache.root / version.annexes["cuda/sm_90"]

    def test_a_version_is_read_from_the_cache_when_the_store_has_gone(
        self, registry: Registry, version: Version, tmp_path: Path
    ) -> None:
        opened = registry.open(version, in_place=False)
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert registry.open(version, fetch=False) == opened

    def test_entries_are_in_use_as_long_as_the_bundle_is(
        self, registry: Registry, version: Version, cache: Cache
    ) -> None:
        opened = registry.open(version, in_place=False)
        assert [entry.in_use for entry in cache.entries()] == [True, True]
        del opened
        assert len(cache.shrink(0)) == 2

    def test_a_version_that_is_neither_in_the_cache_nor_in_the_store_is_refused(
        self, registry: Registry, version: Version, tmp_path: Path
    ) -> None:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
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
            reopened = registry.open(version, in_place=False)
        assert "a damaged copy, which is fetched again" in caplog.text
        assert reopened.file("program.pt2").read_bytes() == bundle.file("program.pt2").read_bytes()
        assert registry.open(version, fetch=False) == reopened


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
