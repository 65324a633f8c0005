"""Annexes: targets that are added to a version later, and their refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


@pytest.fixture
def extended(registry: Registry, version: Version, annex: Annex) -> Version:
    """The version, looked up after `annex` was added to it."""
    return registry.add_target(version, annex)


@contextmanager
def no_change(registry: Registry, version: Version) -> Iterator[None]:
    """Checks that the block changes neither the files of a version nor the history."""
    folder = registries.folder_of(version).parent
    files, events = tree(folder), registry.history("jets")
    yield
    assert tree(folder) == files
    assert registry.history("jets") == events


def test_a_target_is_added_and_the_bundle_stays_as_it_is(
    registry: Registry, version: Version, annex: Annex
) -> None:
    folder = registries.folder_of(version)
    assert registry.local_path(version) == folder
    before = tree(folder)
    extended = registry.add_target(version, annex)
    assert tree(folder) == before
    assert extended.digest == version.digest
    assert registry.find("jets/1") == extended


def test_a_version_lists_the_target_that_was_added(extended: Version, annex: Annex) -> None:
    assert extended.annexes == {V4: annex.digest}
    assert extended.targets == {V3: "verified", V4: "verified"}
    assert extended.chosen == {V3: "aoti", V4: "aoti"}


def test_a_bundle_is_opened_with_the_target_that_was_added(
    registry: Registry, version: Version, extended: Version
) -> None:
    opened = registry.open(extended)
    assert opened.digest == version.digest
    assert list(opened.manifest.targets) == [V3, V4]
    opened.verify()


def test_an_opened_bundle_has_the_files_of_the_target_that_was_added(
    registry: Registry, version: Version, extended: Version, annex: Annex
) -> None:
    opened = registry.open(extended)
    library = opened.file(opened.manifest.targets[V4].candidates["aoti"].files[0])
    assert library.read_bytes() == (annex.path / "aoti/model.so").read_bytes()
    assert opened.file("program.pt2") == registries.folder_of(version) / "program.pt2"


def test_the_reports_of_bundle_and_annex_are_joined(registry: Registry, extended: Version) -> None:
    report = registry.open(extended).report(VALIDATION)
    assert report == {"rows": [0, 1, 31], V4: {"seed": 0}}  # as `tests.models.bundles` writes them


def test_a_bundle_is_opened_without_the_target_that_was_added(
    registry: Registry, extended: Version
) -> None:
    base = registry.open(extended, annexes=())
    assert base.manifest == Bundle.open(registries.folder_of(extended)).manifest
    assert list(base.manifest.targets) == [V3]


def test_the_history_records_the_build_of_a_target(
    registry: Registry, version: Version, extended: Version, annex: Annex
) -> None:
    (event,) = registry.history("jets")
    assert event.title == f"build of {V4} for jets/1"
    assert (event.state, event.engine, event.annexes) == ("done", "aoti", {V4: annex.digest})
    assert event.digests == {"jets/1": version.digest}


@pytest.mark.parametrize("looked_up", ["before it was added", "after it was added"])
def test_a_target_that_was_added_is_not_replaced(
    registry: Registry, version: Version, extended: Version, bundle: Bundle, annex: Annex,
    tmp_path: Path, looked_up: str,
) -> None:  # fmt: skip
    other = write_annex(tmp_path / "other", bundle, V4, seed=1)
    caller = version if looked_up == "before it was added" else extended
    with no_change(registry, version), pytest.raises(RegistryError) as caught:
        registry.add_target(caller, other)
    assert str(caught.value) == (
        f"jets/1 has {V4} already: built later, annex {annex.digest[:12]}…, and what was built "
        "stays as it is"
    )


def test_a_verified_target_of_the_bundle_is_not_replaced(
    registry: Registry, version: Version, bundle: Bundle, tmp_path: Path
) -> None:
    other = write_annex(tmp_path / "other", bundle, V3)
    message = f"jets/1 has {V3} already, verified in its bundle"
    with no_change(registry, version), pytest.raises(RegistryError, match=message):
        registry.add_target(version, other)


@pytest.mark.parametrize("status", ["unverified", "failed"])
def test_a_target_of_the_bundle_that_is_not_verified_is_superseded(
    registry: Registry, make_bundle: MakeBundle, manifest_data: dict[str, Any], tmp_path: Path,
    status: str,
) -> None:  # fmt: skip
    candidates = {"exported": {"status": "unverified", "files": ["program.pt2"]}}
    chosen = "exported" if status == "unverified" else None
    record = {"status": status, "chosen": chosen, "candidates": candidates}
    bundle = Bundle.open(make_bundle(targets=manifest_data["targets"] | {ROCM: record}))
    version = registry.register(bundle)
    assert version.targets[ROCM] == status
    extended = registry.add_target(version, write_annex(tmp_path / "annex", bundle, ROCM))
    assert (extended.targets[ROCM], extended.chosen[ROCM]) == ("verified", "aoti")
    assert registry.open(extended).manifest.targets[ROCM].chosen == "aoti"
    assert registry.open(extended, annexes=()).manifest.targets[ROCM].status == status


def test_an_annex_of_another_bundle_is_refused(
    registry: Registry, version: Version, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    other = Bundle.open(make_bundle(seed=1))
    with pytest.raises(BundleError, match=r"belongs to another bundle \(jets, "):
        registry.add_target(version, write_annex(tmp_path / "annex", other, V4))
    assert registry.find("jets/1") == version


def alter_library(registry: Registry, version: Version) -> Path:
    """Overwrites the library of the added target in the store; returns its path."""
    library = registry.open(version).file(f"annexes/{V4}/aoti/model.so")
    library.write_bytes(b"\0" * 5000)
    return library


def test_an_annex_with_an_altered_file_is_refused(registry: Registry, extended: Version) -> None:
    alter_library(registry, extended)
    with pytest.raises(BundleError, match=r"aoti/model\.so is truncated or altered"):
        registry.open(extended)


def test_an_altered_annex_does_not_keep_the_bundle_from_being_opened(
    registry: Registry, version: Version, extended: Version
) -> None:
    alter_library(registry, extended)
    assert registry.open(extended, annexes=()).digest == version.digest


def test_an_annex_that_was_sealed_again_is_refused(registry: Registry, extended: Version) -> None:
    library = alter_library(registry, extended)
    seal(library.parents[1])  # consistent, but not what was registered
    with pytest.raises(BundleError, match=r"jets/1: the files in .* are another annex"):
        registry.open(extended)


def test_annex_files_that_no_tag_names_are_ignored(
    registry: Registry, version: Version, bundle: Bundle, annex: Annex, tmp_path: Path
) -> None:
    """A builder that was killed leaves such files."""
    folder = registries.folder_of(version)
    abandoned = write_annex(tmp_path / "abandoned", bundle, V4, seed=1)
    shutil.copytree(abandoned.path, folder.parent / "annexes/cpu.x86-64-v4" / abandoned.digest)
    assert list(registry.open(version).manifest.targets) == [V3]
    assert registry.add_target(version, annex).annexes == {V4: annex.digest}


@pytest.fixture
def moved(registry: Registry, extended: Version, tmp_path: Path) -> Path:
    """A fetched copy of the version with its annex, moved to another folder since."""
    registry.fetch(extended, tmp_path / "copy")
    return (tmp_path / "copy").rename(tmp_path / "elsewhere")


def test_a_copy_takes_annexes_along(moved: Path, version: Version) -> None:
    opened = open_folder(moved)
    assert opened.digest == version.digest
    assert opened.file(f"annexes/{V4}/aoti/model.so") == moved / f"annexes/{V4}/aoti/model.so"


def test_only_some_annexes_of_a_copy_are_opened(moved: Path, annex: Annex) -> None:
    assert list(open_folder(moved, only={}).manifest.targets) == [V3]
    assert list(open_folder(moved, only={V4: annex.digest}).manifest.targets) == [V3, V4]


@pytest.mark.parametrize(
    ("target", "message"), [(V4, "another annex"), (ROCM, "annexes/rocm/gfx90a/ is missing")]
)
def test_an_annex_that_a_copy_does_not_have_is_refused(
    moved: Path, target: str, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        open_folder(moved, only={target: "0" * 64})


def test_an_annex_in_the_folder_of_another_target_is_refused(moved: Path) -> None:
    (moved / "annexes/cpu/x86-64-v4").rename(moved / "annexes/cpu/x86-64-v2")
    with pytest.raises(BundleError, match=f"is the annex of {V4}"):
        open_folder(moved)


def test_a_file_among_the_annexes_is_refused(moved: Path) -> None:
    (moved / "annexes/note.txt").touch()
    with pytest.raises(BundleError, match=r"annexes/note\.txt is not an annex"):
        open_folder(moved)


def test_a_copy_that_is_registered_leaves_its_annexes_behind(
    registry: Registry, version: Version, extended: Version, tmp_path: Path
) -> None:
    """An annex belongs to the version to which it was added, not to a copy."""
    copy = registry.fetch(extended, tmp_path / "copy")
    copied = registry.register(copy, "again")
    assert (copied.digest, copied.annexes, list(copied.targets)) == (version.digest, {}, [V3])
    assert list(registry.open(copied).manifest.targets) == [V3]
    assert list(registry.fetch(copied, tmp_path / "third").manifest.targets) == [V3]
    assert not (tmp_path / "third" / "annexes").exists()


def test_a_promotion_remembers_what_its_gates_saw(
    registry: Registry, version: Version, annex: Annex
) -> None:
    registry.promote(version, "production", PASSED)
    extended = registry.add_target(version, annex)
    promoted_annexes = []
    for judged in ((), (V4,), ()):
        promoted = registry.promote(extended, "production", PASSED, annexes=judged)
        record = promoted.promotion("production")
        assert record is not None
        promoted_annexes.append(dict(record.annexes))
    # The third promotion did not judge the annex, which stays promoted since the second.
    assert promoted_annexes == [{}, {V4: annex.digest}, {V4: annex.digest}]


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
def test_a_record_with_a_wrong_field_is_refused(
    annex: Annex, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        as_record(AnnexRecord, as_data(annex.record) | {field: value})


def test_an_annex_that_names_a_missing_file_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    candidates = {"aoti": {"status": "valid", "files": ["reference.safetensors"]}}
    record = {"status": "verified", "chosen": "aoti", "candidates": candidates}
    annex = write_annex(tmp_path / "annex", bundle, V4, record=record)
    with pytest.raises(BundleError, match=r"annex\.json names reference\.safetensors \(aoti\)"):
        attach(bundle, [annex])
