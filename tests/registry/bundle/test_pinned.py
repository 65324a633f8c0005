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
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)


def test_the_same_bytes_where_engines_look_for_them(bundle: Bundle) -> None:
    before = descriptors()
    pinned = Pinned(bundle, [MODEL, BESIDE])
    for name in (MODEL, BESIDE):
        assert pinned.file(name).read_bytes() == (bundle.path / name).read_bytes()
        assert pinned.file(name).samefile(bundle.path / name)
    assert pinned.file(BESIDE).parent.parent == pinned.file(MODEL).parent
    pinned.close()
    assert not pinned.folder.exists()
    assert descriptors() == before


def test_replaced_afterwards(bundle: Bundle) -> None:
    """The path still leads to the old file, which has the right digest."""
    content = (bundle.path / MODEL).read_bytes()
    pinned = Pinned(bundle, [MODEL])
    replace(bundle.path / MODEL, b"x" * len(content))
    assert pinned.file(MODEL).read_bytes() == content
    (bundle.path / MODEL).unlink()
    assert pinned.file(MODEL).read_bytes() == content
    pinned.close()


def written(path: Path) -> None:
    times = os.stat(path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # hides the change


@pytest.mark.parametrize(
    "spoil",
    [
        written,
        lambda path: replace(path, bytes(5000)),
        lambda path: os.truncate(path, 10),
        lambda path: replace(path, b"other"),
    ],
)
def test_changed_before(bundle: Bundle, spoil: Callable[[Path], None]) -> None:
    before = descriptors()
    spoil(bundle.path / MODEL)
    with pytest.raises(BundleError, match=r"model\.pt2 was changed after its digest was checked"):
        Pinned(bundle, [BESIDE, MODEL])
    assert descriptors() == before


def test_the_same_put_there_again(bundle: Bundle) -> None:
    """Another inode with the same digest is accepted: only the content counts."""
    replace(bundle.path / MODEL, (bundle.path / MODEL).read_bytes())
    pinned = Pinned(bundle, [MODEL])
    pinned.check()
    assert pinned.file(MODEL).samefile(bundle.path / MODEL)
    pinned.close()


def test_written_while_it_is_held(bundle: Bundle) -> None:
    pinned = Pinned(bundle, [MODEL])
    pinned.check()
    time.sleep(0.05)
    written(bundle.path / MODEL)
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


def test_opened_without_digests(make_bundle: MakeBundle) -> None:
    """Without digests nothing is compared; the file is held as it is."""
    bundle = Bundle.open(make_bundle(), verify=False)
    pinned = Pinned(bundle, [MODEL])
    assert pinned.file(MODEL).read_bytes() == (bundle.path / MODEL).read_bytes()
    pinned.close()
