"""A version's bundle in an OCI registry, as an artifact of the ModelPack specification.

Each file of the folder, as `pull` makes it, is one layer with the bytes of the file: the digest of
a layer is the digest that `SHA256SUMS` lists. So a registry keeps a file of several versions once,
and a second push uploads only what is missing. The specification: github.com/modelpack/model-spec.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from registry.bundle import (
    PROMOTED,
    SIGNATURE,
    SUMS,
    Bundle,
    open_folder,
    safe_relative,
    write_atomically,
)
from registry.errors import BundleError, RegistryError
from soa.errors import needs_extra
from soa.files import digest_of
from soa.records import Matching, read_record

if TYPE_CHECKING:
    from registry.housekeeping.oci_client import Repository

MODEL = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
FILEPATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"  # oras names files by it
IMAGE = "application/vnd.oci.image.manifest.v1+json"
MOST_FILES = 4096
"""The most layers of an artifact that is pulled; a bundle has some tens of files."""

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?)"
    rf"/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_KINDS = {".py": "code", ".safetensors": "dataset", ".json": "weight.config", ".txt": "doc"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The descriptor of a file, as the registry gives it."""

    digest: Annotated[str, Matching(r"sha256:[0-9a-f]{64}", "a digest, as sha256:…")]
    size: int
    annotations: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """The manifest of an artifact, as the registry gives it."""

    artifactType: Annotated[str, Matching(re.escape(MODEL), MODEL)]
    layers: list[Layer]


def push(folder: str | Path, to: str) -> tuple[str, Bundle]:
    """Upload the bundle in a folder to `to`, an address `oci://HOST/NAME:TAG`.

    Returns the address by digest, and the bundle. Its annexes, its signature and its note of
    promotion are uploaded, too. Every digest is checked. The tag names the artifact only when all
    files are there. Files that the registry has are not uploaded, so a push that broke off can be
    repeated.
    """
    bundle = open_folder(folder)
    layers = list(_describe_files(bundle))
    repository = _open_repository(to)
    for layer in layers:
        repository.upload(bundle.path / layer["annotations"][FILEPATH], layer)
    config = _to_json(
        descriptor={"name": bundle.manifest.name, "version": bundle.digest},
        config={"format": "pt2"},
        modelfs={"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
    )
    descriptor = {"mediaType": CONFIG, "size": len(config), "digest": _oci_digest(config)}
    repository.upload_bytes(config, descriptor)
    content = _to_json(
        schemaVersion=2, mediaType=IMAGE, artifactType=MODEL, config=descriptor, layers=layers
    )
    repository.put_manifest(content, IMAGE)
    return f"{repository.shown}@{_oci_digest(content)}", bundle


def _open_repository(address: str) -> Repository:
    """Log in to the repository at an address. Raises RegistryError, also for a wrong address."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match["tag"] or match["digest"]) is None:
        raise RegistryError(
            f"{address!r}: found no oci://HOST/name:TAG or oci://HOST/name@sha256:…"
        )
    with needs_extra("oci", RegistryError):
        from registry.housekeeping.oci_client import Repository
    return Repository(**match.groupdict())


def _describe_files(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """Yield the OCI descriptor of every file to upload, by name."""
    digests = dict(bundle.files) | {SUMS: bundle.digest}
    digests |= {f"{annex.prefix}{SUMS}": annex.digest for annex in bundle.annexes.values()}
    unsealed = [bundle.path / name for name in (SIGNATURE, PROMOTED)]
    digests |= {path.name: digest_of(path) for path in unsealed if path.exists()}
    for name, digest in sorted(digests.items()):
        path = bundle.path / name
        yield {
            "mediaType": f"application/vnd.cncf.model.{_KINDS.get(path.suffix, 'weight')}.v1.raw",
            "digest": f"sha256:{digest}",
            "size": path.stat().st_size,
            "annotations": {FILEPATH: name, TITLE: name},
        }


def _to_json(**fields: Any) -> bytes:
    """Write the fields as a JSON object. Equal fields give equal bytes, and so equal digests."""
    return json.dumps(fields, sort_keys=True).encode()


def _oci_digest(content: bytes) -> str:
    """Return the digest of a blob as OCI writes it: `sha256:…`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def pull(address: str, folder: str | Path) -> tuple[str, Bundle]:
    """Download what `push` uploaded to the new `folder`, and verify every digest.

    Returns the address by digest, and the bundle.

    The manifest is read once, so a tag that moves meanwhile changes nothing. If the registry breaks
    off, the files that came are kept beside `folder`, and the next pull of the same version goes on
    with the others. After any other error nothing is left.
    """
    repository = _open_repository(address)
    content = repository.read_manifest(IMAGE)
    digest = _oci_digest(content)
    if repository.digest not in (None, digest):
        raise BundleError(f"{address}: the registry gave another manifest, {digest}")
    try:
        manifest = read_record(ModelManifest, content)
        layers = {
            safe_relative(layer.annotations.get(FILEPATH, "")): layer for layer in manifest.layers
        }
    except ValueError as error:
        raise BundleError(
            f"{address}: not a version that `pipeline push` uploaded: {error}"
        ) from error
    if len(layers) > MOST_FILES:
        raise BundleError(f"{address}: {len(layers)} files, at most {MOST_FILES} are allowed")
    # Twelve digits of the digest name this work: a pull of another version begins anew.
    with write_atomically(folder, resume=digest.removeprefix("sha256:")[:12]) as partial:
        for name, layer in layers.items():
            _download(repository, layer, partial / name)
        open_folder(partial)
    return f"{repository.shown}@{digest}", open_folder(folder, verify=False)


def _download(repository: Repository, layer: Layer, path: Path) -> None:
    """Download a file and check its digest, unless an earlier try has written it already.

    Raises BundleError if the registry sends other bytes than the layer names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and f"sha256:{digest_of(path)}" == layer.digest:
        return
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in repository.read_pieces(layer.digest):
            digest.update(piece)
            size += len(piece)
            if size > layer.size:  # the registry could send without end
                break
            file.write(piece)
    if (size, f"sha256:{digest.hexdigest()}") != (layer.size, layer.digest):
        raise BundleError(
            f"{repository.shown}: {path.name} arrived as sha256:{digest.hexdigest()[:12]}… with "
            f"{size} bytes, the manifest says {layer.digest[:19]}… with {layer.size}",
            code="bundle-altered",
        )
