"""Signatures of bundles, in the format of OpenSSF model-signing: `bundle.sig` next to the files.

That file is a Sigstore bundle with a DSSE envelope around an in-toto statement that lists every
file's sha256. We take the digests from `SHA256SUMS`, which was checked against the files when the
bundle was opened, and list that file too. So no file is read a second time, and the command of
OpenSSF, `model_signing verify key DIR --signature DIR/bundle.sig --public_key FILE`, gives the
same answer.

A signature is made with a key alone or with a certificate. With a certificate, `bundle.sig`
contains the chain from the signer's certificate to the root. model-signing checks the chain with
OpenSSL, at the time from which the signer's certificate is valid. So signatures stay valid after
the certificate has expired, and revocation lists are not used.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from registry.bundle import ANNEXES, PROMOTED, SIGNATURE, SUMS, Bundle
from registry.errors import TrustError
from registry.trust.keys import (
    Trusted,
    name_of,
    parse_trusted,
    read_certificates,
    read_file,
    require_library,
)
from soa.files import read_plain
from soa.records import parse_json


def sign(
    bundle: Bundle, key: Path, password: str | None = None, chain: Sequence[Path] = ()
) -> Trusted:
    """Write `bundle.sig`, replacing an old one, and return the public key that verifies it.

    `bundle` must have been opened with its digests verified, because these are signed. `key` is a
    private EC key in PEM format. `chain`: the certificate of `key`, then the other certificates up
    to the root; then everybody who trusts the root can verify the signature.
    """
    require_library()
    from cryptography.hazmat.primitives import serialization
    from model_signing import signing

    secret = None if password is None else password.encode()
    private = _load_private_key(key, secret)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signer = parse_trusted(public, str(key))
    config = cast(Any, signing.Config)()  # its annotation is str for the password; it takes bytes
    if not chain:
        config.use_elliptic_key_signer(private_key=key, password=secret)
    else:
        if secret is not None:
            raise TrustError(f"{key}: with a certificate, model-signing takes no password")
        _require_chain(chain, private.public_key())
        config.use_certificate_signer(
            private_key=key,
            signing_certificate=chain[0],
            certificate_chain=chain[1:] or chain,  # must not be empty; repeating it is harmless
        )
    config.set_hashing_config(_KnownDigests(bundle))
    with tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        config.sign(bundle.path, Path(folder, SIGNATURE))
        put_signature(read_plain(Path(folder, SIGNATURE)), bundle.path)
    return signer


def _load_private_key(file: Path, secret: bytes | None) -> Any:
    """Load the private key in a PEM file. `secret`: its password, or None. Raises TrustError."""
    from cryptography.hazmat.primitives import serialization

    content = read_file(file)
    try:
        return serialization.load_pem_private_key(content, secret)
    except TypeError as error:  # a password that is missing, or not needed
        needs = "needs a password" if secret is None else "has no password"
        raise TrustError(f"{file}: this key {needs}") from error
    except Exception as error:  # of several types: not PEM, or an unknown kind of key
        wrong = "" if secret is None else ", or the password is wrong"
        raise TrustError(f"{file}: not a private key in PEM format{wrong}") from error


def put_signature(signature: bytes, folder: Path) -> None:
    """Write a signature into the folder of a bundle, where it replaces an old one at once."""
    # The temporary file is outside the folder, because no extra file may be in a sealed folder.
    partial = folder.parent / f".{folder.name}.{os.urandom(4).hex()}.sig"
    try:
        partial.write_bytes(signature)
        partial.replace(folder / SIGNATURE)
    except FileNotFoundError as error:
        raise TrustError(
            f"{folder}: its signature took so long to be written that `pipeline registry gc` "
            "took it for abandoned; sign again"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _require_chain(files: Sequence[Path], public: Any) -> None:
    """Raise TrustError if a signature with this certificate chain could never be verified.

    `files`: the certificate of the key `public`, then the others up to the root.
    """
    from cryptography import x509

    own, *others = (read_certificates(read_file(path), str(path)) for path in files)
    if len(own) != 1:
        raise TrustError(
            f"{files[0]}: {len(own)} certificates: give the signer's alone, the others as its chain"
        )
    if own[0].public_key() != public:
        raise TrustError(f"{files[0]}: the certificate of another key ({name_of(own[0])})")
    extensions = {type(extension.value): extension.value for extension in own[0].extensions}
    usage, extended = extensions.get(x509.KeyUsage), extensions.get(x509.ExtendedKeyUsage, ())
    signs = usage is not None and usage.digital_signature
    if not signs and x509.oid.ExtendedKeyUsageOID.CODE_SIGNING not in extended:
        raise TrustError(
            f"{files[0]}: not for signing: it needs the key usage digitalSignature, or the "
            "extended one codeSigning"
        )
    chain = [certificate for certificates in others for certificate in certificates]
    if chain and own[0].issuer not in [certificate.subject for certificate in chain]:
        issuer = own[0].issuer.rfc4514_string()
        raise TrustError(f"{files[0]}: its issuer, {issuer}, is not in the chain")


def require_signature(bundle: Bundle, keys: Iterable[Trusted], called: str = "") -> Trusted:
    """Return the key in `keys` that signed exactly these files, or the signer's root certificate.

    Raises TrustError if there is none. `called`: the name of the bundle in the error; by default
    its folder.
    """
    require_library()
    name = called or bundle.path
    allowed = list({key.fingerprint: key for key in keys}.values())
    content = bundle.signature()
    if content is None:
        raise TrustError(f"{name}: not signed; trusted keys: {', '.join(map(str, allowed))}")
    signer = _read_signer(bundle, content)
    candidates = _keys_to_try(signer, allowed, name)
    failure: Exception | None = None
    for key in candidates:
        try:
            _verify(bundle, content, key)
        except Exception as error:  # the library raises exceptions of many types
            failure = error
        else:
            return replace(key, signer=signer.certified)
    signers, advice = ", ".join(map(str, candidates)), ""
    if signer.certified:
        signers, advice = (
            f"{signer.certified} under {signers}",
            ", or no chain leads to such a root",
        )
    raise TrustError(
        f"{name}: {SIGNATURE} is not a signature of these files by {signers}: it is forged, "
        f"damaged or of another bundle{advice}"
    ) from failure


def _keys_to_try(signer: _Signer, allowed: Sequence[Trusted], name: str | Path) -> list[Trusted]:
    """Return the trusted keys that may verify a signature of `signer`: its key, or all roots.

    Raises TrustError if there is none. `name`: that of the bundle, for the error.
    """
    trusted_names = ", ".join(map(str, allowed))
    if signer.certified:
        keys = [key for key in allowed if key.is_root]
        how = (
            f"with a certificate, of {signer.certified}, and no root certificate is trusted, "
            f"only: {trusted_names}"
        )
    else:
        keys = [key for key in allowed if not key.is_root and key.fingerprint == signer.key]
        how = f"with the key {signer.key[:16]}, which is none of those trusted: {trusted_names}"
    if not keys:
        raise TrustError(f"{name}: signed {how}")
    return keys


def _verify(bundle: Bundle, content: bytes, by: Trusted) -> None:
    """Verify the signature `content` with one key or root. Raises errors of model_signing."""
    from model_signing import verifying

    with tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        signature, pem = Path(folder, SIGNATURE), Path(folder, "trusted.pem")
        signature.write_bytes(content)
        pem.write_text(by.pem)
        config = cast(Any, verifying.Config)()
        if by.is_root:
            config.use_certificate_verifier(certificate_chain=[pem])
        else:
            config.use_elliptic_key_verifier(public_key=pem)
        config.set_hashing_config(_KnownDigests(bundle))
        config.verify(bundle.path, signature)


class _Signer(NamedTuple):
    """Who signed: a key's fingerprint, or the subject of a certificate; the other is empty."""

    key: str = ""
    certified: str = ""


