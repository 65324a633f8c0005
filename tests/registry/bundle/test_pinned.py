"""An opened file is the one that was hashed, whatever happens to the folder in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from registry import Bundle, BundleError
from registry.bundle.pinned import Pinned
from tests.models.bundles import MakeBundle

MODEL = "targets/cpu/x86-64-v3/aoti/model.pt2"
BESIDE = "targets/cpu/x86-64-v3/aoti/data/weights.bin"


@pytest.fixture
def bundle(make_bundle: MakeBundle) -> Bundle:
    path = make_bundle()
    time.sleep(0.05)  # the next write gets a later time stamp
    return Bundle.open(path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def replace(path: Path, content: bytes) -> None:
    """Puts another file in the place of the one at `path`."""
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


def test_pinned_files_are_the_bundles_beside_each_other(bundle: Bundle) -> None:
    pinned = Pinned(bundle, [MODEL, BESIDE])
    for name in (MODEL, BESIDE):
        assert pinned.file(name).read_bytes() == (bundle.path / name).read_bytes()
        assert pinned.file(name).samefile(bundle.path / name)
    assert pinned.file(BESIDE).parent.parent == pinned.file(MODEL).parent
    pinned.close()


def test_closing_removes_the_folder_and_closes_the_files(bundle: Bundle) -> None:
    before = descriptors()
    pinned = Pinned(bundle, [MODEL, BESIDE])
    assert descriptors() > before
    pinned.close()
    assert not pinned.folder.exists()
    assert descriptors() == before


def test_a_file_replaced_afterwards_is_read_as_it_was(bundle: Bundle) -> None:
    """The path still leads to the old file, which has the right digest."""
    content = (bundle.path / MODEL).read_bytes()
    pinned = Pinned(bundle, [MODEL])
    replace(bundle.path / MODEL, b"x" * len(content))
    assert pinned.file(MODEL).read_bytes() == content
    (bundle.path / MODEL).unlink()
    assert pinned.file(MODEL).read_bytes() == content
    pinned.close()


def flip_a_bit(path: Path) -> None:
    """Changes the content of a file, but neither its size nor its time of modification."""
    times = os.stat(path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(flip_a_bit, id="a bit flipped"),
        pytest.param(lambda path: os.truncate(path, 10), id="truncated"),
        pytest.param(lambda path: replace(path, bytes(5000)), id="replaced, of the same size"),
        pytest.param(lambda path: replace(path, b"other"), id="replaced"),
    ],
)
def test_a_file_that_was_changed_before_cannot_be_pinned(
    bundle: Bundle, spoil: Callable[[Path], None]
) -> None:
    before = descriptors()
    spoil(bundle.path / MODEL)
    with pytest.raises(BundleError, match=r"model\.pt2 was changed after its digest was checked"):
        Pinned(bundle, [BESIDE, MODEL])
    assert descriptors() == before


def test_another_file_with_the_same_content_is_accepted(bundle: Bundle) -> None:
    replace(bundle.path / MODEL, (bundle.path / MODEL).read_bytes())
    pinned = Pinned(bundle, [MODEL])
    pinned.check()
    assert pinned.file(MODEL).samefile(bundle.path / MODEL)
    pinned.close()


def test_written_while_it_is_held(bundle: Bundle) -> None:
    pinned = Pinned(bundle, [MODEL])
    pinned.check()
    time.sleep(0.05)  # the write gets a later time of change
    flip_a_bit(bundle.path / MODEL)
    with pytest.raises(BundleError, match="was changed after its digest was checked"):
        pinned.check()
    pinned.close()


def test_a_missing_file_is_refused(bundle: Bundle) -> None:
    (bundle.path / MODEL).unlink()
    with pytest.raises(BundleError, match="is missing"):
        Pinned(bundle, [MODEL])


def test_a_symbolic_link_to_the_file_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.path / MODEL).rename(tmp_path / "elsewhere")
    (bundle.path / MODEL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="cannot read"):
        Pinned(bundle, [MODEL])


def test_a_file_that_the_bundle_does_not_list_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"the bundle has no file '\.\./x'"):
        Pinned(bundle, ["../x"])


def test_a_bundle_opened_without_digests_is_pinned_as_it_is(make_bundle: MakeBundle) -> None:
    """Without digests nothing is compared; the file is held as it is."""
    bundle = Bundle.open(make_bundle(), verify=False)
    pinned = Pinned(bundle, [MODEL])
    assert pinned.file(MODEL).read_bytes() == (bundle.path / MODEL).read_bytes()
    pinned.close()
