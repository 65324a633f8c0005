"""The work folder: which stages are kept, which are computed again, and two runs at once."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from pipeline.building.work import Work, content_key, depends_on


def test_the_order_of_the_parts_does_not_change_the_key() -> None:
    first, second = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert content_key(first) == content_key(second)


def test_other_parts_have_another_key() -> None:
    values: tuple[object, ...] = (1, "1", 1.5, [1, 2], [2, 1])
    parts: list[dict[str, object]] = [*({"a": value} for value in values), {"b": 1}, {}]
    assert len({content_key(part) for part in parts}) == len(parts)


class Stage:
    """A stage that counts its builds (`built`), and writes a file.

    `source` is a file that it depends on. `good`: whether its result may be kept.
    """

    def __init__(self, root: Path, source: Path | None = None, good: bool = True) -> None:
        self.work, self.source, self.good, self.built = Work(root), source, good, 0

    def build(self, folder: Path) -> str:
        assert list(folder.iterdir()) == []
        (folder / "result").write_text("42")
        self.built += 1
        if self.source is not None:
            digest = hashlib.sha256(self.source.read_bytes()).hexdigest()
            depends_on(folder, {str(self.source): digest})
        return "42"

    def run(self, stage: str = "stage", key: str = "key") -> int:
        """Runs the stage; returns how often it was built so far."""
        parts = {"key": key}
        result = self.work.read_or_make(stage, parts, str, self.build, lambda result: self.good)
        assert result == "42"
        return self.built


def test_a_stage_is_built_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert [stage.run(), stage.run()] == [1, 1]
    assert (stage.work.folder("stage", {"key": "key"}) / "result").is_file()


def test_each_stage_and_each_key_has_its_own_build(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert [stage.run(), stage.run(key="other"), stage.run("next")] == [1, 2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_a_stage_that_broke_off_is_done_again_in_an_empty_folder(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(folder: Path) -> str:
        (folder / "half").write_text("hal")
        raise error

    stage = Stage(tmp_path)
    with pytest.raises(error):
        stage.work.read_or_make("stage", {"key": "key"}, str, fail)
    assert [stage.run(), stage.run()] == [1, 1]


def test_a_bad_result_is_used_but_not_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path, good=False)
    assert [stage.run(), stage.run()] == [1, 2]


def stage_of_a_file(source: Path) -> Stage:
    """A stage that was built once, from the file `source`."""
    source.write_text("width = 1")
    stage = Stage(source.with_name("work"), source)
    stage.run()
    return stage


def test_a_stage_is_kept_while_its_source_file_is_the_same(tmp_path: Path) -> None:
    assert stage_of_a_file(tmp_path / "model.py").run() == 1


def test_a_changed_source_file_is_built_again(tmp_path: Path) -> None:
    stage = stage_of_a_file(tmp_path / "model.py")
    (tmp_path / "model.py").write_text("width = 2")
    assert [stage.run(), stage.run()] == [2, 2]


def test_a_stage_whose_source_file_is_gone_is_built_again(tmp_path: Path) -> None:
    stage = stage_of_a_file(tmp_path / "model.py")
    (tmp_path / "model.py").unlink()
    stage.source = None  # the new build reads no file
    assert [stage.run(), stage.run()] == [2, 2]


def test_two_runs_at_once_build_once(tmp_path: Path) -> None:
    both_ready, stages = threading.Barrier(2), [Stage(tmp_path), Stage(tmp_path)]

    def one_run(stage: Stage) -> None:
        both_ready.wait(10)
        stage.run()

    threads = [threading.Thread(target=one_run, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(stage.built for stage in stages) == [0, 1]


def test_root_is_the_same_from_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Work(Path("work"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert work.root == tmp_path / "work"
