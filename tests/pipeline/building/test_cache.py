"""The cache of stages: what is kept, what is done again, and two runs at once."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from pipeline.building.cache import StageCache, content_key, unchanged, write_whole


def test_key_depends_on_what_is_said_not_on_its_order() -> None:
    assert content_key({"a": 1, "b": {"c": 2, "d": 3}}) == content_key(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    keys: list[dict[str, object]] = [
        {"a": 1},
        {"a": "1"},
        {"a": 1.5},
        {"a": [1, 2]},
        {"a": [2, 1]},
        {"b": 1},
        {},
    ]
    assert len({content_key(parts) for parts in keys}) == len(keys)


def test_built_once(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    built: list[Path] = []

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "result").write_text("42")
        built.append(folder)

    first = cache.folder("stage", "key", build)
    assert first == (tmp_path / "stage" / "key", True)
    assert cache.folder("stage", "key", build) == (first[0], False)
    assert cache.folder("stage", "other", build)[1]
    assert cache.folder("next", "key", build)[1]
    assert len(built) == 3


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError, SystemExit])
def test_broken_off_is_done_again_in_an_empty_folder(
    tmp_path: Path, how: type[BaseException]
) -> None:
    cache = StageCache(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("hal")
        raise how

    with pytest.raises(how):
        cache.folder("stage", "key", fail)

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []

    assert cache.folder("stage", "key", build)[1]
    assert not cache.folder("stage", "key", build)[1]


def test_failed_result_is_used_but_not_kept(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)

    def build(folder: Path) -> bool:
        (folder / "log.txt").write_text("it crashed")
        return False

    folder, worked = cache.folder("stage", "key", build)
    assert worked
    assert (folder / "log.txt").read_text() == "it crashed"
    assert cache.folder("stage", "key", build)[1]


def test_result_holds_as_long_as_the_files_behind_it(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "work")
    source = tmp_path / "model.py"

    def digests() -> dict[str, str]:
        return {str(source): hashlib.sha256(source.read_bytes()).hexdigest()}

    def build(folder: Path) -> None:
        pass

    source.write_text("width = 1")
    folder, _ = cache.folder("stage", "key", build, digests)
    assert cache.files(folder) == digests()
    assert not cache.folder("stage", "key", build, digests)[1]
    source.write_text("width = 2")
    assert not unchanged(cache.files(folder))
    assert cache.folder("stage", "key", build, digests)[1]
    assert not cache.folder("stage", "key", build, digests)[1]
    source.unlink()
    assert not unchanged(cache.files(folder))


def test_two_runs_at_once_build_once(tmp_path: Path) -> None:
    begun, built = threading.Barrier(2), []
    found: list[tuple[Path, bool]] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "result").write_text("42")

    def one_run() -> None:
        begun.wait(10)
        found.append(StageCache(tmp_path).folder("stage", "key", build))
        assert (found[-1][0] / "result").read_text() == "42"

    threads = [threading.Thread(target=one_run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(built) == 1
    assert sorted(worked for _, worked in found) == [False, True]


def test_root_is_the_same_from_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = StageCache(Path("work"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache.root == tmp_path / "work"


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "n\udc80w")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
