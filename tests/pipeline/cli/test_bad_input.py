"""Mistakes of users, and failures of machines: one clear line, exit status 1, no partial output."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from registry.mlflow import access as mlflow_access
from registry.store.registry import Registry
from tests.models import mlps
from tests.models.project import PASSED, Built, Project, cli, refusal, write_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = write_project(tmp_path / "project")
    made.variant("config.yaml", ("[aoti, torchscript, exported]", "[exported]"))
    return made


def refused(project: Project, *changes: tuple[str, str]) -> str:
    """The line with which `run` refuses; nothing is kept or registered."""
    config = project.variant("changed.yaml", *changes)
    line = refusal("run", config, "--work", project.work, "--registry", project.registry)
    assert not list(project.work.rglob("done.json"))
    assert not Path(project.registry.removeprefix("sqlite:///")).exists()
    return line


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("description:", "descriptoin:", "unknown key (did you mean 'description'?)"),
        ("weights.safetensors", "wheights.safetensors", "wheights.safetensors"),
        ("factory: model.py", "factory: modell.py", "modell.py"),
    ],
)
def test_config(project: Project, old: str, new: str, says: str) -> None:
    line = refused(project, (old, new))
    text = (project.folder / "changed.yaml").read_text()
    number = text[: text.index(new)].count("\n") + 1
    assert line.startswith(f"{project.folder}/changed.yaml:{number}: ")
    assert says in line


def test_config_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal("run", tmp_path / "none.yaml", "--work", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_rows_that_memory_cannot_hold(project: Project) -> None:
    # 2 ** 40 rows of 4 bytes are more memory than a machine has.
    text = refused(project, ("max: 1000", f"max: {1 << 40}"))
    assert f"out of memory while the model is captured with n = {1 << 40:,}" in text
    assert "build for fewer rows (rows: max)" in text


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (mlps.PointwiseFirst(0, 32).state_dict(), "first.bias is [32], the model has [48]"),
        ({"first.weight": torch.zeros(48, 6)}, "missing first.bias, last.bias, last.weight"),
        (
            {**mlps.PointwiseFirst().state_dict(), "third.bias": torch.zeros(1)},
            "not in the model: third.bias",
        ),
    ],
)
def test_weights_that_do_not_fit(
    project: Project, state: dict[str, torch.Tensor], says: str
) -> None:
    save_file(state, project.folder / "weights.safetensors")
    line = refused(project)
    assert line.startswith(f"{project.folder}/weights.safetensors does not fit the model: ")
    assert says in line


def test_weights_that_are_none(project: Project) -> None:
    (project.folder / "weights.safetensors").write_bytes(b"\x40" + b"\0" * 30)
    assert "weights.safetensors holds no readable weights: " in refused(project)


def test_weights_that_run_code(project: Project, tmp_path: Path) -> None:
    """Reading a pickle of weights allows only tensors in it."""
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    (project.folder / "weights.pt").write_bytes(pickle.dumps({"first.weight": Evil()}, protocol=2))
    line = refused(project, ("weights.safetensors", "weights.pt"))
    assert "weights.pt holds no readable weights: " in line
    assert not (tmp_path / "owned").exists()


PLAIN = (("kwargs: {hidden: 48}", "kwargs: {}"), ("  weights: weights.safetensors\n", ""))


@pytest.mark.parametrize(
    ("factory", "more", "says"),
    [
        ("missing", (), "has no callable 'missing'"),
        ("broken", (), "kwargs do not fit"),
        ("NOT_CALLABLE", (), "has no callable 'NOT_CALLABLE'"),
        ("CountsCalls", PLAIN, "writes into"),  # so it cannot be captured
        ("Raises", PLAIN, "no detector, no answer"),
    ],
)
def test_factory(
    project: Project, factory: str, more: tuple[tuple[str, str], ...], says: str
) -> None:
    line = refused(project, ("model.py:talkative", f"model.py:{factory}"), *more)
    assert says in line
    assert ("model.py:" if more else "model.py") in line


# Bundles

FILES = ("manifest.json", "program.pt2", "model.ts", "reference.safetensors", "SHA256SUMS",
         "reports/validation.json", "reports/benchmark.json", "library")  # fmt: skip


@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_bundle_file(jets: Built, tmp_path: Path, name: str, how: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(jets.bundle.path, folder)
    if name == "library":
        (name,) = (n for n in jets.bundle.files if n.endswith(".so"))
    content = bytearray((folder / name).read_bytes())
    if how == "truncated":
        (folder / name).write_bytes(content[:-1])
    elif how == "altered":
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    else:
        (folder / name).unlink()
    line = refusal("show", folder)
    if name != "SHA256SUMS":
        assert name in line
        assert ("is missing" if how == "missing" else "is truncated or altered") in line
    for command in ("validate", "bench"):
        assert refusal(command, folder) == line


def test_file_that_does_not_belong(jets: Built, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(jets.bundle.path, folder)
    (folder / "more.py").touch()
    assert refusal("show", folder).endswith("more.py does not belong to the bundle")


def test_stored_bundle_that_was_altered_is_not_pulled(registry: Registry, tmp_path: Path) -> None:
    stored = registry.local_path(registry.find("jets"))
    assert stored is not None
    (stored / "model.ts").write_bytes(b"other")
    line = refusal("pull", "jets", tmp_path / "copy", "--registry", registry.uri)
    assert "model.ts is truncated or altered" in line
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name]


# The registry


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("jets@nobody", "jets has no such alias; its aliases: none"),
        ("jets/9", "no such version; there are: 1"),
        ("tracks", "no such model in sqlite:///"),
        ("jets@", "is neither a version"),
        ("./jets", "no such bundle folder"),
    ],
)
def test_no_such_version(registry: Registry, tmp_path: Path, ref: str, says: str) -> None:
    for command in ("show", "validate", "bench"):
        assert says in refusal(command, ref, "--registry", registry.uri)
    if not ref.startswith("."):
        assert says in refusal("pull", ref, tmp_path / "copy", "--registry", registry.uri)
        line = refusal("promote", ref, "--to", "production", "--registry", registry.uri)
        assert says in line
    assert not (tmp_path / "copy").exists()


def test_locked(
    registry: Registry, jets: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_access, "LOCK_WAIT_S", 0.2)
    path = registry.uri.removeprefix("sqlite:///")
    at = ("--registry", registry.uri)
    commands: list[tuple[object, ...]] = [
        ("ls",),
        ("show", "jets"),
        ("pull", "jets", tmp_path / "copy"),
        ("promote", "jets", "--to", "production"),
        ("rollback", "jets"),
        ("run", jets.project.config, "--work", jets.project.work),
    ]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for command in commands:
            line = refusal(*command, *at)
            assert line.endswith("database is locked: another process is using it, try again")
        other.execute("ROLLBACK")
    assert registry.find("jets").aliases == ()
    assert not (tmp_path / "copy").exists()


def test_unreachable(jets: Built, tmp_path: Path) -> None:
    for command in (("ls",), ("pull", "jets", tmp_path / "copy")):
        line = refusal(*command, "--registry", "http://127.0.0.1:9")
        assert line.startswith("registry http://127.0.0.1:9: no answer from the server: ")
    assert not (tmp_path / "copy").exists()
    assert "write sqlite:///" in refusal("ls", "--registry", "./mlruns")


def test_unreachable_is_said_before_any_work(project: Project) -> None:
    at = ("--registry", "http://127.0.0.1:9")
    line = refusal("run", project.config, "--work", project.work, *at)
    assert "no answer from the server" in line
    assert not project.work.exists()


def test_folder_that_cannot_be_written(jets: Built, tmp_path: Path) -> None:
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
def test_a_place_where_nothing_can_be_made(registry: Registry, command: tuple[str, ...]) -> None:
    registry.promote(registry.find("jets"), "production", PASSED)
    assert "/x" in refusal(*command, "--registry", registry.uri)


def test_a_folder_written_as_a_name(
    registry: Registry, jets: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`push` accepts only folders; the other commands decide by the text alone what a REF is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(jets.bundle.path, tmp_path / "copy")
    (tmp_path / "many").mkdir()
    shutil.copytree(jets.bundle.path, tmp_path / "many" / "1")
    for name in ("copy", "many/1"):
        for command in (("show", name), ("diff", "jets/1", name), ("sign", name, "--key", "k")):
            said = refusal(*command, "--registry", registry.uri)
            assert f"for the folder of that name write ./{name}" in said
        assert "jets/1 already" in cli("push", name, "--registry", registry.uri).stdout
