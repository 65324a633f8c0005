"""A Triton model repository: config.pbtxt, and either the version's bundle with the model.py that
runs it, or the one file that one of Triton's own backends loads."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from registry.bundle import SUMS, Bundle, write_atomically
from serving.errors import ServingError
from serving.triton.config import Service, config_text

CONFIG = "config.pbtxt"
BUNDLE = ".bundle"
"""A hidden folder, because CMSSW's `cmsTritonConfigTool` takes everything that `*/*` finds in a
model for a file."""

_MODEL = "model.py"


def write_repository(
    out: Path, service: Service, copy_bundle: Callable[[Path], Bundle], *, replace: bool = False
) -> Path:
    """Write `out/<name>/` completely or not at all; return that folder.

    `copy_bundle` copies the promoted bundle into the new folder that it is given. The result may be
    moved and copied. Raises ServingError if the folder exists already, unless `replace`, if its
    path has characters that a shell changes, or if the bundle is not that of `service`.
    """
    if odd := re.search(r"[^\w/.,:+@=%-]", str(out.absolute() / service.name)):
        character = "space" if odd[0] == " " else odd[0]
        raise ServingError(
            f"{out.absolute() / service.name}: Triton's Python backend starts through a shell and "
            f"fails in a path with a {character} in it: name another"
        )

    def fill(version: Path) -> None:
        """Write the files of the version into its folder."""
        write_version(version, copy_bundle(version / BUNDLE), service.digest)

    return _write(out, service, fill, replace)


def write_version(folder: Path, bundle: Bundle, digest: str) -> None:
    """Write model.py into a version's folder, which has the bundle already.

    Raises ServingError if the bundle's digest is not `digest`.
    """
    if bundle.digest != digest:
        raise ServingError(f"{bundle.path}: bundle {bundle.digest[:12]} instead of {digest[:12]}")
    shutil.copyfile(Path(__file__).with_name(_MODEL), folder / _MODEL)


def write_native_repository(
    out: Path, service: Service, file: Path, *, replace: bool = False
) -> Path:
    """Write `out/<name>/` for one of Triton's own backends, which loads only `file`.

    Returns that folder. Raises ServingError as `write_repository` does.
    """
    return _write(out, service, lambda version: shutil.copyfile(file, version / file.name), replace)


def _write(out: Path, service: Service, fill: Callable[[Path], object], replace: bool) -> Path:
    """Write the folder of a model, completely or not at all, and return it.

    `fill` writes the files of the version into the new folder that it is given. Raises ServingError
    for a folder that exists already, unless `replace`, or that is no model.
    """
    folder = out / service.name
    if folder.exists() and not replace:
        raise ServingError(f"{folder} exists already: remove it, or replace it with --replace")
    if folder.exists() and not (folder / CONFIG).is_file():
        raise ServingError(f"{folder} holds no {CONFIG}, so it is no model: remove it yourself")
    config_text(service)  # raises its errors before any work is done
    with write_atomically(folder, replace=replace) as partial:
        version = partial / str(service.number)
        version.mkdir()
        fill(version)
        (partial / CONFIG).write_text(config_text(service, _checksums(partial)))
    return folder


def _checksums(model: Path) -> dict[str, str]:
    """Return the MD5 of each file by its path in the model's folder.

    Of a bundle only `SHA256SUMS` is included, which has the digests of the other files.
    """
    checksums = {}
    for file in model.rglob("*"):
        path = file.relative_to(model)
        if file.is_file() and (BUNDLE not in path.parts or file.name == SUMS):
            md5 = hashlib.md5(file.read_bytes(), usedforsecurity=False)  # trusted
            checksums[str(path)] = md5.hexdigest()
    return checksums