def _read_signer(bundle: Bundle, content: bytes) -> _Signer:
    """Read the signer that a signature names; nothing is verified. Raises TrustError."""
    from cryptography import x509

    try:
        material = parse_json(content)["verificationMaterial"]
        if "x509CertificateChain" in material:
            raw = base64.b64decode(material["x509CertificateChain"]["certificates"][0]["rawBytes"])
            return _Signer(certified=name_of(x509.load_der_x509_certificate(raw)))
        hint = material["publicKey"]["hint"]
        if isinstance(hint, str) and hint.isalnum():
            return _Signer(key=hint)
    except (ValueError, KeyError, TypeError, IndexError):
        pass  # no signer writes this form: it is refused below, as an odd hint is
    raise TrustError(f"{bundle.path}: {SIGNATURE} is not a signature made with a key")


class _KnownDigests:
    """Replaces the library's `hashing.Config`: gives the files and digests already known."""

    def __init__(self, bundle: Bundle) -> None:
        from model_signing import manifest
        from model_signing._hashing.hashing import Digest

        kind = manifest.SerializationType.from_args(
            {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [SIGNATURE, PROMOTED, ANNEXES],
            }
        )
        # Annexes were added later: the signature does not cover them.
        covered = {
            name: digest
            for name, digest in bundle.files.items()
            if not name.startswith(f"{ANNEXES}/")
        }
        digests = {**covered, SUMS: bundle.digest}
        items = [
            kind.new_item(name, Digest("sha256", bytes.fromhex(digest)))
            for name, digest in digests.items()
        ]
        self._manifest = manifest.Manifest(bundle.manifest.name, items, kind)

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
        """Return the manifest of the bundle, whatever the library asks for. No file is read."""
        return self._manifest

    def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
        """Ignore the request: a signature must not exclude files from the check."""
