"""Engines open the files that were hashed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from engines.base import engine
from engines.errors import EngineError
from registry.bundle import Bundle, seal
from registry.errors import BundleError
from registry.pinned import Pinned
from runtime.loader import open_artifact
from runtime.pinned_open import open_pinned
from runtime.session import Session
from soa.signature import Signature
from stages.reference import Reference
from tests.models.project import TARGET, Built

ENGINES = ("aoti", "torchscript", "exported")
CPU = torch.device("cpu")


@pytest.fixture
def copy(jets: Built, tmp_path: Path) -> Bundle:
    folder = Path(shutil.copytree(jets.bundle.path, tmp_path / "copy"))
    time.sleep(0.05)  # the kernel's clock ticks before anybody writes again
    return Bundle.open(folder)


def files_of(bundle: Bundle, name: str) -> list[str]:
    return list(bundle.manifest.targets[TARGET].candidates[name].files)


@pytest.mark.parametrize("name", ENGINES)
def test_replaced_after_the_digests(copy: Bundle, name: str, tmp_path: Path) -> None:
    first = copy.file(files_of(copy, name)[0])
    shutil.copy(first, tmp_path / "same")
    os.replace(tmp_path / "same", first)
    open_artifact(copy, TARGET, name, CPU)
    content = first.read_bytes()
    (tmp_path / "other").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.replace(tmp_path / "other", first)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        open_artifact(copy, TARGET, name, CPU)


@pytest.mark.parametrize("name", ENGINES)
def test_replaced_in_the_last_moment(copy: Bundle, name: str, tmp_path: Path) -> None:
    """Held already, so that the engine opens the file before, which gives the right answers."""
    pinned = Pinned(copy, files_of(copy, name))
    for file in files_of(copy, name):
        (tmp_path / "garbage").write_bytes(b"garbage")
        os.replace(tmp_path / "garbage", copy.path / file)
    executable = engine(name).open(pinned.file(files_of(copy, name)[0]), CPU)
    pinned.close()
    signature = Signature.from_dict(copy.manifest.signature)
    session = Session(signature, executable, CPU)
    reference = Reference.load(copy.file(copy.manifest.reference))
    jets = session.collection("jets", 1000)
    for column in session.layout("jets").columns:
        jets[column.name][:] = reference.inputs["jets"][column.name][:1000]
    tags = session.collection("tags", 1000)
    session.run(jets, tags)
    total = sum(tags[column.name] for column in session.layout("tags").columns)
    torch.testing.assert_close(torch.as_tensor(total), torch.ones(1000))


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_left_open(copy: Bundle, name: str) -> None:
    open_artifact(copy, TARGET, name, CPU)
    before = os.listdir("/proc/self/fd")
    kept = open_artifact(copy, TARGET, name, CPU)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    del kept


def test_the_error_names_the_users_folder(copy: Bundle) -> None:
    (library,) = [file for file in files_of(copy, "aoti") if file.endswith(".so")]
    (copy.path / library).write_bytes(b"not a library")
    seal(copy.path)
    forged = Bundle.open(copy.path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(EngineError) as caught:
        open_pinned(forged, "aoti", files_of(forged, "aoti"), CPU)
    assert "soa-pinned" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)
