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


def refused(path: Path, *, verify: bool = True) -> str:
    """The one line with which the bundle is refused."""
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
    seal = (path / "SHA256SUMS").read_bytes()
    assert Bundle.open(path).digest == hashlib.sha256(seal).hexdigest()


def test_an_opened_bundle_has_its_reports(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle())
    assert bundle.report(VALIDATION) == {"rows": [0, 1, 31]}
    assert bundle.report(BENCHMARK) == {"calls": 100}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are opened from now on."""
    paths: list[Path] = []
    plain = os.open

    def noting(file: Any, *how: Any, **more: Any) -> int:
        paths.append(Path(file))
        return plain(file, *how, **more)

    monkeypatch.setattr(os, "open", noting)
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


def test_a_process_reads_a_file_again_only_where_it_has_changed(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_bundle()
    monkeypatch.setattr("registry.bundle.digests._SETTLED_NS", 0)
    read: list[str] = []

    def counted(handle: int, root: Path, name: str) -> tuple[str, digests.Identity]:
        read.append(name)
        return hash_file(handle, root, name)

    hash_file = digests.hash_file
    monkeypatch.setattr(digests, "hash_file", counted)
    opened = Bundle.open(root)
    assert sorted(read) == sorted(set(opened.files) - {"manifest.json"})
    read.clear()
    Bundle.open(root)
    assert read == []
    file = root / "program.pt2"
    os.utime(file, ns=(0, 0))
    Bundle.open(root)
    assert read == ["program.pt2"]
    read.clear()
    opened.verify()
    assert sorted(read) == sorted(set(opened.files) - {"manifest.json"})
    file.write_bytes(b"another" + file.read_bytes()[7:])
    os.utime(file, ns=(0, 0))
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        Bundle.open(root)


def test_sums_are_for_the_standard_tool(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    check = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr
    assert f"{MODEL}: OK" in check.stdout


def test_opened_by_a_relative_path(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bundle()
    monkeypatch.chdir(path.parent)
    bundle = Bundle.open(path.name)
    monkeypatch.chdir(path)
    assert bundle.file(MODEL).is_file()


def test_altered_byte(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    names = sorted(Bundle.open(path).files.keys() - {"manifest.json"})
    assert MODEL in names
    for name in names:
        good = (path / name).read_bytes()
        middle = len(good) // 2
        (path / name).write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        assert f"{name} is truncated or altered ({len(good)} bytes" in refused(path)
        Bundle.open(path, verify=False)
        (path / name).write_bytes(good)


def test_altered_manifest_is_refused_in_any_case(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("a small tagger", "a large tagger"))
    assert "manifest.json is truncated or altered" in refused(path, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_damage(make_bundle: MakeBundle, tmp_path: Path, verify: bool) -> None:
    """Without digests, only a change of a file's content is not seen."""
    path = make_bundle()
    every = [each for each in damage.of_files(path) if verify or not each.only_content]
    kinds = damage.refused(path, tmp_path, every, lambda copy: Bundle.open(copy, verify=verify))
    assert {"missing", "added", "symbolic link", "pipe", "path", "listed twice"} <= kinds.keys()
    assert "no such bundle folder" in refused(path / "nowhere", verify=verify)


def test_manifest_that_names_what_is_not_there(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / MODEL).unlink()
    seal(path)
    assert f"names {MODEL} (targets[cpu/x86-64-v3].candidates[aoti])" in refused(path)


def test_file_of_the_bundle_only(bundle: Bundle) -> None:
    for name in ("../1/program.pt2", "nothing", "SHA256SUMS", "/etc/passwd"):
        with pytest.raises(BundleError, match="has no file"):
            bundle.file(name)


def test_reports_may_be_absent_but_not_broken(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "reports/validation.json").unlink()
    (path / "reports/benchmark.json").write_text("[1")
    seal(path)
    bundle = Bundle.open(path)
    assert bundle.report(VALIDATION) == {}
    with pytest.raises(BundleError, match=r"benchmark\.json: not a JSON object"):
        bundle.report(BENCHMARK)


def test_verify_again(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    bundle = Bundle.open(path, verify=False)
    bundle.verify()
    (path / "program.pt2").write_bytes(b"other")
    with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
        bundle.verify()
    seal(path)
    with pytest.raises(BundleError, match="sealed anew"):
        bundle.verify()


def test_seal_refuses_what_open_would(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "line\nbreak").write_text("")
    with pytest.raises(BundleError, match="not a relative path"):
        seal(folder)
    (folder / "line\nbreak").unlink()
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="symbolic link"):
        seal(folder)
    assert not (folder / "SHA256SUMS").exists()


class TestWriteAtomically:
    def test_appears_whole(self, tmp_path: Path) -> None:
        dest = tmp_path / "deep" / "dest"
        with write_atomically(dest) as partial:
            (partial / "file").write_text("content")
            assert not dest.exists()
            assert partial.parent == dest.parent  # on the same disk: a rename, not a copy
        assert (dest / "file").read_text() == "content"
        assert os.listdir(dest.parent) == ["dest"]
        plain = tmp_path / "plain"
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

    def test_full_disk_is_one_line(self, tmp_path: Path) -> None:
        dest = tmp_path / "x" / "dest"

        def fill(folder: Path) -> None:
            (folder / "half").write_text("")
            Path("/dev/full").write_bytes(b"0" * 100_000)  # a real ENOSPC

        with pytest.raises(BundleError) as caught, write_atomically(dest) as partial:
            fill(partial)
        assert str(caught.value) == f"cannot write {dest}: No space left on device"
        assert os.listdir(dest.parent) == []

    def test_other_errors_stay_what_they_are(self, tmp_path: Path) -> None:
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

    def test_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(BundleError, match=r"cannot write .*/file/dest: .*/file is not a folder"),
            write_atomically(tmp_path / "file" / "dest"),
        ):
            pytest.fail("the block runs without a folder")
