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
    write_bundle(tmp_path / "made", as_record(Manifest, provable(manifest_data())))
    empty.register(Bundle.open(tmp_path / "made"))
    command = [sys.executable, "-m", "pipeline", "pull", "jets/1", str(tmp_path / "pulled")]
    return [*command, "--registry", empty.uri]


def on_a_terminal(command: list[str]) -> tuple[bytes, bytes]:
    """The command's standard error on a terminal, and its standard output in a pipe."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=its, cwd=ROOT, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its)
    shown = b""
    with suppress(OSError):  # raised when the terminal closes
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    return shown, answer


def test_a_terminal_shows_what_is_at_work(pull: list[str]) -> None:
    shown, answer = on_a_terminal(pull)
    assert b"pulling jets/1" in shown
    assert shown.rpartition(b"pulling")[2].count(b"\x1b[2K") >= 1, "the line is wiped away"
    assert answer.startswith(b"jets/1 is in ")
    assert not any(each in answer for each in ESCAPES)


SAYS = """
import click
from pipeline.cli.answers import say, steps

with click.Context(click.Command("any")).scope(), steps() as show, show("at work", 40.0):
    say("a line")
"""


def test_lines_stand_above_it() -> None:
    shown, _ = on_a_terminal([sys.executable, "-c", SAYS])
    assert b"at work, about 40 s: " in shown and b"0:00:00\x1b[0m\r\x1b[2Ka line\r\n" in shown


@pytest.mark.parametrize("option", ["--quiet", "--json", "--verbose", ""])
def test_a_terminal_where_it_is_not_asked_for(
    pull: list[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not option:  # the terminal cannot show it
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shown, _ = on_a_terminal([*pull, *filter(None, [option])])
    assert b"\x1b" not in shown
    assert b"pulling" not in shown


def test_a_log_has_lines_alone(pull: list[str]) -> None:
    done = subprocess.run(pull, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not any(each in done.stdout for each in ESCAPES)


def work_in(folder: Path, model: str = "jets") -> tuple[Work, list[tuple[str, float | None]]]:
    """A `Work`, and the list of steps that it shows, each with its time in the last run."""
    shown: list[tuple[str, float | None]] = []

    @contextmanager
    def show(name: str, before: float | None) -> Iterator[None]:
        shown.append((name, before))
        yield

    return Work(folder, show=show, model=model), shown


def test_a_step_knows_how_long_it_took_before(tmp_path: Path) -> None:
    work, shown = work_in(tmp_path)
    for name in ("capture", "package"):
        with work.step(name):
            pass
    work.worked = {"capture": 12.0, "package": 0.5}
    work.keep_seconds()
    assert shown == [("capture", None), ("package", None)]

    work, shown = work_in(tmp_path)
    with work.step("capture"):
        pass
    work.worked = {"capture": 11.0}
    work.keep_seconds()  # also keeps steps that this run did not need
    assert shown == [("capture", 12.0)]
    assert work_in(tmp_path)[0].before == {"capture": 11.0, "package": 0.5}
    assert work_in(tmp_path, "tracks")[0].before == {}


@pytest.mark.parametrize("kept", ["", "[]", json.dumps({"capture": "long"}), '{"capture": 1'])
def test_seconds_that_cannot_be_read_are_none(tmp_path: Path, kept: str) -> None:
    (tmp_path / "seconds").mkdir()
    (tmp_path / "seconds" / "jets.json").write_text(kept)
    assert work_in(tmp_path)[0].before == {}


def test_seconds_that_cannot_be_kept_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "seconds").touch()
    work, _ = work_in(tmp_path)
    with work.step("capture"):
        pass
    work.keep_seconds()
    assert (tmp_path / "seconds").is_file()
