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
from tests.models.project import PASSED, TARGET, Built, answer, cli, described, refusal, resealed
from tests.models.versions import copy_of, promoted, store_of

COMMANDS = (
    "run", "build", "ls", "show", "check", "promote", "approve", "rollback", "history", "pull",
    "push", "sign", "deploy", "serve", "doctor", "init", "apply", "source", "cxx", "ui",
    "drift",
)  # fmt: skip
OF_THE_REGISTRY = ("policy", "export", "import", "rm", "gc", "cache")
FORMER_COMMANDS = ("validate", "bench", "verify", "diff", "explain", *OF_THE_REGISTRY)
WITHOUT_A_REGISTRY = ("cache", "init", "explain")
SCRIPT = Path(sys.executable).with_name("pipeline")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def store_of_two(
    jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of `two`, made once for all tests."""
    second = described(jets.bundle, tmp_path_factory.mktemp("two") / "two", "the second")

    def fill(registry: Registry) -> None:
        for bundle in (jets.bundle, second):
            promoted(registry, bundle)

    return store_of(tmp_path_factory, empty_database, fill)


@pytest.fixture
def two(store_of_two: Path, tmp_path: Path) -> Registry:
    """jets/2 is in production, and jets/1 was before it."""
    return copy_of(store_of_two, tmp_path / "store")


def text_of(*arguments: object, registry: Registry, code: int = 0) -> str:
    """The standard output of a command on a registry."""
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


def test_the_commands_are_these() -> None:
    assert main.commands.keys() == {*COMMANDS, *FORMER_COMMANDS, "registry"}


def test_help_lists_each_command_by_its_present_name() -> None:
    text = cli("--help").stdout
    assert all(f"\n  {command} " in text for command in (*COMMANDS, "registry"))
    assert not any(f"\n  {command} " in text for command in FORMER_COMMANDS)


def test_help_of_registry_lists_its_commands() -> None:
    text = cli("registry", "--help").stdout
    assert all(f"\n  {command} " in text for command in OF_THE_REGISTRY)


@pytest.mark.parametrize(
    "words",
    [
        *((name,) for name in (*COMMANDS, *FORMER_COMMANDS)),
        *(("registry", name) for name in OF_THE_REGISTRY),
    ],
    ids=" ".join,
)
def test_each_command_has_its_own_help(words: tuple[str, ...]) -> None:
    text = cli(*words, "--help").stdout
    assert text.startswith(f"Usage: main {' '.join(words)} ")
    assert text.count("--json") == 1
    assert text.count("--registry") == (words[-1] not in WITHOUT_A_REGISTRY)


def present_name(former: str) -> str:
    """The command that replaced one of FORMER_COMMANDS."""
    if former in ("validate", "bench", "verify"):
        return "check"
    return "registry" if former in OF_THE_REGISTRY else "show"


@pytest.mark.parametrize("name", FORMER_COMMANDS)
def test_help_of_a_former_name_says_the_present_one(name: str) -> None:
    assert f"`pipeline {present_name(name)}`" in cli(name, "--help").stdout


def test_help_is_in_groups_of_whole_sentences() -> None:
    """The first sentence of each command is complete, and lines fit in eighty columns."""
    text = cli("--help").stdout
    groups = [text.index(f"\n{title}:\n") for title in ("Build", "Judge", "Run", "Keep")]
    assert groups == sorted(groups)
    of_registry = cli("registry", "--help").stdout
    listed = text[groups[0] :] + of_registry[of_registry.index("Commands:") :]
    without_spaces = "".join(listed.split())
    assert "…" not in without_spaces and "..." not in without_spaces
    for name in (*COMMANDS, *OF_THE_REGISTRY, "registry"):
        sentence = re.split(r"\.\s|\.$", str(main.commands[name].help))[0]
        assert "".join(sentence.split()) + "." in without_spaces
    assert max(map(len, text.splitlines())) <= 80


def test_help_waits_for_no_heavy_import() -> None:
    check = (
        "import sys, pipeline.cli.main\n"
        "print([m for m in ('torch', 'mlflow', 'numpy', 'pydantic') if m in sys.modules])"
    )
    command = [sys.executable, "-c", check]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_a_wrong_name_waits_for_no_heavy_import(two: Registry) -> None:
    check = (
        "import sys; from click.testing import CliRunner; from pipeline.cli.main import main\n"
        "for words in ('source', 'promote --to staging', 'validate', 'check'):\n"
        "    result = CliRunner().invoke(main, [*words.split(), *sys.argv[1:]])\n"
        "    print(result.exit_code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", check, "jets@nobody", "--registry", two.uri]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "1 False\n" * 4


@pytest.mark.parametrize(
    "command",
    ["ls", "ls jets", "show jets", "history jets", "policy", "ui", "export jets out",
     "pull jets out"],
)  # fmt: skip
def test_a_command_that_reads_makes_no_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It does not take the absence of one for emptiness."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/none/registry.db"
    message = refusal(*command.split(), "--registry", uri)
    assert uri in message and "PIPELINE_REGISTRY" in message
    assert not (tmp_path / "none").exists() and not (tmp_path / "out").exists()


def test_gc_without_a_registry_has_nothing_to_do(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/none/registry.db"
    assert "no registry" in cli("gc", "--registry", uri).stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "statement", ["", "CREATE TABLE theirs (a)"], ids=["empty", "another program's"]
)
@pytest.mark.parametrize("command", ["ls", "history jets", "policy"])
def test_a_command_that_reads_makes_no_tables(tmp_path: Path, statement: str, command: str) -> None:
    file = tmp_path / "registry.db"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement)
    file.touch()
    content = file.read_bytes()
    assert "no tables" in refusal(*command.split(), "--registry", f"sqlite:///{file}")
    assert file.read_bytes() == content


def test_show_says_what_an_engine_recorded(registry: Registry, jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        facts = {"opset": 20, "shared_bytes": [12, 4], "notes": []}
        manifest["targets"][TARGET]["candidates"]["exported"]["facts"] = facts

    bundle = resealed(jets.bundle, tmp_path / "facts", edit)
    text = text_of("show", bundle.path, registry=registry)
    assert "  exported: opset 20; shared bytes 12, 4\n" in text


def test_ls_lists_versions_with_aliases_and_targets(two: Registry) -> None:
    text = text_of("ls", registry=two)
    assert "jets/1" in text
    assert "@previous" in text
    assert f"{TARGET} verified" in text


def test_ls_as_json_has_every_version(two: Registry) -> None:
    versions = answer("ls", registry=two)["jets"]
    assert [v["version"] for v in versions] == ["jets/1", "jets/2"]
    assert [v["aliases"] for v in versions] == [["previous"], ["production"]]
    assert [v["targets"] for v in versions] == [{TARGET: "verified"}] * 2
    assert answer("ls", "jets", registry=two) == {"jets": versions}


def test_ls_of_a_model_that_does_not_exist_is_refused(two: Registry) -> None:
    assert "no such model" in refusal("ls", "tracks", "--registry", two.uri)


def test_ls_of_a_model_without_a_version(registry: Registry) -> None:
    cli("rm", "jets/1", "--yes", "--registry", registry.uri)
    assert text_of("ls", "jets", registry=registry) == "jets has no version\n"
    assert "registry is empty" in text_of("ls", registry=registry)
    assert answer("ls", "jets", registry=registry) == {"jets": []}


def test_show_has_the_facts_of_a_version_and_its_engines(two: Registry, jets: Built) -> None:
    text = text_of("show", "jets@previous", registry=two)
    assert text.startswith("jets/1\n")
    for fact in ("a small tagger", jets.bundle.digest, "@previous", "scripted", "n: 0 … 1,000"):
        assert fact in text
    for engine in jets.bundle.manifest.targets[TARGET].candidates:
        assert engine in text


def test_show_of_the_latest_version_as_json(two: Registry) -> None:
    shown = answer("show", "jets", registry=two)
    assert shown["version"]["version"] == "jets/2"
    assert shown["manifest"]["description"] == "the second"


def test_show_takes_a_folder(two: Registry, jets: Built) -> None:
    folder = answer("show", jets.bundle.path, registry=two)
    assert folder["version"] is None
    assert folder["manifest"]["provenance"]["config"]["name"] == "jets"
    assert str(jets.bundle.path) in text_of("show", jets.bundle.path, registry=two)


@pytest.fixture
def with_second(registry: Registry, jets: Built, tmp_path: Path) -> Registry:
    """jets/1 and jets/2, which are equally fast; neither was promoted."""
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    return registry


def test_without_a_promotion_there_is_nothing_to_roll_back_to(registry: Registry) -> None:
    assert "nothing to roll back to" in refusal("rollback", "jets", "--registry", registry.uri)


def test_a_promotion_says_what_the_alias_is_now(registry: Registry) -> None:
    text = text_of("promote", "jets/1", "--to", "production", registry=registry)
    assert "REFUSED" not in text
    assert text.endswith("jets/1 is now jets@production\n")


def test_a_promotion_as_json_has_the_gates(with_second: Registry) -> None:
    with_second.promote(with_second.find("jets/1"), "production", PASSED)
    # Two measurements of the same speed may differ much on a busy machine.
    options = ("--to", "production", "--max-slowdown", "1000")
    report = answer("promote", "jets/2", *options, registry=with_second)
    assert report["promoted"] == "jets/2"
    assert (report["alias"], report["replaced"]) == ("production", "jets/1")
    gates = ["digests", "verified", "tolerance", "reference", "speed"]
    assert [decision["gate"] for decision in report["decisions"]] == gates
    assert all(decision["passed"] for decision in report["decisions"])


def test_a_second_rollback_undoes_the_first(two: Registry) -> None:
    assert text_of("rollback", "jets", registry=two) == "jets/1 is jets@production again\n"
    assert answer("rollback", "jets", registry=two) == {"production": "jets/2"}


def test_validate_judges_each_engine(registry: Registry, jets: Built) -> None:
    reports = answer("validate", "jets", registry=registry)[TARGET]
    engines = list(jets.bundle.manifest.targets[TARGET].candidates)
    assert [report["engine"] for report in reports] == engines
    assert all(report["valid"] for report in reports)


def test_check_refuses_an_artifact_of_another_model(
    jets: Built, heavy: Built, tmp_path: Path
) -> None:
    """Also if it is chosen for few rows only."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")
        record = manifest["targets"][TARGET]
        below = [{"rows": 10, "engine": "exported"}]
        record.update(chosen="aoti", below=below)
        candidates = {name: record["candidates"][name] for name in ("aoti", "exported")}
        record.update(candidates=candidates)

    other = resealed(jets.bundle, tmp_path / "other", edit)
    text = cli("check", other.path, "--target", TARGET, code=1).stdout
    assert "exported is refused: output 'probabilities' at n=" in text


