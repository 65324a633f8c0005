"""A version's bundle in an OCI registry, as an artifact of the ModelPack specification.

Each file of the folder, as `pull` makes it, is one layer with the bytes of the file: the digest of
a layer is the digest that `SHA256SUMS` lists. So a registry keeps a file of several versions once,
and a second push uploads only what is missing. The specification: github.com/modelpack/model-spec.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from registry.bundle import (
    PROMOTED,
    SIGNATURE,
    SUMS,
    Bundle,
    Manifest,
    open_folder,
    safe_relative,
    write_atomically,
)
from registry.errors import BundleError, NotFoundError, RegistryError, RegistryUnavailableError
from soa.errors import needs_extra
from soa.files import digest_of
from soa.records import Matching, Within, parse_json, read_record

if TYPE_CHECKING:
    from registry.housekeeping.oci_client import Repository

SCHEME = "oci://"
MODEL = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
FILEPATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"  # oras names files by it
IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
SIGSTORE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MOST_FILES = 4096
"""The most layers of an artifact that is pulled; a bundle has some tens of files."""

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?)"
    rf"/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_KINDS = {
    ".py": "code", ".safetensors": "dataset", ".json": "weight.config", ".yaml": "weight.config",
    ".txt": "weight.config", ".sig": "doc", "": "doc",
}  # fmt: skip
_PRECISIONS = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Address:
    """`oci://HOST/NAME:TAG`, `oci://HOST/NAME@sha256:DIGEST`, or both, when the digest counts."""

    host: str
    name: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Address:
        match = _ADDRESS.fullmatch(text)
        if match is None or (match["tag"] or match["digest"]) is None:
            raise RegistryError(
                f"{text!r} is no address of a version: oci://HOST/NAME:TAG is needed, or "
                "oci://HOST/NAME@sha256:DIGEST, with NAME in lower case"
            )
        return cls(**match.groupdict())

    @property
    def reference(self) -> str:
        return f"sha256:{self.digest}" if self.digest else str(self.tag)

    def connect(self) -> Repository:
        with needs_extra("oci", RegistryError):
            from registry.housekeeping.oci_client import Repository
        return Repository(self.host, self.name)

    def pinned(self, digest: str) -> str:
        """The address of the manifest with this digest, which no tag can change."""
        return f"{SCHEME}{self.host}/{self.name}@sha256:{digest}"


@dataclass(frozen=True)
class PushedArtifact:
    """`address`: by digest. `digest`: of the bundle. `replaced`: the digest of the manifest that
    the tag named before, if it was another one."""

    address: str
    digest: str
    new: bool
    replaced: str | None
    signed: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The descriptor of a layer, as the registry gives it."""

    mediaType: str
    digest: Annotated[str, Matching(r"sha256:[0-9a-f]{64}", "a digest, as sha256:…")]
    size: Annotated[int, Within(0)]
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.annotations.get(FILEPATH, "")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"application/vnd\.cncf\.model\.[a-z.]+\.v1\.raw", self.mediaType):
            raise ValueError(f"a file as it is is needed, found {self.mediaType!r}")
        safe_relative(self.path)


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """The manifest of an artifact, as the registry gives it."""

    artifactType: str
    layers: list[Layer]

    def __post_init__(self) -> None:
        if self.artifactType != MODEL:
            raise ValueError(f"artifactType {MODEL} is needed, found {self.artifactType!r}")
        if len(self.layers) > MOST_FILES:
            raise ValueError(f"{len(self.layers)} layers, at most {MOST_FILES} are allowed")
        names = {layer.path for layer in self.layers}
        if len(names) < len(self.layers):
            raise ValueError("two layers have the same name")
        if inside := [n for n in names if names & {str(p) for p in PurePosixPath(n).parents}]:
            raise ValueError(f"{inside[0]} lies in another file")


# -- push ------------------------------------------------------------------------------------------


