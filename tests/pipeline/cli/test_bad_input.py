"""Mistakes of users, and failures of machines: one clear line, exit status 1, no partial output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry.store.registry import Registry
from tests.models.project import PASSED, Built, Project, cli, refusal, write_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project of one engine, which is not run yet."""
    project = write_project(tmp_path / "project")
    project.variant("config.yaml", ("[aoti, torchscript, exported]", "[exported]"))
    return project


def refused(project: Project, *changes: tuple[str, str]) -> str:
    """The line with which `run` refuses; nothing is kept or registered."""
    config = project.variant("changed.yaml", *changes)
    line = refusal("run", config, "--work", project.work, "--registry", project.registry)
    assert not list(project.work.rglob("done.json"))
    assert not Path(project.registry.removeprefix("sqlite:///")).exists()
    return line


@pytest.mark.parametrize(
    ("old", "new", "number", "says"),
    [
        ("description:", "descriptoin:", 2, "unknown key; allowed: name, descr"),
        ("factory: model.py", "factory: modell.py", 4, "modell.py"),
        ("weights.safetensors", "wheights.safetensors", 6, "wheights.safetensors"),
    ],
)
def test_a_mistake_in_a_config_is_named_with_its_line(
    project: Project, old: str, new: str, number: int, says: str
) -> None:
    line = refused(project, (old, new))
    assert line.startswith(f"{project.folder}/changed.yaml:{number}: ")
    assert says in line


def test_a_config_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal("run", tmp_path / "none.yaml", "--work", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_rows_that_memory_cannot_hold_are_refused(project: Project) -> None:
    # 2 ** 40 rows of 4 bytes are more memory than a machine has.
    text = refused(project, ("max: 1000", f"max: {1 << 40}"))
    assert f"out of memory while the model is captured with n = {1 << 40:,}" in text
    assert "build for fewer rows (rows: max)" in text


PLAIN = (("kwargs: {hidden: 48}", "kwargs: {}"), ("  weights: weights.safetensors\n", ""))


@pytest.mark.parametrize(
    ("factory", "changes", "says"),
    [
        ("missing", (), "has no callable 'missing'"),
        ("CountsCalls", PLAIN, "writes into"),  # so it cannot be captured
        ("Raises", PLAIN, "no detector, no answer"),
    ],
)
def test_a_factory_that_gives_no_usable_model_is_refused(
    project: Project, factory: str, changes: tuple[tuple[str, str], ...], says: str
) -> None:
    """The line names its file, and the line of the file if the model has one."""
    line = refused(project, ("model.py:talkative", f"model.py:{factory}"), *changes)
    assert says in line
    assert ("model.py:" if changes else "model.py") in line


# Bundles


@pytest.mark.parametrize("name", ["manifest.json", "program.pt2", "reports/benchmark.json"])
def test_a_bundle_with_a_truncated_file_is_refused(jets: Built, tmp_path: Path, name: str) -> None:
    """By all commands in the same words."""
    folder = tmp_path / "copy"
    shutil.copytree(jets.bundle.path, folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    line = refusal("show", folder)
    assert f"{name} is truncated or altered" in line
    for command in ("validate", "bench"):
        assert refusal(command, folder) == line


def test_stored_bundle_that_was_altered_is_not_pulled(registry: Registry, tmp_path: Path) -> None:
    stored = registry.local_path(registry.find("jets"))
    assert stored is not None
    (stored / "model.ts").write_bytes(b"other")
    line = refusal("pull", "jets", tmp_path / "copy", "--registry", registry.uri)
    assert "model.ts is truncated or altered" in line
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name]


# The registry


NO_VERSION = pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("jets@nobody", "jets has no such alias; its aliases: none"),
        ("jets/9", "no such version; there are: 1"),
        ("tracks", "no such model in sqlite:///"),
        ("jets@", "is neither a version"),
    ],
)


@NO_VERSION
@pytest.mark.parametrize("command", ["show", "validate", "bench"])
def test_a_command_on_no_version_is_refused(
    registry: Registry, command: str, ref: str, says: str
) -> None:
    assert says in refusal(command, ref, "--registry", registry.uri)


@pytest.mark.parametrize("command", ["show", "validate", "bench"])
def test_a_command_on_no_folder_is_refused(registry: Registry, command: str) -> None:
    assert "no such bundle folder" in refusal(command, "./jets", "--registry", registry.uri)


@NO_VERSION
def test_no_version_is_not_pulled(registry: Registry, tmp_path: Path, ref: str, says: str) -> None:
    assert says in refusal("pull", ref, tmp_path / "copy", "--registry", registry.uri)
    assert not (tmp_path / "copy").exists()


@NO_VERSION
def test_no_version_is_not_promoted(registry: Registry, ref: str, says: str) -> None:
    assert says in refusal("promote", ref, "--to", "production", "--registry", registry.uri)


def test_an_unreachable_registry_is_refused_before_any_work(project: Project) -> None:
    nobody = "http://127.0.0.1:9"  # the port of the discard protocol, which no host serves
    line = refusal("run", project.config, "--work", project.work, "--registry", nobody)
    assert "no answer from the server" in line
    assert not project.work.exists()


def test_a_work_folder_that_cannot_be_written_is_named(jets: Built, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refusal(
        "run", jets.project.config, "--work", tmp_path / "file" / "work",
        "--registry", jets.project.registry,
    )  # fmt: skip
    assert "Not a directory" in line
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize(
    "command",
    [
        ("pull", "jets", "/proc/x"),
        ("export", "jets", "/proc/x.tar"),
        ("deploy", "jets", "--out", "/proc/x"),
        ("build", "jets", "--target", "cpu/x86-64-v2", "--work", "/proc/x"),
        ("pull", "jets", "/tmp/" + "x" * 300),
    ],
    ids=lambda command: command[0],
)
def test_a_place_where_nothing_can_be_made_is_named(
    registry: Registry, command: tuple[str, ...]
) -> None:
    registry.promote(registry.find("jets"), "production", PASSED)
    assert "/x" in refusal(*command, "--registry", registry.uri)


@pytest.fixture
def bundle_folders(jets: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working folder has the bundle as `copy` and as `many/1`."""
    monkeypatch.chdir(tmp_path)
    for name in ("copy", "many/1"):
        shutil.copytree(jets.bundle.path, tmp_path / name)


folder_name = pytest.mark.parametrize("name", ["copy", "many/1"])


@folder_name
@pytest.mark.usefixtures("bundle_folders")
def test_a_name_that_is_a_folder_is_refused_with_the_way_to_write_it(
    registry: Registry, name: str
) -> None:
    """These commands decide by the text alone what a REF is."""
    for command in (("show", name), ("diff", "jets/1", name), ("sign", name, "--key", "k")):
        message = refusal(*command, "--registry", registry.uri)
        assert f"for the folder of that name write ./{name}" in message


@folder_name
@pytest.mark.usefixtures("bundle_folders")
def test_push_takes_a_folder_by_its_name(registry: Registry, name: str) -> None:
    """It accepts only folders."""
    assert "jets/1 already" in cli("push", name, "--registry", registry.uri).stdout