BENCH = ("bench", "jets", "--seconds", "0.01")


def test_bench_times_each_engine(registry: Registry, jets: Built) -> None:
    times = answer(*BENCH, registry=registry)[TARGET]
    assert set(times["timings"]["n=1000"]) == set(jets.bundle.manifest.targets[TARGET].candidates)
    assert times["fastest"] in times["timings"]["n=1000"]


def test_bench_says_what_it_times_unless_it_is_quiet(registry: Registry) -> None:
    where = ("--json", "--registry", registry.uri)
    assert f"on {TARGET}" in cli(*BENCH, *where).stderr
    assert cli(*BENCH, *where, "--quiet").stderr == ""


def test_bench_of_a_folder_marks_what_was_chosen(registry: Registry, jets: Built) -> None:
    text = text_of("bench", jets.bundle.path, "--seconds", "0.01", registry=registry)
    assert "\nchosen" in text


def test_check_validates_every_artifact(registry: Registry, jets: Built) -> None:
    checked = answer("check", "jets", registry=registry)
    assert checked.keys() == {"digest", "artifacts"}
    assert checked["digest"] == jets.bundle.digest
    assert checked["artifacts"].keys() == answer("validate", "jets", registry=registry).keys()
    of_targets = checked["artifacts"].values()
    assert all(report["valid"] for reports in of_targets for report in reports)


