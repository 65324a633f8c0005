"""Engines open the files that were hashed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engines.base import engine
from engines.errors import EngineError
from registry.bundle.digests import seal
from registry.bundle.pinned import Pinned
from registry.errors import BundleError
from runtime.opening import Opened, Opening, copy_artifact, held_files, open_artifact, open_version
from runtime.session.session import Session
from stages.reference.answers import Reference
from tests.models.project import TARGET, Built

ENGINES = ("aoti", "torchscript", "exported")
CPU = torch.device("cpu")


@pytest.fixture
def copy(jets: Built, tmp_path: Path) -> Opened:
    folder = Path(shutil.copytree(jets.bundle.path, tmp_path / "copy"))
    time.sleep(0.05)  # the next write gets a later time stamp
    return opened(folder)


def opened(folder: Path) -> Opened:
    return open_version(Opening(folder, mode="test"))


def files_of(opened: Opened, name: str) -> list[str]:
    return list(opened.bundle.manifest.targets[TARGET].candidates[name].files)


@pytest.mark.parametrize("name", ENGINES)
def test_replaced_after_the_digests(copy: Opened, name: str, tmp_path: Path) -> None:
    first = copy.bundle.file(files_of(copy, name)[0])
    shutil.copy(first, tmp_path / "same")
    os.replace(tmp_path / "same", first)
    open_artifact(copy, TARGET, name, CPU)
    content = first.read_bytes()
    assert copy_artifact(copy, TARGET, name, tmp_path / "taken").read_bytes() == content
    (tmp_path / "other").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.replace(tmp_path / "other", first)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        open_artifact(copy, TARGET, name, CPU)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        copy_artifact(copy, TARGET, name, tmp_path / "again")


@pytest.mark.parametrize("name", ENGINES)
def test_replaced_in_the_last_moment(copy: Opened, name: str, tmp_path: Path) -> None:
    """The old file is held open already: the engine opens it, and gives the right answers."""
    pinned = Pinned(copy.bundle, files_of(copy, name))
    for file in files_of(copy, name):
        (tmp_path / "garbage").write_bytes(b"garbage")
        os.replace(tmp_path / "garbage", copy.bundle.path / file)
    executable = engine(name).open(pinned.file(files_of(copy, name)[0]), CPU)
    pinned.close()
    session = Session(copy.signature, executable, CPU)
    reference = Reference.load(copy.bundle.file(copy.bundle.manifest.reference))
    jets = session.collection("jets", 1000)
    for column in session.layout("jets").columns:
        jets.tensor(column.name)[:] = reference.inputs["jets"][column.name][:1000]
    tags = session.collection("tags", 1000)
    session.run(jets, tags)
    total = sum(tags.tensor(column.name) for column in session.layout("tags").columns)
    torch.testing.assert_close(torch.as_tensor(total), torch.ones(1000))


def test_another_process_judges_what_was_hashed(copy: Opened, tmp_path: Path) -> None:
    first = files_of(copy, "aoti")[0]
    before = copy.bundle.file(first).read_bytes()
    read = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    with (
        pytest.raises(BundleError, match="was changed after its digest was checked"),
        held_files(copy, TARGET, "aoti") as held,
    ):
        (tmp_path / "garbage").write_bytes(b"garbage")
        os.replace(tmp_path / "garbage", copy.bundle.path / first)
        command = [sys.executable, "-c", read, str(held.file(first))]
        assert subprocess.run(command, capture_output=True, check=True).stdout == before


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_left_open(copy: Opened, name: str) -> None:
    open_artifact(copy, TARGET, name, CPU)
    before = os.listdir("/proc/self/fd")
    kept = open_artifact(copy, TARGET, name, CPU)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    del kept


def test_the_error_names_the_users_folder(copy: Opened) -> None:
    (library,) = [file for file in files_of(copy, "aoti") if file.endswith(".so")]
    (copy.bundle.path / library).write_bytes(b"not a library")
    seal(copy.bundle.path)
    forged = opened(copy.bundle.path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(EngineError) as caught:
        open_artifact(forged, TARGET, "aoti", CPU)
    assert "soa-pinned" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)
