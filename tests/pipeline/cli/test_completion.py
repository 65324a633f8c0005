"""Tab completes names of models, versions and aliases, in a real bash."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from pipeline.cli import completion as completion
from pipeline.cli.main import main
from registry import Bundle, Manifest, Registry
from soa.records import as_record
from tests.models import bundles
from tests.models.bundles import PASSED
from tests.models.versions import copy_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def registry(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """jets/1 and jets/2, the first in production; jet-tagger/1; muons/1."""
    folder = tmp_path_factory.mktemp("completion")
    store = copy_of(empty_database.parent, folder / "store")
    for number, name in enumerate(("jets", "jets", "jet-tagger", "muons")):
        manifest = as_record(Manifest, bundles.manifest_data() | {"name": name})
        bundles.write_bundle(folder / str(number), manifest, number)
        version = store.register(Bundle.open(folder / str(number)))
        if number == 0:
            store.promote(version, "production", PASSED)
    return store


def bash_environment(registry: str, *words: str) -> dict[str, str]:
    """The environment in which bash asks to complete the last word."""
    return {
        "PIPELINE_REGISTRY": registry,
        "COMP_WORDS": "\n".join(("pipeline", *words)),
        "COMP_CWORD": str(len(words)),
        "_PIPELINE_COMPLETE": "bash_complete",
    }


def completions(registry: str, *words: str) -> list[str]:
    """The answers for the last word, as `type,value`."""
    answer = CliRunner().invoke(main, env=bash_environment(registry, *words), prog_name="pipeline")
    assert (answer.exit_code, answer.stderr) == (0, "")
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["show", "j"], ["plain,jet-tagger", "plain,jets"]),
        (["show", "mu"], ["plain,muons", "plain,muons/1"]),
        (["diff", "jets/1", "jets/"], ["plain,jets/2", "plain,jets/1"]),
        (["show", "jets", "@", "pro"], ["plain,@production"]),
        (["diff", "jets", "@", "production", "jets", "@"], ["plain,@production"]),
        (["rollback", "jets"], ["plain,jets"]),
        (["validate", "./jets"], ["dir,./jets"]),
        (["show", "nobody/"], ["dir,nobody/"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_names_that_begin_like_the_last_word_complete_it(
    registry: Registry, words: list[str], answers: list[str]
) -> None:
    assert completions(registry.uri, *words) == answers


def test_completion_imports_nothing_heavy(registry: Registry) -> None:
    environment = (
        os.environ | {"PYTHONPATH": str(ROOT)} | bash_environment(registry.uri, "show", "jets/")
    )
    command = [sys.executable, "-X", "importtime", "-m", "soa_pipeline"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "click" in imported and process.stdout.split() == ["plain,jets/2", "plain,jets/1"]
    assert not imported & {"torch", "mlflow", "numpy", "pandas", "sqlalchemy"}


def test_the_registry_of_the_line_counts_although_bash_divides_it(registry: Registry) -> None:
    kind, path = registry.uri.split(":")
    words = ("show", "--registry", kind, ":", path, "mu")
    assert completions("sqlite:///none/registry.db", *words) == ["plain,muons", "plain,muons/1"]


def test_without_a_registry_nothing_is_completed_or_made(tmp_path: Path) -> None:
    assert completions(f"sqlite:///{tmp_path}/none.db", "show", "j") == []
    assert not (tmp_path / "none.db").exists()


def test_a_registry_that_does_not_answer_completes_nothing() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        assert completions(f"http://127.0.0.1:{silent.getsockname()[1]}", "show", "j") == []


def test_fish_shows_a_description_up_to_its_end() -> None:
    fish = get_completion_class("fish")
    assert fish is not None and 'string split -m 1 "," $completion' in fish.source_template


@pytest.fixture
def received(registry: Registry, tmp_path: Path) -> Iterator[list[str]]:
    """The arguments that a command gets from three lines with Tab in an interactive bash."""
    script = tmp_path / "pipeline"
    python = f"PYTHONPATH={ROOT} exec {sys.executable} -m soa_pipeline"
    script.write_text(f'#!/bin/sh\ntest -z "$_PIPELINE_COMPLETE" && echo "GOT $*." || {python}\n')
    script.chmod(0o755)
    source = 'eval "$(_PIPELINE_COMPLETE=bash_source pipeline)"'
    keyboard, terminal = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={
            **os.environ, "PIPELINE_REGISTRY": registry.uri, "TERM": "dumb", "PS1": "",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        },
    )  # fmt: skip
    os.close(terminal)
    lines = ("pipeline show mu\t1", "pipeline show jets@pr\t", "pipeline show jets@\t")
    arguments: list[str] = []
    try:
        for line in (source, *lines):
            os.write(keyboard, f"{line}\n".encode())
        output = ""
        while len(arguments) < len(lines):
            output += os.read(keyboard, 1000).decode()
            # What follows GOT may not be complete yet: it ends with a full stop.
            echoes = output.split("\nGOT ")[1:]
            arguments = [echo.partition(".")[0] for echo in echoes if "." in echo]
        yield arguments
    finally:
        bash.kill()
        bash.wait()
        os.close(keyboard)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is installed")
def test_tab_in_bash(received: list[str]) -> None:
    assert received == ["show muons1", "show jets@production", "show jets@production"]
