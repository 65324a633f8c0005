"""Commands that show versions and move aliases: as text, and with --json for programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import answers
from pipeline.cli.main import main
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models.project import TARGET, Built, answer, cli, described, refusal, resealed
from tests.models.versions import copy_of, promoted, store_of

COMMANDS = (
    "run", "build", "ls", "show", "check", "promote", "approve", "rollback", "history", "pull",
    "push", "sign", "deploy", "serve", "doctor", "init", "apply", "source", "cxx", "ui",
    "drift",
)  # fmt: skip
OF_THE_REGISTRY = ("policy", "export", "import", "rm", "gc", "cache")
BEFORE = ("validate", "bench", "verify", "diff", "explain", *OF_THE_REGISTRY)
OF_THE_HOST_ALONE = ("cache", "init", "explain")
SCRIPT = Path(sys.executable).with_name("pipeline")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def store_of_two(
    jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    second = described(jets.bundle, tmp_path_factory.mktemp("two") / "two", "the second")

    def fill(made: Registry) -> None:
        for bundle in (jets.bundle, second):
            promoted(made, bundle)

    return store_of(tmp_path_factory, empty_database, fill)


@pytest.fixture
def two(store_of_two: Path, tmp_path: Path) -> Registry:
    """jets/2 is in production, and jets/1 was before it."""
    return copy_of(store_of_two, tmp_path / "store")


def said(*arguments: object, registry: Registry, code: int = 0) -> str:
    return cli(*arguments, "--registry", registry.uri, code=code).stdout


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the installed command in a process of its own."""
    command = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "soa_pipeline"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


def test_help_says_what_each_command_does() -> None:
    text = cli("--help").stdout
    assert main.commands.keys() == {*COMMANDS, *BEFORE, "registry"}
    assert all(f"\n  {command} " in text for command in (*COMMANDS, "registry"))
    assert not any(f"\n  {command} " in text for command in BEFORE)
    assert all(f"\n  {each} " in cli("registry", "--help").stdout for each in OF_THE_REGISTRY)


@pytest.mark.parametrize(
    "words",
    [
        *((name,) for name in (*COMMANDS, *BEFORE)),
        *(("registry", name) for name in OF_THE_REGISTRY),
    ],
    ids=" ".join,
)
def test_each_command_has_its_own_help(words: tuple[str, ...]) -> None:
    own = cli(*words, "--help").stdout
    assert own.startswith(f"Usage: main {' '.join(words)} ")
    assert own.count("--json") == 1
    assert own.count("--registry") == (words[-1] not in OF_THE_HOST_ALONE)


def test_a_command_by_its_name_of_before_says_the_new_one() -> None:
    for name in BEFORE:
        new = "check" if name in ("validate", "bench", "verify") else "show"
        new = "registry" if name in OF_THE_REGISTRY else new
        assert f"`pipeline {new}`" in cli(name, "--help").stdout


def test_help_is_in_groups_of_whole_sentences() -> None:
    text = cli("--help").stdout
    groups = [text.index(f"\n{title}:\n") for title in ("Build", "Judge", "Run", "Keep")]
    assert groups == sorted(groups)
    inner = cli("registry", "--help").stdout
    listed = "".join((text[groups[0] :] + inner[inner.index("Commands:") :]).split())
    assert "…" not in listed and "..." not in listed
    for name in (*COMMANDS, *OF_THE_REGISTRY, "registry"):
        sentence = re.split(r"\.\s|\.$", str(main.commands[name].help))[0]
        assert "".join(sentence.split()) + "." in listed
    assert max(map(len, text.splitlines())) <= 80


