"""Certificates: signatures by whoever a root of ours has certified, in place of one known key.

The chain from the signer's certificate to a root travels in `bundle.sig`. model-signing checks it
with OpenSSL, at the moment from which the signer's certificate is valid: a certificate that has run
out since keeps its signatures, and no list of revoked ones is asked.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import SignatureError
from soa.files import parse_json, read_plain

BEGIN = b"BEGIN CERTIFICATE-----"


@dataclass(frozen=True)
class Root:
    """A certificate that is trusted, as is what it certifies. `fingerprint`: its DER's sha256."""

    pem: str
    fingerprint: str
    origin: str
    """The file, or whose policy names it."""
    signer: str = ""
    """Once it has vouched: for whom, by the subject of that certificate."""

    def __str__(self) -> str:
        return f"root {self.fingerprint[:16]} ({self.origin})"


def root(content: bytes, origin: str) -> Root:
    """One certificate in PEM format, of an authority that vouches for itself."""
    from cryptography.hazmat.primitives import hashes, serialization

    certificates = read(content, origin)
    if len(certificates) != 1:
        raise SignatureError(
            f"{origin}: {len(certificates)} certificates: trust takes one a file, the root alone"
        )
    found = certificates[0]
    try:
        found.verify_directly_issued_by(found)
    except Exception as error:
        raise SignatureError(
            f"{origin}: not a root: the certificate of {name_of(found)} was issued by "
            f"{found.issuer.rfc4514_string() or 'nobody'}"
        ) from error
    pem = found.public_bytes(serialization.Encoding.PEM).decode()
    return Root(pem, found.fingerprint(hashes.SHA256()).hex(), origin)


def read(content: bytes, origin: str) -> list[Any]:
    """All certificates of a PEM file."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise SignatureError(f"{origin}: not a certificate in PEM format") from error


def require_for_signing(files: Sequence[Path], public: Any) -> None:
    """SignatureError if a signature made with these could never be verified: the certificate of
    the key `public`, and those on the way to the root."""
    own, *others = (read(read_file(path), str(path)) for path in files)
    if len(own) != 1:
        raise SignatureError(f"{files[0]}: {len(own)} certificates: the chain goes apart")
    if own[0].public_key() != public:
        raise SignatureError(f"{files[0]}: the certificate of another key ({name_of(own[0])})")
    if not _may_sign(own[0]):
        raise SignatureError(
            f"{files[0]}: not for signing: it needs the key usage digitalSignature, or the "
            "extended one codeSigning"
        )
    chain = [each for part in others for each in part]
    if chain and own[0].issuer not in [each.subject for each in chain]:
        issuer = own[0].issuer.rfc4514_string()
        raise SignatureError(f"{files[0]}: its issuer, {issuer}, is not in the chain")


def _may_sign(certificate: Any) -> bool:
    from cryptography import x509

    extensions = certificate.extensions
    try:
        if extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        pass
    try:
        usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return x509.oid.ExtendedKeyUsageOID.CODE_SIGNING in usage


def signer_of(signature: bytes) -> str | None:
    """Whose certificate a signature says it was made with; None where it names none."""
    from cryptography import x509

    try:
        chain = parse_json(signature)["verificationMaterial"]["x509CertificateChain"]
        content = base64.b64decode(chain["certificates"][0]["rawBytes"])
        return name_of(x509.load_der_x509_certificate(content))
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def name_of(certificate: Any) -> str:
    return certificate.subject.rfc4514_string() or "somebody without a name"


def read_file(path: Path) -> bytes:
    try:
        return read_plain(path, links=True)
    except OSError as error:
        raise SignatureError(f"{path}: cannot be read: {error.strerror}") from error