def test_check_with_times_has_a_page(registry: Registry, tmp_path: Path) -> None:
    page = tmp_path / "times.html"
    options = ("--times", "--seconds", "0.01", "--html", page)
    text = text_of("check", "jets", *options, registry=registry)
    assert "\nchosen" in text and "validation on" in text and page.is_file()


def test_check_without_times_has_no_page(registry: Registry, tmp_path: Path) -> None:
    page = tmp_path / "times.html"
    assert cli("check", "jets", "--html", page, "--registry", registry.uri, code=2).stdout == ""
    assert not page.exists()


def test_check_with_the_time_of_each_operator(registry: Registry, tmp_path: Path) -> None:
    """Their shares are complete, each has its line of the model, and the page draws them."""
    page = tmp_path / "operators.html"
    options = ("--operators", "--html", page)
    operators = answer("check", "jets", *options, registry=registry)["operators"]
    assert "<svg" in page.read_text() and operators[0]["operator"] in page.read_text()
    assert sum(operator["shares"]["n=1000"] for operator in operators) == pytest.approx(1)
    assert {operator["line"].partition(":")[0] for operator in operators} >= {"model.py"}


@pytest.mark.parametrize("command", ["check", "validate", "bench"])
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("cuda/sm_90", f"has no target cuda/sm_90; it has: {TARGET}"),
        ("gpu", "unknown target 'gpu'"),
    ],
)
def test_a_target_that_a_version_lacks_is_refused(
    registry: Registry, command: str, target: str, problem: str
) -> None:
    where = ("--target", target, "--registry", registry.uri)
    assert problem in refusal(command, "jets", *where)


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
def test_numbers_that_mean_nothing_are_refused_by_their_option(
    registry: Registry, command: tuple[str, ...], number: str
) -> None:
    result = cli(*command, number, "--registry", registry.uri, code=2)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert command[-1] in result.stderr