def test_help_waits_for_no_heavy_import() -> None:
    check = (
        "import sys, pipeline.cli.main\n"
        "print([m for m in ('torch', 'mlflow', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_wrong_name_waits_for_no_heavy_import(two: Registry) -> None:
    check = (
        "import sys; from click.testing import CliRunner; from pipeline.cli.main import main\n"
        "for words in ('source', 'promote --to staging', 'validate', 'check'):\n"
        "    found = CliRunner().invoke(main, [*words.split(), *sys.argv[1:]])\n"
        "    print(found.exit_code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", check, "jets@nobody", "--registry", two.uri]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n" * 4


def test_nothing_yet(tmp_path: Path) -> None:
    """Commands that only read create no registry, and do not take its absence for emptiness."""
    uri = f"sqlite:///{tmp_path}/none/registry.db"
    reading: list[list[object]] = [
        ["ls"], ["ls", "jets"], ["show", "jets"], ["history", "jets"], ["policy"], ["ui"],
        ["export", "jets", tmp_path / "out"], ["pull", "jets", tmp_path / "out"],
    ]  # fmt: skip
    for command in reading:
        said = refusal(*command, "--registry", uri)
        assert uri in said and "PIPELINE_REGISTRY" in said, command
    assert "no registry" in cli("gc", "--registry", uri).stdout
    assert not (tmp_path / "none").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("tables", ["", "CREATE TABLE theirs (a)"])
def test_a_database_without_a_registry(tmp_path: Path, tables: str) -> None:
    """Nothing, or another program's: commands that read make no tables in it."""
    file = tmp_path / "registry.db"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(tables)
    file.touch()
    content = file.read_bytes()
    for command in (["ls"], ["history", "jets"], ["policy"]):
        assert "no tables" in refusal(*command, "--registry", f"sqlite:///{file}")
    assert file.read_bytes() == content


def test_show_says_what_an_engine_recorded(registry: Registry, jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        facts = {"opset": 20, "shared_bytes": [12, 4], "notes": []}
        manifest["targets"][TARGET]["candidates"]["exported"]["facts"] = facts

    bundle = resealed(jets.bundle, tmp_path / "facts", edit)
    text = said("show", bundle.path, registry=registry)
    assert "  exported: opset 20; shared bytes 12, 4\n" in text


def test_ls(two: Registry) -> None:
    text = said("ls", registry=two)
    assert "jets/1" in text
    assert "@previous" in text
    assert f"{TARGET} verified" in text


def test_ls_as_json(two: Registry) -> None:
    versions = answer("ls", registry=two)["jets"]
    assert [v["version"] for v in versions] == ["jets/1", "jets/2"]
    assert [v["aliases"] for v in versions] == [["previous"], ["production"]]
    assert [v["targets"] for v in versions] == [{TARGET: "verified"}] * 2
    assert answer("ls", "jets", registry=two) == {"jets": versions}


def test_ls_of_no_model(two: Registry) -> None:
    assert "no such model" in refusal("ls", "tracks", "--registry", two.uri)


def test_ls_of_a_model_without_a_version(registry: Registry) -> None:
    cli("rm", "jets/1", "--yes", "--registry", registry.uri)
    assert said("ls", "jets", registry=registry) == "jets has no version\n"
    assert "registry is empty" in said("ls", registry=registry)
    assert answer("ls", "jets", registry=registry) == {"jets": []}


def test_show(two: Registry, jets: Built) -> None:
    text = said("show", "jets@previous", registry=two)
    assert text.startswith("jets/1\n")
    for fact in ("a small tagger", jets.bundle.digest, "@previous", "scripted", "n: 0 … 1,000"):
        assert fact in text
    for engine in jets.bundle.manifest.targets[TARGET].candidates:
        assert engine in text


def test_show_of_the_latest_version_as_json(two: Registry) -> None:
    shown = answer("show", "jets", registry=two)
    assert shown["version"]["version"] == "jets/2"
    assert shown["manifest"]["description"] == "the second"


def test_show_of_a_folder(two: Registry, jets: Built) -> None:
    folder = answer("show", jets.bundle.path, registry=two)
    assert folder["version"] is None
    assert folder["manifest"]["provenance"]["config"]["name"] == "jets"
    assert str(jets.bundle.path) in said("show", jets.bundle.path, registry=two)


def test_promote_and_rollback(registry: Registry, jets: Built, tmp_path: Path) -> None:
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    assert "nothing to roll back to" in refusal("rollback", "jets", "--registry", registry.uri)
    text = said("promote", "jets/1", "--to", "production", registry=registry)
    assert "REFUSED" not in text
    assert text.endswith("jets/1 is now jets@production\n")
    # Both are equally fast, but two measurements may differ much on a busy machine.
    options = ("--to", "production", "--max-slowdown", "1000")
    done = answer("promote", "jets/2", *options, registry=registry)
    assert (done["promoted"], done["alias"], done["replaced"]) == (
        "jets/2",
        "production",
        "jets/1",
    )
    gates = ["digests", "verified", "tolerance", "reference", "speed"]
    assert [d["gate"] for d in done["decisions"]] == gates
    assert all(d["passed"] for d in done["decisions"])
    assert said("rollback", "jets", registry=registry) == "jets/1 is jets@production again\n"
    assert answer("rollback", "jets", registry=registry) == {"production": "jets/2"}


def test_validate(registry: Registry, jets: Built, heavy: Built, tmp_path: Path) -> None:
    found = answer("validate", "jets", registry=registry)
    assert [r["engine"] for r in found[TARGET]] == list(
        jets.bundle.manifest.targets[TARGET].candidates
    )
    assert all(r["valid"] for r in found[TARGET])

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")
        record = manifest["targets"][TARGET]
        engines = ("aoti", "exported")
        below = [{"rows": 10, "engine": "exported"}]  # also used, for few rows
        record.update(chosen="aoti", below=below)
        record.update(candidates={name: record["candidates"][name] for name in engines})

    other = resealed(jets.bundle, tmp_path / "other", edit)
    text = cli("check", other.path, "--target", TARGET, code=1)
    assert "refused" in text.stdout
    assert "exported is refused: output 'probabilities' at n=" in text.stdout


def test_bench(registry: Registry, jets: Built) -> None:
    quick = ("bench", "jets", "--seconds", "0.01", "--json", "--registry", registry.uri)
    assert cli(*quick, "--quiet").stderr == ""
    asked = cli(*quick)
    assert f"on {TARGET}" in asked.stderr
    found = json.loads(asked.stdout)[TARGET]
    assert set(found["timings"]["n=1000"]) == set(jets.bundle.manifest.targets[TARGET].candidates)
    assert found["fastest"] in found["timings"]["n=1000"]
    text = said("bench", jets.bundle.path, "--seconds", "0.01", registry=registry)
    assert "\nchosen" in text


def test_check_validates(registry: Registry, jets: Built) -> None:
    checked = answer("check", "jets", registry=registry)
    assert checked.keys() == {"digest", "artifacts"}
    assert checked["digest"] == jets.bundle.digest
    assert checked["artifacts"].keys() == answer("validate", "jets", registry=registry).keys()
    assert all(report["valid"] for each in checked["artifacts"].values() for report in each)


def test_check_with_times(registry: Registry, tmp_path: Path) -> None:
    page = tmp_path / "times.html"
    options = ("--times", "--seconds", "0.01", "--html", page)
    text = said("check", "jets", *options, registry=registry)
    assert "\nchosen" in text and "validation on" in text and page.is_file()
    assert cli("check", "jets", "--html", page, "--registry", registry.uri, code=2).stdout == ""


def test_check_with_the_time_of_each_operator(registry: Registry, tmp_path: Path) -> None:
    drawn = tmp_path / "operators.html"
    timed = answer("check", "jets", "--operators", "--html", drawn, registry=registry)["operators"]
    assert "<svg" in drawn.read_text() and timed[0]["operator"] in drawn.read_text()
    assert sum(each["shares"]["n=1000"] for each in timed) == pytest.approx(1)
    assert {each["line"].partition(":")[0] for each in timed} >= {"model.py"}


@pytest.mark.parametrize("command", ["check", "validate", "bench"])
def test_target_that_is_not_there(registry: Registry, command: str) -> None:
    def asked(target: str) -> str:
        return refusal(command, "jets", "--target", target, "--registry", registry.uri)

    assert f"has no target cuda/sm_90; it has: {TARGET}" in asked("cuda/sm_90")
    assert "unknown target 'gpu'" in asked("gpu")


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "jets", "--seconds"),
        ("promote", "jets", "--to", "staging", "--max-slowdown"),
        ("gc", "--dry-run", "--older-than"),
    ],
    ids=lambda command: command[-1],
)
@pytest.mark.parametrize("number", ["-1", "nan", "inf"])
def test_numbers_that_mean_nothing(
    registry: Registry, command: tuple[str, ...], number: str
) -> None:
    result = cli(*command, number, "--registry", registry.uri, code=2)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert command[-1] in result.stderr