def push(folder: str | Path, to: str) -> PushedArtifact:
    """Upload the bundle in a folder, with its annexes, signature and note of promotion, to the
    address `oci://HOST/NAME:TAG`. Every digest is checked.

    The tag names the artifact only when all files are there. Files that the registry has are not
    uploaded, so a push that broke off can be repeated.
    """
    address = Address.parse(to)
    if address.tag is None or address.digest is not None:
        raise RegistryError(f"{to}: to push, a tag is needed, oci://HOST/NAME:TAG")
    bundle = open_folder(folder)
    layers = [_layer(bundle.path / name, name, digest) for name, digest in _files(bundle).items()]
    repository = address.connect()
    before = repository.manifest(address.tag)
    for layer in layers:
        repository.upload(bundle.path / layer["annotations"][FILEPATH], layer)
    content = _manifest(repository, MODEL, CONFIG, _config(bundle.manifest, bundle.digest, layers),
                        layers)  # fmt: skip
    digest = hashlib.sha256(content).hexdigest()
    if before != content:
        repository.put_manifest(address.tag, content, IMAGE)
    signed = [layer for layer in layers if layer["annotations"][FILEPATH] == SIGNATURE]
    if signed:
        _refer(repository, content, [signed[0] | {"mediaType": SIGSTORE}])
    replaced = None if before in (None, content) else hashlib.sha256(before or b"").hexdigest()
    return PushedArtifact(
        address.pinned(digest), bundle.digest, before != content, replaced, bool(signed)
    )


def _files(bundle: Bundle) -> dict[str, str]:
    """Every file to upload: its name and its sha256."""
    found = dict(bundle.files) | {SUMS: bundle.digest}
    found |= {f"{annex.prefix}{SUMS}": annex.digest for annex in bundle.annexes.values()}
    beside = [bundle.path / name for name in (SIGNATURE, PROMOTED)]
    found |= {path.name: digest_of(path) for path in beside if path.exists()}
    return dict(sorted(found.items()))


def _layer(path: Path, name: str, digest: str) -> dict[str, Any]:
    place = PurePosixPath(name)
    kind = "doc" if place.parts[0] == "reports" else _KINDS.get(place.suffix, "weight")
    return {
        "mediaType": f"application/vnd.cncf.model.{kind}.v1.raw",
        "digest": f"sha256:{digest}",
        "size": path.stat().st_size,
        "annotations": {FILEPATH: name, TITLE: name},
    }


def _config(manifest: Manifest, digest: str, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made = manifest.provenance
    return {
        "descriptor": {
            "name": manifest.name,
            "version": digest,
            "createdAt": made.created,
            **({"description": manifest.description} if manifest.description else {}),
            **({"revision": made.git_commit} if made.git_commit else {}),
        },
        "config": {"format": "pt2", "precision": _PRECISIONS[manifest.capture.precision]},
        "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
    }


def _manifest(
    repository: Repository,
    artifact: str,
    config_type: str,
    config: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    **more: Any,
) -> bytes:
    """The manifest of an artifact whose layers are in the registry; its config is uploaded."""
    content = _json(config)
    described = {"mediaType": config_type, **_described(content)}
    repository.upload_bytes(content, described)
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "artifactType": artifact,
            "config": described,
            "layers": layers,
            **more,
        }
    )


def _refer(repository: Repository, subject: bytes, layers: Sequence[Mapping[str, Any]]) -> None:
    """Store a signature as an artifact that refers to the manifest `subject`."""
    about = {"mediaType": IMAGE, **_described(subject)}
    content = _manifest(repository, SIGSTORE, EMPTY, {}, layers, subject=about)
    entry = {"mediaType": IMAGE, "artifactType": SIGSTORE, **_described(content)}
    headers = repository.put_manifest(entry["digest"], content, IMAGE)
    if "OCI-Subject" in headers:
        return
    # A registry of OCI 1.0 keeps no list of referrers: clients keep it, under a tag.
    tag = about["digest"].replace(":", "-")
    known = parse_json(repository.manifest(tag) or b"{}")
    listed = known.get("manifests", []) if isinstance(known, dict) else []
    if entry not in listed:
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*listed, entry]}
        repository.put_manifest(tag, _json(index), INDEX)


