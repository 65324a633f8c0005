"""Other damage to a bundle than a changed byte; each kind must be refused with its own error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from registry.bundle.bundle import Bundle
from registry.bundle.digests import SUMS, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.errors import BundleError, TrustError
from runtime.errors import LoadError
from soa.errors import SoaPipelineError

Damage = tuple[str, type[SoaPipelineError], Callable[..., object], tuple[object, ...]]
"""The kind, the expected error, the function that damages a folder, and its other arguments."""

# Names that no listing may have; the last three look like other names, or hide characters.
NAMES = (
    "../outside", "/outside", "a/../../b", "./a", "a//b", "a\\b", "a\x00b", "a\x07b",
    "a\u202eb", "a\u200bb", "a\xa0b",
)  # fmt: skip


def damaged(good: Path, folder: Path, load: Callable[[Path], None]) -> Counter[str]:
    """How often each kind of damage, made to a copy of `good`, was refused with its error."""
    found: Counter[str] = Counter()
    for number, (kind, expected, spoil, arguments) in enumerate(_every_damage(good)):
        copy = folder / f"damaged-{number}"
        shutil.copytree(good, copy)
        spoil(copy, *arguments)
        try:
            load(copy)
        except expected as error:
            assert "\n" not in str(error), error
            found[kind] += 1
        else:
            raise AssertionError(f"{kind}: {arguments} was not refused")
        finally:
            shutil.rmtree(copy)
    return found


def _every_damage(good: Path) -> Iterator[Damage]:
    sealed = [*Bundle.open(good).files, SUMS]
    for name in sealed:
        size = (good / name).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            yield "truncated", BundleError, _truncate, (name, length)
        yield "longer", BundleError, _append, (name, b"\0")
        yield "missing", BundleError, _remove, (name,)
        yield "symbolic link", BundleError, _link, (name,)
        yield "pipe", BundleError, _pipe, (name,)
        yield "folder", BundleError, _folder, (name,)
    for name, other in zip(sealed, [*sealed[1:], sealed[0]], strict=True):
        if (good / name).read_bytes() == (good / other).read_bytes():
            continue
        yield "swapped", BundleError, _swap, (name, other)
        yield "copied over", BundleError, _copy, (name, other)
    for name in ("more.so", "targets/more.txt", ".hidden", "reports/__init__.py", "\u202ea"):
        yield "added", BundleError, _append, (name, b"x")
    yield "symbolic link", BundleError, _link, ("targets",)
    for name in NAMES:
        yield "path", BundleError, _list_also, (name,)
    yield "listed twice", BundleError, _list_also, ("manifest.json",)
    yield "future schema", BundleError, _future, ()
    # From here on every digest is right. The folder's record of its promotion shows the change. If
    # that record is forged too, only the signature shows it.
    consistent: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
        "altered and sealed": (_append, ("program.pt2", b"x")),
        "left out and sealed": (_remove, ("reports/benchmark.json",)),
        "added and sealed": (_append, ("more.so", b"x")),
    }
    for kind, (spoil, arguments) in consistent.items():
        yield kind, LoadError, _sealed, (spoil, arguments)
        yield f"{kind}, promotion forged", TrustError, _forged, (spoil, arguments)


def _truncate(path: Path, name: str, length: int) -> None:
    os.truncate(path / name, length)


def _append(path: Path, name: str, content: bytes) -> None:
    with (path / name).open("ab") as file:
        file.write(content)


def _remove(path: Path, name: str) -> None:
    (path / name).unlink()


def _copy(path: Path, name: str, other: str) -> None:
    shutil.copy(path / name, path / other)


def _swap(path: Path, name: str, other: str) -> None:
    a, b = path / name, path / other
    content = a.read_bytes(), b.read_bytes()
    a.write_bytes(content[1])
    b.write_bytes(content[0])


def _link(path: Path, name: str) -> None:
    """Replaces a file by a link to the same content outside the folder."""
    aside = path.with_suffix(".aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    (path / name).rename(aside / "it")
    (path / name).symlink_to(aside / "it")


def _pipe(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


def _folder(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()


def _list_also(path: Path, name: str) -> None:
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    _append(path, SUMS, f"{digest}  {name}\n".encode())


def _future(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    seal(path)


def _sealed(path: Path, spoil: Callable[..., object], arguments: tuple[object, ...]) -> str:
    spoil(path, *arguments)
    return seal(path)


def _forged(path: Path, spoil: Callable[..., object], arguments: tuple[object, ...]) -> None:
    digest = _sealed(path, spoil, arguments)
    write_note(path, PulledNote("jets/1", digest, "ada", "2026-01-01T00:00:00+00:00"))
