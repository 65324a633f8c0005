"""Damage to a bundle's folder: each kind is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from registry.bundle.bundle import Bundle
from registry.bundle.digests import SUMS, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.errors import BundleError, TrustError
from runtime.errors import LoadError
from soa.errors import SoaPipelineError

# Names that no listing may have; the last three look like other names, or hide characters.
NAMES = (
    "../outside", "/outside", "a/../../b", "./a", "a//b", "a\\b", "a\x00b", "a\x07b",
    "a\u202eb", "a\u200bb", "a\xa0b",
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One change of a folder, and the error that refuses it."""

    kind: str
    spoil: Callable[[Path], object]
    named: str = ""
    """A file that the error has to name."""
    only_content: bool = False
    """True: found only if the digest of each file is checked."""
    error: type[SoaPipelineError] = BundleError


def refusals(
    good: Path, folder: Path, damages: Iterable[Damage], load: Callable[[Path], object]
) -> Counter[str]:
    """How often each kind of damage, made to a copy of `good`, was refused with its error."""
    counts: Counter[str] = Counter()
    for number, damage in enumerate(damages):
        copy = folder / f"damaged-{number}"
        shutil.copytree(good, copy)
        damage.spoil(copy)
        try:
            load(copy)
        except damage.error as error:
            assert "\n" not in str(error), (damage, error)
            assert damage.named in str(error), (damage, error)
            counts[damage.kind] += 1
        else:
            raise AssertionError(f"{damage} was not refused")
        finally:
            shutil.rmtree(copy)
    return counts


def of_files(good: Path) -> Iterator[Damage]:
    """Damage that does not fit the seal of the bundle `good`."""
    sealed = [*Bundle.open(good).files, SUMS]
    for name in sealed:
        size = (good / name).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            yield Damage("truncated", partial(_truncate, name, length), name, True)
        yield Damage("longer", partial(_append, name, b"\0"), name, True)
        for kind, replacement in _REPLACEMENTS.items():
            yield Damage(kind, partial(_replace, name, replacement), name)
    for name, other in zip(sealed, [*sealed[1:], sealed[0]], strict=True):
        if (good / name).read_bytes() != (good / other).read_bytes():
            yield Damage("swapped", partial(_swap, name, other), only_content=True)
            yield Damage("copied over", partial(_copy, name, other), other, True)
    for name in ("more.so", "targets/more.txt", ".hidden", "reports/__init__.py"):
        yield Damage("added", partial(_append, name, b"x"), name)
    yield Damage("added", partial(_append, "\u202ea", b"x"))
    yield Damage("symbolic link", partial(_replace, "targets", Path.symlink_to), "targets")
    for name in NAMES:
        yield Damage("path", partial(_list_also, name))
    yield Damage("listed twice", partial(_list_also, "manifest.json"), "manifest.json")
    for line in (b"what is this\n", b"\n", b"\xff\xfe\n"):
        yield Damage("line", partial(_append, SUMS, line), SUMS)
    yield Damage("future schema", _future)


def sealed_again() -> Iterator[Damage]:
    """Damage with which every digest is right. The folder's record of its promotion shows the
    change. If that record is forged too, only the signature shows it."""
    for kind, spoil in (
        ("altered and sealed", partial(_append, "program.pt2", b"x")),
        ("left out and sealed", partial(_replace, "reports/benchmark.json", _nothing)),
        ("added and sealed", partial(_append, "more.so", b"x")),
    ):
        yield Damage(kind, partial(_sealed, spoil), error=LoadError)
        yield Damage(f"{kind}, promotion forged", partial(_forged, spoil), error=TrustError)


def _truncate(name: str, length: int, path: Path) -> None:
    os.truncate(path / name, length)


def _append(name: str, content: bytes, path: Path) -> None:
    with (path / name).open("ab") as file:
        file.write(content)


def _copy(name: str, other: str, path: Path) -> None:
    shutil.copy(path / name, path / other)


def _swap(name: str, other: str, path: Path) -> None:
    content = (path / name).read_bytes()
    shutil.copy(path / other, path / name)
    (path / other).write_bytes(content)


def _nothing(place: Path, aside: Path) -> None:
    """Leaves the place empty."""


_REPLACEMENTS: dict[str, Callable[[Path, Path], object]] = {
    "missing": _nothing,
    "symbolic link": Path.symlink_to,
    "pipe": lambda place, aside: os.mkfifo(place),
    "folder": lambda place, aside: place.mkdir(),
}


def _replace(name: str, make: Callable[[Path, Path], object], path: Path) -> None:
    """Moves a file or folder out of the bundle; `make` gets its place, and where it is now."""
    aside = path.with_suffix(".aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    (path / name).rename(aside / "original")
    make(path / name, aside / "original")


def _list_also(name: str, path: Path) -> None:
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    _append(SUMS, f"{digest}  {name}\n".encode(), path)


def _future(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    seal(path)


def _sealed(spoil: Callable[[Path], object], path: Path) -> str:
    """Spoils the folder, and seals it again; returns its new digest."""
    spoil(path)
    return seal(path)


def _forged(spoil: Callable[[Path], object], path: Path) -> None:
    """Spoils the folder, seals it again, and notes that the new digest was promoted."""
    digest = _sealed(spoil, path)
    write_note(path, PulledNote("jets/1", digest, "ada", "2026-01-01T00:00:00+00:00"))