def _described(content: bytes) -> dict[str, Any]:
    return {"digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


# -- pull ------------------------------------------------------------------------------------------


def pull(of: str, folder: str | Path) -> tuple[str, Bundle]:
    """Download what `push` uploaded to the new `folder` and verify every digest; return the address
    by digest, and the bundle.

    The manifest is read once, so a tag that moves meanwhile changes nothing. If the registry breaks
    off, what came is kept beside `folder`, and the next pull of the same version goes on there.
    After any other error nothing is left.
    """
    address = Address.parse(of)
    repository = address.connect()
    content = repository.manifest(address.reference)
    if content is None:
        raise NotFoundError(f"{of}: there is no such version")
    digest = hashlib.sha256(content).hexdigest()
    if address.digest not in (None, digest):
        raise BundleError(f"{of}: the registry gave another manifest, sha256:{digest[:12]}…")
    try:
        layers = read_record(ModelManifest, content).layers
    except ValueError as error:
        raise BundleError(f"{of}: not a version that `pipeline push` uploaded: {error}") from error
    dest = Path(folder).absolute()
    with write_atomically(dest) as new, _kept(dest, digest) as kept:
        missing = sum(layer.size for layer in layers if not (kept / layer.path).exists())
        if missing > shutil.disk_usage(kept).free:
            raise BundleError(f"{of}: {missing} bytes are missing, and {dest.parent} has less")
        for layer in layers:
            _download(repository, layer, kept / layer.path)
        open_folder(kept)
        kept.rename(new)  # replaces the empty folder
    return address.pinned(digest), open_folder(dest, verify=False)


@contextlib.contextmanager
def _kept(dest: Path, digest: str) -> Iterator[Path]:
    """The folder in which a pull that broke off goes on; only one process at a time uses it."""
    kept = dest.parent / f".{dest.name}.{digest[:12]}.partial"
    kept.mkdir(exist_ok=True)
    handle = os.open(kept, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise BundleError(f"{kept}: belongs to another user; it was not used")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegistryUnavailableError(f"{dest}: another process is pulling it") from None
        try:
            yield kept
        except (RegistryUnavailableError, KeyboardInterrupt):
            raise
        except BaseException:
            shutil.rmtree(kept, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _download(repository: Repository, layer: Layer, path: Path) -> None:
    """Write a layer to a file, of which a first part may be there already; check its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o666), "r+b") as file:
        found = hashlib.file_digest(file, "sha256")
        if (file.tell(), f"sha256:{found.hexdigest()}") == (layer.size, layer.digest):
            return
        have = file.tell() if file.tell() < layer.size else 0
        with repository.blob(layer.digest, have) as (begin, pieces):
            _receive(file, begin, pieces, layer.size)
        file.seek(0)
        found = hashlib.file_digest(file, "sha256")
        size = file.tell()
    if (size, f"sha256:{found.hexdigest()}") != (layer.size, layer.digest):
        raise BundleError(
            f"{repository.shown}: {layer.path} arrived as sha256:{found.hexdigest()[:12]}… in "
            f"{size} bytes, the manifest says {layer.digest[:19]}… in {layer.size}",
            code="bundle-altered",
        )


def _receive(file: BinaryIO, begin: int, pieces: Iterator[bytes], size: int) -> None:
    """Write pieces to a file, from the byte `begin` on; no more than `size` bytes in all."""
    file.seek(begin)
    file.truncate()
    for piece in pieces:
        file.write(piece[: size + 1 - file.tell()])
        if file.tell() > size:
            return
