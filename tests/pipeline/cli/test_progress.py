"""Progress: a line that is updated on a terminal, and is absent in a log."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.building.work import Work
from registry import Manifest
from registry.bundle import Bundle
from registry.store import Registry
from soa.records import as_record
from tests.models.bundles import manifest_data, provable, write_bundle

ROOT = Path(__file__).parents[3]
ESCAPES = (b"\x1b", b"\r")


@pytest.fixture
def pull(empty: Registry, tmp_path: Path) -> list[str]:
    """A command that takes a while with large files."""
    write_bundle(tmp_path / "bundle", as_record(Manifest, provable(manifest_data())))
    empty.register(Bundle.open(tmp_path / "bundle"))
    command = [sys.executable, "-m", "pipeline", "pull", "jets/1", str(tmp_path / "pulled")]
    return [*command, "--registry", empty.uri]


def on_a_terminal(command: list[str]) -> tuple[bytes, bytes]:
    """The command's standard error on a terminal, and its standard output in a pipe."""
    ours, its = pty.openpty()  # the two ends of the terminal
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=its, cwd=ROOT, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its)
    shown = b""
    with suppress(OSError):  # raised when the terminal closes
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    return shown, answer


def test_a_terminal_shows_what_is_at_work(pull: list[str]) -> None:
    shown, answer = on_a_terminal(pull)
    assert b"pulling jets/1" in shown
    assert shown.rpartition(b"pulling")[2].count(b"\x1b[2K") >= 1, "the line is wiped away"
    assert answer.startswith(b"jets/1 is in ")
    assert not any(escape in answer for escape in ESCAPES)


SCRIPT = """
import click
from pipeline.cli.answers import say, show_steps

with click.Context(click.Command("any")).scope(), show_steps() as show, show("at work", 40.0):
    say("a line")
"""


def test_lines_stand_above_the_line_of_progress() -> None:
    shown, _ = on_a_terminal([sys.executable, "-c", SCRIPT])
    assert b"at work, about 40 s: " in shown and b"0:00:00\x1b[0m\r\x1b[2Ka line\r\n" in shown


@pytest.mark.parametrize("option", ["--quiet", "--json", "--verbose"])
def test_an_option_for_other_output_shows_no_progress(pull: list[str], option: str) -> None:
    shown, _ = on_a_terminal([*pull, option])
    assert b"\x1b" not in shown and b"pulling" not in shown


def test_a_terminal_that_cannot_show_it_shows_no_progress(
    pull: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shown, _ = on_a_terminal(pull)
    assert b"\x1b" not in shown and b"pulling" not in shown


def test_a_log_has_no_progress(pull: list[str]) -> None:
    process = subprocess.run(pull, capture_output=True, cwd=ROOT, timeout=60)
    assert (process.returncode, process.stderr) == (0, b"")
    assert not any(escape in process.stdout for escape in ESCAPES)


def work_in(folder: Path, model: str = "jets") -> tuple[Work, list[tuple[str, float | None]]]:
    """A `Work`, and the list of steps that it shows, each with its time in the last run."""
    shown: list[tuple[str, float | None]] = []

    @contextmanager
    def show(name: str, before: float | None) -> Iterator[None]:
        shown.append((name, before))
        yield

    return Work(folder, show=show, model=model), shown


def test_a_step_of_a_first_run_knows_no_time(tmp_path: Path) -> None:
    work, shown = work_in(tmp_path)
    with work.step("capture"):
        pass
    assert shown == [("capture", None)]


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """The work folder of a run of two steps."""
    work, _ = work_in(tmp_path)
    work.worked = {"capture": 12.0, "package": 0.5}
    work.keep_seconds()
    return tmp_path


def test_a_step_knows_how_long_it_took_before(timed: Path) -> None:
    work, shown = work_in(timed)
    with work.step("capture"):
        pass
    assert shown == [("capture", 12.0)]


def test_times_of_steps_that_a_run_does_not_need_are_kept(timed: Path) -> None:
    work, _ = work_in(timed)
    work.worked = {"capture": 11.0}
    work.keep_seconds()
    assert work_in(timed)[0].before == {"capture": 11.0, "package": 0.5}


def test_times_are_of_one_model(timed: Path) -> None:
    assert work_in(timed, "tracks")[0].before == {}


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"capture": "long"}), '{"capture": 1'])
def test_seconds_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "seconds").mkdir()
    (tmp_path / "seconds" / "jets.json").write_text(text)
    assert work_in(tmp_path)[0].before == {}


def test_seconds_that_cannot_be_kept_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "seconds").touch()
    work, _ = work_in(tmp_path)
    with work.step("capture"):
        pass
    work.keep_seconds()
    assert (tmp_path / "seconds").is_file()
