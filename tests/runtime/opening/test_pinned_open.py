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
from runtime.opening import Opened, Opening, copy_artifact, hold_files, open_artifact, open_version
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
    """The files of an engine's artifact; the first one is the one that it opens."""
    return list(opened.bundle.manifest.targets[TARGET].candidates[name].files)


@pytest.mark.parametrize("name", ENGINES)
def test_a_file_that_was_replaced_by_an_equal_one_is_opened(
    copy: Opened, name: str, tmp_path: Path
) -> None:
    file = copy.bundle.file(files_of(copy, name)[0])
    shutil.copy(file, tmp_path / "same")
    os.replace(tmp_path / "same", file)
    open_artifact(copy, TARGET, name, CPU)
    copied = copy_artifact(copy, TARGET, name, tmp_path / "taken")
    assert copied.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ENGINES)
def test_a_file_that_was_replaced_by_another_is_refused(
    copy: Opened, name: str, tmp_path: Path
) -> None:
    file = copy.bundle.file(files_of(copy, name)[0])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    (tmp_path / "other").write_bytes(content)
    os.replace(tmp_path / "other", file)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        open_artifact(copy, TARGET, name, CPU)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        copy_artifact(copy, TARGET, name, tmp_path / "taken")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_opens_the_held_files_although_they_were_replaced(
    copy: Opened, name: str, tmp_path: Path
) -> None:
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
    torch.testing.assert_close(torch.as_tensor(total), torch.ones(1000))  # probabilities


def test_another_process_judges_what_was_hashed(copy: Opened, tmp_path: Path) -> None:
    first = files_of(copy, "aoti")[0]
    before = copy.bundle.file(first).read_bytes()
    read = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    with (
        pytest.raises(BundleError, match="was changed after its digest was checked"),
        hold_files(copy, TARGET, "aoti") as held,
    ):
        (tmp_path / "garbage").write_bytes(b"garbage")
        os.replace(tmp_path / "garbage", copy.bundle.path / first)
        command = [sys.executable, "-c", read, str(held.file(first))]
        assert subprocess.run(command, capture_output=True, check=True).stdout == before


@pytest.mark.parametrize("name", ENGINES)
def test_an_open_artifact_holds_no_file_open(copy: Opened, name: str) -> None:
    open_artifact(copy, TARGET, name, CPU)  # what an engine opens once for all
    before = os.listdir("/proc/self/fd")
    executable = open_artifact(copy, TARGET, name, CPU)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    del executable


def test_the_error_of_an_engine_names_no_temporary_folder(copy: Opened) -> None:
    (library,) = [file for file in files_of(copy, "aoti") if file.endswith(".so")]
    (copy.bundle.path / library).write_bytes(b"not a library")
    seal(copy.bundle.path)
    forged = opened(copy.bundle.path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(EngineError) as caught:
        open_artifact(forged, TARGET, "aoti", CPU)
    assert "soa-pinned" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)
