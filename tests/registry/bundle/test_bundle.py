from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from registry import Bundle, BundleError, seal, write_atomically
from registry.bundle import BENCHMARK, VALIDATION, digests
from tests.models.bundles import MakeBundle
from tests.registry.campaigns import damage

MODEL = "targets/cpu/x86-64-v3/aoti/model.pt2"


def refusal(path: Path, *, verify: bool = True) -> str:
    """The message, of one line, with which the bundle is refused."""
    with pytest.raises(BundleError) as caught:
        Bundle.open(path, verify=verify)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_opened_bundle_has_its_files(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    bundle = Bundle.open(path)
    assert (bundle.path, bundle.file(MODEL)) == (path, path / MODEL)
    assert bundle.manifest.name == "jets"


def test_the_digest_is_that_of_the_seal(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    sums = (path / "SHA256SUMS").read_bytes()
    assert Bundle.open(path).digest == hashlib.sha256(sums).hexdigest()


def test_an_opened_bundle_has_its_reports(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle())
    assert bundle.report(VALIDATION) == {"rows": [0, 1, 31]}
    assert bundle.report(BENCHMARK) == {"calls": 100}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are opened from now on, also by the test's own set-up: clear it first."""
    paths: list[Path] = []
    plain_open = os.open

    def open_and_note(file: Any, *arguments: Any, **options: Any) -> int:
        paths.append(Path(file))
        return plain_open(file, *arguments, **options)

    monkeypatch.setattr(os, "open", open_and_note)
    return paths


def test_each_file_is_read_once(make_bundle: MakeBundle, opened: list[Path]) -> None:
    path = make_bundle()
    opened.clear()
    bundle = Bundle.open(path)
    assert sorted(opened) == sorted(path / name for name in (*bundle.files, "SHA256SUMS"))


def test_without_a_check_only_seal_and_manifest_are_read(
    make_bundle: MakeBundle, opened: list[Path]
) -> None:
    path = make_bundle()
    opened.clear()
    Bundle.open(path, verify=False)
    assert sorted(opened) == [path / "SHA256SUMS", path / "manifest.json"]


@pytest.fixture
def sealed(make_bundle: MakeBundle) -> Path:
    """A bundle, made before the fixture `hashed` takes notes."""
    return make_bundle()


@pytest.fixture
def hashed(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed from now on."""
    # Digests of files written within the last seconds are otherwise not kept.
    monkeypatch.setattr("registry.bundle.digests._SETTLED_NS", 0)
    names: list[str] = []
    hash_file = digests.hash_file

    def hash_and_note(handle: int, root: Path, name: str) -> digests.Hashed:
        names.append(name)
        return hash_file(handle, root, name)

    monkeypatch.setattr(digests, "hash_file", hash_and_note)
    return names


@pytest.fixture
def opened_before(sealed: Path, hashed: list[str]) -> Bundle:
    """A bundle that this process has opened, and so hashed, once."""
    bundle = Bundle.open(sealed)
    assert sorted(hashed) == sorted(set(bundle.files) - {"manifest.json"})
    hashed.clear()
    return bundle


def test_an_unchanged_file_is_not_hashed_again(opened_before: Bundle, hashed: list[str]) -> None:
    Bundle.open(opened_before.path)
    assert hashed == []


def test_a_file_with_another_time_is_hashed_again(opened_before: Bundle, hashed: list[str]) -> None:
    os.utime(opened_before.path / "program.pt2", ns=(0, 0))
    Bundle.open(opened_before.path)
    assert hashed == ["program.pt2"]


def test_a_changed_file_of_the_same_size_and_time_is_refused(opened_before: Bundle) -> None:
    file = opened_before.path / "program.pt2"
    os.utime(file, ns=(0, 0))
    Bundle.open(opened_before.path)
    file.write_bytes(b"another" + file.read_bytes()[len(b"another") :])
    os.utime(file, ns=(0, 0))
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        Bundle.open(opened_before.path)


def test_verify_hashes_every_file_again(opened_before: Bundle, hashed: list[str]) -> None:
    opened_before.verify()
    assert sorted(hashed) == sorted(set(opened_before.files) - {"manifest.json"})


def test_sums_are_for_the_standard_tool(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    check = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr
    assert f"{MODEL}: OK" in check.stdout


def test_a_bundle_opened_by_a_relative_path_outlives_a_change_of_folder(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bundle()
    monkeypatch.chdir(path.parent)
    bundle = Bundle.open(path.name)
    monkeypatch.chdir(path)
    assert bundle.file(MODEL).is_file()


def test_an_altered_byte_is_refused_unless_nothing_is_verified(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    names = sorted(Bundle.open(path).files.keys() - {"manifest.json"})
    assert MODEL in names
    for name in names:
        good = (path / name).read_bytes()
        middle = len(good) // 2
        (path / name).write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        assert f"{name} is truncated or altered ({len(good)} bytes" in refusal(path)
        Bundle.open(path, verify=False)
        (path / name).write_bytes(good)


def test_altered_manifest_is_refused_in_any_case(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("a small tagger", "a large tagger"))
    assert "manifest.json is truncated or altered" in refusal(path, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_any_damage_is_refused(make_bundle: MakeBundle, tmp_path: Path, verify: bool) -> None:
    """Without digests, only a change of a file's content is not seen."""
    path = make_bundle()
    damages = [item for item in damage.of_files(path) if verify or not item.only_content]
    kinds = damage.refusals(path, tmp_path, damages, lambda copy: Bundle.open(copy, verify=verify))
    assert {"missing", "added", "symbolic link", "pipe", "path", "listed twice"} <= kinds.keys()


@pytest.mark.parametrize("verify", [True, False])
def test_a_folder_that_does_not_exist_is_no_bundle(tmp_path: Path, verify: bool) -> None:
    assert "no such bundle folder" in refusal(tmp_path / "nowhere", verify=verify)


def test_a_manifest_that_names_a_missing_file_is_refused(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / MODEL).unlink()
    seal(path)
    assert f"names {MODEL} (targets[cpu/x86-64-v3].candidates[aoti])" in refusal(path)


@pytest.mark.parametrize("name", ["../1/program.pt2", "nothing", "SHA256SUMS", "/etc/passwd"])
def test_a_bundle_has_no_file_but_those_it_lists(bundle: Bundle, name: str) -> None:
    with pytest.raises(BundleError, match="has no file"):
        bundle.file(name)


def test_a_missing_report_is_empty(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "reports/validation.json").unlink()
    seal(path)
    assert Bundle.open(path).report(VALIDATION) == {}


def test_a_broken_report_is_refused(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "reports/benchmark.json").write_text("[1")
    seal(path)
    with pytest.raises(BundleError, match=r"benchmark\.json: not a JSON object"):
        Bundle.open(path).report(BENCHMARK)


def test_verify_refuses_a_file_altered_since_the_bundle_was_opened(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    bundle = Bundle.open(path, verify=False)
    bundle.verify()
    (path / "program.pt2").write_bytes(b"other")
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        bundle.verify()


def test_verify_refuses_a_folder_sealed_since_the_bundle_was_opened(
    make_bundle: MakeBundle,
) -> None:
    path = make_bundle()
    bundle = Bundle.open(path, verify=False)
    (path / "program.pt2").write_bytes(b"other")
    seal(path)
    with pytest.raises(BundleError, match="sealed anew"):
        bundle.verify()


def test_seal_refuses_a_file_name_that_no_bundle_may_have(tmp_path: Path) -> None:
    (tmp_path / "line\nbreak").write_text("")
    with pytest.raises(BundleError, match="not a relative path"):
        seal(tmp_path)
    assert not (tmp_path / "SHA256SUMS").exists()


def test_seal_refuses_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="symbolic link"):
        seal(tmp_path)
    assert not (tmp_path / "SHA256SUMS").exists()


class TestWriteAtomically:
    def test_the_folder_appears_when_the_block_ends(self, tmp_path: Path) -> None:
        dest = tmp_path / "deep" / "dest"
        with write_atomically(dest) as partial:
            (partial / "file").write_text("content")
            assert not dest.exists()
            assert partial.parent == dest.parent  # on the same disk: a rename, not a copy
        assert (dest / "file").read_text() == "content"
        assert os.listdir(dest.parent) == ["dest"]

    def test_the_folder_has_the_mode_of_any_new_folder(self, tmp_path: Path) -> None:
        dest, plain = tmp_path / "dest", tmp_path / "plain"
        with write_atomically(dest):
            pass
        plain.mkdir()
        assert stat.S_IMODE(dest.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_nothing_is_left_of_a_failure(self, tmp_path: Path, error: type[BaseException]) -> None:
        def fail(folder: Path) -> None:
            (folder / "half").write_text("")
            raise error

        with pytest.raises(error), write_atomically(tmp_path / "x" / "dest") as partial:
            fail(partial)
        assert os.listdir(tmp_path / "x") == []

    def test_a_full_disk_is_an_error_of_one_line(self, tmp_path: Path) -> None:
        dest = tmp_path / "x" / "dest"

        def fill(folder: Path) -> None:
            (folder / "half").write_text("")
            Path("/dev/full").write_bytes(b"0" * 100_000)  # a real ENOSPC

        with pytest.raises(BundleError) as caught, write_atomically(dest) as partial:
            fill(partial)
        assert str(caught.value) == f"cannot write {dest}: No space left on device"
        assert os.listdir(dest.parent) == []

    def test_an_error_of_the_block_is_raised_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError), write_atomically(tmp_path / "x" / "dest") as partial:
            (partial / "nothing").read_text()

    @pytest.fixture
    def existing(self, tmp_path: Path) -> Path:
        """A folder with one file, `old`."""
        dest = tmp_path / "x" / "dest"
        dest.mkdir(parents=True)
        (dest / "old").write_text("")
        return dest

    def test_an_existing_folder_stays(self, existing: Path) -> None:
        with pytest.raises(BundleError, match="exists already"), write_atomically(existing):
            pytest.fail("the block runs although there is something in its place")

    def test_an_existing_folder_is_replaced(self, existing: Path) -> None:
        with write_atomically(existing, replace=True) as partial:
            (partial / "new").write_text("")
        assert os.listdir(existing) == ["new"]
        assert os.listdir(existing.parent) == ["dest"]

    def test_an_error_replaces_nothing(self, existing: Path) -> None:
        with pytest.raises(ValueError), write_atomically(existing, replace=True):
            raise ValueError
        assert os.listdir(existing) == ["old"]
        assert os.listdir(existing.parent) == ["dest"]

    def test_a_file_in_place_of_a_parent_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(BundleError, match=r"cannot write .*/file/dest: .*/file is not a folder"),
            write_atomically(tmp_path / "file" / "dest"),
        ):
            pytest.fail("the block runs without a folder")