@pytest.mark.parametrize("time", ["yesterday", "9999-12-31T23:59-12:00"])
def test_a_time_that_is_none(registry: Registry, time: str) -> None:
    result = cli("history", "jets", "--at", time, "--registry", registry.uri, code=2)
    assert "is not a time" in result.stderr


def test_pull(two: Registry, jets: Built, tmp_path: Path) -> None:
    text = said("pull", "jets@previous", tmp_path / "one", registry=two)
    assert text == f"jets/1 is in {tmp_path / 'one'}\n"
    assert Bundle.open(tmp_path / "one").digest == jets.bundle.digest
    done = answer("pull", "jets", tmp_path / "two-copy", registry=two)
    assert done["version"] == "jets/2"
    assert done["folder"] == str(tmp_path / "two-copy")
    again = refusal("pull", "jets", tmp_path / "one", "--registry", two.uri)
    assert again == f"{tmp_path / 'one'}: exists already"


def compiler_of_doctor(registry: Registry, code: int = 0) -> dict[str, str]:
    said = answer("doctor", registry=registry, code=code)
    found: dict[str, str]
    (found,) = [each for each in said if each["what"] == "C++ compiler"]
    return found


def test_doctor_names_the_compiler_of_cxx(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own-compiler"
    own.write_text("#!/bin/sh\necho own compiler 1.0\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", f"env {own} -pipe")
    found = compiler_of_doctor(registry)
    assert (found["status"], found["found"]) == ("ok", "own compiler 1.0")


def test_doctor_refuses_a_compiler_that_changes_numbers(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ -ffast-math")
    found = compiler_of_doctor(registry, code=1)
    assert found["status"] == "missing" and "-ffast-math" in found["found"]


def test_doctor(registry: Registry) -> None:
    findings = {f["what"]: f for f in answer("doctor", registry=registry)}
    assert findings["torch"]["status"] == findings["registry"]["status"] == "ok"
    assert findings["registry"]["found"].endswith("1 models")
    assert "torch" in said("doctor", registry=registry)


def test_doctor_of_a_broken_registry(tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database" * 100)
    text = cli("doctor", "--registry", f"sqlite:///{broken}", "--json", code=1).stdout
    (bad,) = [finding for finding in json.loads(text) if finding["what"] == "registry"]
    assert (bad["status"], bad["cure"]) == ("missing", "check --registry")
    assert "not a database" in bad["found"]


def test_the_installed_command(two: Registry) -> None:
    """Exit codes and output streams; the environment variable names the registry."""
    wrong = process("show", "jets@nobody", "--registry", two.uri)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == (
        "pipeline: jets@nobody: jets has no such alias; its aliases: @previous, @production "
        "[not-found]\n"
    )
    for words, says in ((("promote", "jets"), "Missing option '--to'"), (("--fast",), "'--fast'")):
        usage = process(*words)
        assert (usage.returncode, usage.stdout, usage.stderr.count("\n")) == (2, "", 1)
        assert says in usage.stderr
    listed = process("ls", "--json", PIPELINE_REGISTRY=two.uri)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [each["version"] for each in json.loads(listed.stdout)["jets"]] == ["jets/1", "jets/2"]


@pytest.mark.parametrize(("option", "said"), [((), "compiling\n"), (("-q",), "")])
def test_quiet_is_quiet_in_threads_too(option: tuple[str, ...], said: str) -> None:
    """Candidates are compiled in threads, in which click has no running command."""

    @answers.command(registry=False)
    def work() -> None:
        thread = Thread(target=answers.sayer(), args=("compiling",))
        thread.start()
        thread.join()

    assert CliRunner().invoke(work, option).stderr == said
