"""Annexes: targets that are added to a version later, and their refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from registry import Annex, AnnexRecord, Bundle, BundleError, Registry, RegistryError, Version
from registry.bundle import VALIDATION, attach, open_folder
from registry.bundle.digests import seal
from soa.records import as_data, as_record
from tests.models import registries
from tests.models.bundles import PASSED, V3, MakeBundle, tree, write_annex

V4, ROCM = "cpu/x86-64-v4", "rocm/gfx90a"


@pytest.fixture
def version(registry: Registry, bundle: Bundle) -> Version:
    return registry.register(bundle)


@pytest.fixture
def annex(bundle: Bundle, tmp_path: Path) -> Annex:
    return write_annex(tmp_path / "annex", bundle, V4)


def test_a_target_is_added_and_the_bundle_stays_as_it_is(
    registry: Registry, version: Version, annex: Annex
) -> None:
    folder = registries.folder_of(version)
    assert registry.local_path(version) == folder
    before = tree(folder)
    found = registry.add_target(version, annex)
    assert tree(folder) == before
    assert found.digest == version.digest
    assert registry.find("jets/1") == found


def test_a_version_lists_the_target_that_was_added(
    registry: Registry, version: Version, annex: Annex
) -> None:
    found = registry.add_target(version, annex)
    assert found.annexes == {V4: annex.digest}
    assert found.targets == {V3: "verified", V4: "verified"}
    assert found.chosen == {V3: "aoti", V4: "aoti"}


def test_a_bundle_is_opened_with_the_target_that_was_added(
    registry: Registry, version: Version, annex: Annex
) -> None:
    opened = registry.open(registry.add_target(version, annex))
    assert opened.digest == version.digest
    assert list(opened.manifest.targets) == [V3, V4]
    library = opened.file(opened.manifest.targets[V4].candidates["aoti"].files[0])
    assert library.read_bytes() == (annex.path / "aoti/model.so").read_bytes()
    assert opened.file("program.pt2") == registries.folder_of(version) / "program.pt2"
    assert opened.report(VALIDATION) == {"rows": [0, 1, 31], V4: {"seed": 0}}
    opened.verify()


def test_a_bundle_is_opened_without_the_target_that_was_added(
    registry: Registry, version: Version, annex: Annex
) -> None:
    base = registry.open(registry.add_target(version, annex), annexes=())
    assert base.manifest == Bundle.open(registries.folder_of(version)).manifest
    assert list(base.manifest.targets) == [V3]


def test_the_history_says_so(registry: Registry, version: Version, annex: Annex) -> None:
    registry.add_target(version, annex)
    (event,) = registry.history("jets")
    assert event.title == f"build of {V4} for jets/1"
    assert (event.state, event.engine, event.annexes) == ("done", "aoti", {V4: annex.digest})
    assert event.digests == {"jets/1": version.digest}


def test_what_is_there_is_not_replaced(
    registry: Registry, version: Version, bundle: Bundle, annex: Annex, tmp_path: Path
) -> None:
    found = registry.add_target(version, annex)
    folder = registries.folder_of(version)
    before = tree(folder.parent)
    for stale in (version, found):  # looked up before and after the first annex was added
        with pytest.raises(RegistryError) as caught:
            registry.add_target(stale, write_annex(tmp_path / "other", bundle, V4, seed=1))
        shutil.rmtree(tmp_path / "other")
        assert str(caught.value) == (
            f"jets/1 has {V4} already: built later, annex {annex.digest[:12]}…, and what was built "
            "stays as it is"
        )
    with pytest.raises(RegistryError, match=f"jets/1 has {V3} already, verified in its bundle"):
        registry.add_target(found, write_annex(tmp_path / "third", bundle, V3))
    assert tree(folder.parent) == before
    assert len(registry.history("jets")) == 1


@pytest.mark.parametrize("status", ["unverified", "failed"])
def test_what_was_not_proven_is_superseded(
    registry: Registry, make_bundle: MakeBundle, manifest_data: dict[str, Any], tmp_path: Path,
    status: str,
) -> None:  # fmt: skip
    candidates = {"exported": {"status": "unverified", "files": ["program.pt2"]}}
    chosen = "exported" if status == "unverified" else None
    record = {"status": status, "chosen": chosen, "candidates": candidates}
    made = Bundle.open(make_bundle(targets=manifest_data["targets"] | {ROCM: record}))
    version = registry.register(made)
    assert version.targets[ROCM] == status
    found = registry.add_target(version, write_annex(tmp_path / "annex", made, ROCM))
    assert (found.targets[ROCM], found.chosen[ROCM]) == ("verified", "aoti")
    assert registry.open(found).manifest.targets[ROCM].chosen == "aoti"
    assert registry.open(found, annexes=()).manifest.targets[ROCM].status == status


def test_an_annex_of_another_bundle(
    registry: Registry, version: Version, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    other = Bundle.open(make_bundle(seed=1))
    with pytest.raises(BundleError, match=r"belongs to another bundle \(jets, "):
        registry.add_target(version, write_annex(tmp_path / "annex", other, V4))
    assert registry.find("jets/1") == version


def altered_library(registry: Registry, version: Version) -> Path:
    library = registry.open(version).file(f"annexes/{V4}/aoti/model.so")
    library.write_bytes(b"\0" * 5000)
    return library


def test_an_annex_with_an_altered_file_is_refused(
    registry: Registry, version: Version, annex: Annex
) -> None:
    found = registry.add_target(version, annex)
    altered_library(registry, found)
    with pytest.raises(BundleError, match=r"aoti/model\.so is truncated or altered"):
        registry.open(found)
    assert registry.open(found, annexes=()).digest == version.digest


def test_an_annex_that_was_sealed_again_is_refused(
    registry: Registry, version: Version, annex: Annex
) -> None:
    found = registry.add_target(version, annex)
    library = altered_library(registry, found)
    seal(library.parents[1])  # consistent, but not what was registered
    with pytest.raises(BundleError, match=r"jets/1: the files in .* are another annex"):
        registry.open(found)


def test_files_that_no_tag_names_are_garbage(
    registry: Registry, version: Version, bundle: Bundle, annex: Annex, tmp_path: Path
) -> None:
    """A builder that was killed leaves such files."""
    folder = registries.folder_of(version)
    left = write_annex(tmp_path / "left", bundle, V4, seed=1)
    shutil.copytree(left.path, folder.parent / "annexes/cpu.x86-64-v4" / left.digest)
    assert list(registry.open(version).manifest.targets) == [V3]
    assert registry.add_target(version, annex).annexes == {V4: annex.digest}


@pytest.fixture
def moved(registry: Registry, version: Version, annex: Annex, tmp_path: Path) -> Path:
    """A copy of a version with an annex, in another folder than that of the fetch."""
    registry.fetch(registry.add_target(version, annex), tmp_path / "copy")
    return (tmp_path / "copy").rename(tmp_path / "elsewhere")


def test_a_copy_takes_annexes_along(moved: Path, version: Version) -> None:
    opened = open_folder(moved)
    assert opened.digest == version.digest
    assert opened.file(f"annexes/{V4}/aoti/model.so") == moved / f"annexes/{V4}/aoti/model.so"


def test_only_some_annexes_of_a_copy_are_opened(moved: Path, annex: Annex) -> None:
    assert list(open_folder(moved, only={}).manifest.targets) == [V3]
    assert list(open_folder(moved, only={V4: annex.digest}).manifest.targets) == [V3, V4]


@pytest.mark.parametrize(
    ("target", "says"), [(V4, "another annex"), (ROCM, "annexes/rocm/gfx90a/ is missing")]
)
def test_an_annex_that_a_copy_does_not_have(moved: Path, target: str, says: str) -> None:
    with pytest.raises(BundleError, match=says):
        open_folder(moved, only={target: "0" * 64})


def test_an_annex_in_the_folder_of_another_target_is_refused(moved: Path) -> None:
    (moved / "annexes/cpu/x86-64-v4").rename(moved / "annexes/cpu/x86-64-v2")
    with pytest.raises(BundleError, match=f"is the annex of {V4}"):
        open_folder(moved)


def test_a_file_among_the_annexes_is_refused(moved: Path) -> None:
    (moved / "annexes/note.txt").touch()
    with pytest.raises(BundleError, match=r"annexes/note\.txt is not an annex"):
        open_folder(moved)


def test_a_copy_that_is_registered_leaves_them_behind(
    registry: Registry, version: Version, annex: Annex, tmp_path: Path
) -> None:
    """An annex belongs to the version to which it was added, not to a copy."""
    copy = registry.fetch(registry.add_target(version, annex), tmp_path / "copy")
    again = registry.register(copy, "again")
    assert (again.digest, again.annexes, list(again.targets)) == (version.digest, {}, [V3])
    assert list(registry.open(again).manifest.targets) == [V3]
    assert list(registry.fetch(again, tmp_path / "third").manifest.targets) == [V3]
    assert not (tmp_path / "third" / "annexes").exists()


def test_a_promotion_remembers_what_its_gates_saw(
    registry: Registry, version: Version, annex: Annex
) -> None:
    registry.promote(version, "production", PASSED)
    found = registry.add_target(version, annex)
    let_pass = []
    for seen in ((), (V4,), ()):
        record = registry.promote(found, "production", PASSED, annexes=seen).promotion("production")
        assert record is not None
        let_pass.append(dict(record.annexes))
    assert let_pass == [{}, {V4: annex.digest}, {V4: annex.digest}]  # it stays promoted


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "cpu", "target"),
        ("target", "../v4", "target"),
        ("base", "0123", "base"),
        ("record", {"status": "failed"}, "an annex is of a verified target"),
        ("more", 1, "more"),
    ],
)
def test_a_record_that_makes_no_sense(annex: Annex, field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_record(AnnexRecord, as_data(annex.record) | {field: value})


def test_a_file_that_is_not_there(bundle: Bundle, tmp_path: Path) -> None:
    candidates = {"aoti": {"status": "valid", "files": ["reference.safetensors"]}}
    record = {"status": "verified", "chosen": "aoti", "candidates": candidates}
    annex = write_annex(tmp_path / "annex", bundle, V4, record=record)
    with pytest.raises(BundleError, match=r"annex\.json names reference\.safetensors \(aoti\)"):
        attach(bundle, [annex])
