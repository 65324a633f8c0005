"""The trust of a host: public keys, and root certificates of authorities that certify signers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import TrustError
from soa.errors import needs_extra
from soa.files import read_plain

TRUSTED_KEYS_VARIABLE = "PIPELINE_TRUSTED_KEYS"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class Trusted:
    """A trusted public key, or if `is_root`, the root certificate of trusted signers."""

    pem: str
    fingerprint: str
    """The sha256 of a key's normalized PEM text, or of a certificate's DER bytes."""
    origin: str
    """The file, or the policy that names the key."""
    is_root: bool = False
    signer: str = ""
    """For a root that verified a signature: the subject of the signer's certificate."""

    def __str__(self) -> str:
        return f"{'root ' if self.is_root else ''}{self.fingerprint[:16]} ({self.origin})"


def parse_trusted(pem: str | bytes, origin: str) -> Trusted:
    """Read PEM text: a public EC key on P-256, P-384 or P-521, or a single root certificate.

    Raises TrustError for any other content.
    """
    require_library()
    content = pem.encode() if isinstance(pem, str) else pem
    if b"BEGIN CERTIFICATE-----" in content:
        return _parse_root_certificate(content, origin)
    return _parse_public_key(content, origin)


def _parse_public_key(content: bytes, origin: str) -> Trusted:
    """Read a trusted key from the content of a PEM file. Raises TrustError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if b"PRIVATE KEY-----" in content:
        raise TrustError(f"{origin}: this is a private key, the public one is needed")
    try:
        key = serialization.load_pem_public_key(content)
    except Exception as error:  # of several types: not PEM, not a key, or an unknown kind of key
        raise TrustError(f"{origin}: not a public key in PEM format") from error
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise TrustError(f"{origin}: not an EC key on P-256, P-384 or P-521")
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Trusted(pem.decode(), hashlib.sha256(pem).hexdigest(), origin)


def _parse_root_certificate(content: bytes, origin: str) -> Trusted:
    """Read a trusted root certificate from the content of a PEM file. Raises TrustError."""
    from cryptography.hazmat.primitives import hashes, serialization

    certificates = read_certificates(content, origin)
    if len(certificates) != 1:
        raise TrustError(
            f"{origin}: {len(certificates)} certificates: the file of a trusted root has only one"
        )
    certificate = certificates[0]
    try:
        certificate.verify_directly_issued_by(certificate)
    except Exception as error:
        raise TrustError(
            f"{origin}: not a root: the certificate of {name_of(certificate)} was issued by "
            f"{certificate.issuer.rfc4514_string() or 'nobody'}"
        ) from error
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return Trusted(pem, certificate.fingerprint(hashes.SHA256()).hex(), origin, is_root=True)


def read_trusted(path: str | Path) -> Trusted:
    """Read the key or root in a file, whose path becomes its origin. Raises TrustError."""
    return parse_trusted(read_file(Path(path)), str(path))


def trusted_keys(
    paths: str | Path | Sequence[str | Path], setting: str = "trusted_keys"
) -> tuple[Trusted, ...]:
    """Read the keys and roots in files, and in the `*.pem` and `*.pub` files of folders.

    Raises TrustError if there is no key, so that a missing folder does not disable the check. An
    empty text is an error, too: it may be from a variable that is not set, and as a path it would
    be the working folder. `setting`: its name, for the message.
    """
    keys: list[Trusted] = []
    for entry in [paths] if isinstance(paths, str | Path) else paths:
        if entry == "":
            raise TrustError(f"{setting}: an empty path: name a file or a folder")
        path = Path(entry)
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in (".pem", ".pub"))
        if not files:
            raise TrustError(f"{setting}: there is no *.pem and no *.pub in {path}")
        keys += map(read_trusted, files)
    if not keys:
        raise TrustError(f"{setting} names no key, so no signature could be trusted")
    return tuple(keys)


def host_keys() -> tuple[Trusted, ...] | None:
    """Read the keys of the files and folders in PIPELINE_TRUSTED_KEYS, separated by `:`.

    Returns None if the variable is not set: then this host requires no signature.
    """
    text = os.environ.get(TRUSTED_KEYS_VARIABLE)
    if text is None:
        return None
    return trusted_keys([path for path in text.split(os.pathsep) if path], TRUSTED_KEYS_VARIABLE)


def read_certificates(content: bytes, origin: str) -> list[Any]:
    """Read all certificates in the content of a PEM file. Raises TrustError."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TrustError(f"{origin}: not a certificate in PEM format") from error


def name_of(certificate: Any) -> str:
    """Return the subject of an X.509 certificate, for messages."""
    return certificate.subject.rfc4514_string() or "somebody without a name"


def read_file(path: Path) -> bytes:
    """Read the file of a key or a certificate, which may be a link. Raises TrustError."""
    try:
        return read_plain(path, links=True)
    except OSError as error:
        raise TrustError(f"{path}: cannot be read: {error.strerror}") from error


def require_library() -> None:
    """Raise TrustError if OpenSSF's model-signing, which installs cryptography, is missing."""
    with needs_extra("sign", TrustError):
        import model_signing  # noqa: F401