@pytest.mark.parametrize("time", ["yesterday", "9999-12-31T23:59-12:00"])
def test_a_time_that_is_none_is_refused(registry: Registry, time: str) -> None:
    result = cli("history", "jets", "--at", time, "--registry", registry.uri, code=2)
    assert "is not a time" in result.stderr


def test_pull_says_where_the_version_is(two: Registry, jets: Built, tmp_path: Path) -> None:
    text = text_of("pull", "jets@previous", tmp_path / "one", registry=two)
    assert text == f"jets/1 is in {tmp_path / 'one'}\n"
    assert Bundle.open(tmp_path / "one").digest == jets.bundle.digest


def test_pull_as_json_names_version_and_folder(two: Registry, tmp_path: Path) -> None:
    pulled = answer("pull", "jets", tmp_path / "copy", registry=two)
    assert (pulled["version"], pulled["folder"]) == ("jets/2", str(tmp_path / "copy"))


def test_pull_into_a_folder_that_exists_is_refused(two: Registry, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    message = refusal("pull", "jets", tmp_path / "one", "--registry", two.uri)
    assert message == f"{tmp_path / 'one'}: exists already"


def finding_of_doctor(subject: str, registry: Registry, code: int = 0) -> dict[str, str]:
    """What `doctor` finds about one subject: its status, what is there, and a cure."""
    finding: dict[str, str]
    findings = answer("doctor", registry=registry, code=code)
    (finding,) = [entry for entry in findings if entry["what"] == subject]
    return finding


def test_doctor_names_the_compiler_of_cxx(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own-compiler"
    own.write_text("#!/bin/sh\necho own compiler 1.0\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", f"env {own} -pipe")
    compiler = finding_of_doctor("C++ compiler", registry)
    assert (compiler["status"], compiler["found"]) == ("ok", "own compiler 1.0")


def test_doctor_refuses_a_compiler_that_changes_numbers(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ -ffast-math")
    compiler = finding_of_doctor("C++ compiler", registry, code=1)
    assert compiler["status"] == "missing" and "-ffast-math" in compiler["found"]


def test_doctor_finds_torch(registry: Registry) -> None:
    assert finding_of_doctor("torch", registry)["status"] == "ok"
    assert "torch" in text_of("doctor", registry=registry)


def test_doctor_counts_the_models_of_the_registry(registry: Registry) -> None:
    finding = finding_of_doctor("registry", registry)
    assert finding["status"] == "ok"
    assert finding["found"].endswith("1 models")


def test_doctor_of_a_broken_registry(tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_bytes(b"this is no database" * 100)
    finding = finding_of_doctor("registry", Registry(f"sqlite:///{tmp_path}/broken.db"), code=1)
    assert (finding["status"], finding["cure"]) == ("missing", "check --registry")
    assert "not a database" in finding["found"]


def test_an_error_of_the_installed_command_is_one_line_on_stderr(two: Registry) -> None:
    result = process("show", "jets@nobody", "--registry", two.uri)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "pipeline: jets@nobody: jets has no such alias; its aliases: @previous, @production "
        "[not-found]\n"
    )


@pytest.mark.parametrize(
    ("words", "problem"), [("promote jets", "Missing option '--to'"), ("--fast", "'--fast'")]
)
def test_wrong_usage_of_the_installed_command_is_one_line(words: str, problem: str) -> None:
    result = process(*words.split())
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert problem in result.stderr


def test_the_environment_names_the_registry_of_the_installed_command(two: Registry) -> None:
    result = process("ls", "--json", PIPELINE_REGISTRY=two.uri)
    assert (result.returncode, result.stderr) == (0, "")
    versions = json.loads(result.stdout)["jets"]
    assert [version["version"] for version in versions] == ["jets/1", "jets/2"]


@pytest.mark.parametrize(("option", "shown"), [((), "compiling\n"), (("-q",), "")])
def test_quiet_is_quiet_in_threads_too(option: tuple[str, ...], shown: str) -> None:
    """Candidates are compiled in threads, in which click has no running command."""

    @answers.command(registry=False)
    def work() -> None:
        thread = Thread(target=answers.make_say(), args=("compiling",))
        thread.start()
        thread.join()

    assert CliRunner().invoke(work, option).stderr == shown
