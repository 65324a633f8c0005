"""Signatures of bundles, in the format of OpenSSF model-signing: `bundle.sig` beside the files.

That file is a Sigstore bundle with a DSSE envelope around an in-toto statement that lists every
file's sha256. We take the digests from `SHA256SUMS`, which was checked against the files when the
bundle was opened, and list it too: no file is read a second time, and the project's own command,
`model_signing verify key DIR --signature DIR/bundle.sig --public_key FILE`, gives the same answer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from registry.bundle import ANNEXES, PROMOTED, SIGNATURE, SUMS, Bundle
from registry.errors import SignatureError
from registry.trust import certificates
from registry.trust.certificates import Root, read_file
from soa.files import parse_json

TRUSTED_KEYS_VARIABLE = "PIPELINE_TRUSTED_KEYS"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class PublicKey:
    """`pem` is in the form that `fingerprint`, its sha256, is defined for."""

    pem: str
    fingerprint: str
    origin: str
    """The file, or whose policy names it."""

    def __str__(self) -> str:
        return f"{self.fingerprint[:16]} ({self.origin})"


def public_key(pem: str | bytes, origin: str) -> PublicKey:
    """An EC key on P-256, P-384 or P-521; SignatureError says what it is instead."""
    _require_library()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    content = pem.encode() if isinstance(pem, str) else pem
    if b"PRIVATE KEY-----" in content:
        raise SignatureError(f"{origin}: this is a private key, the public one is needed")
    try:
        key = serialization.load_pem_public_key(content)
    except Exception as error:  # of several kinds, for what is no PEM, no key, or of no known kind
        raise SignatureError(f"{origin}: not a public key in PEM format") from error
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise SignatureError(f"{origin}: not an EC key on P-256, P-384 or P-521")
    normal = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(normal.decode(), hashlib.sha256(normal).hexdigest(), origin)


Trusted = PublicKey | Root


def trusted(pem: str | bytes, origin: str) -> Trusted:
    """A public key, or the root certificate of those who may sign."""
    content = pem.encode() if isinstance(pem, str) else pem
    if certificates.BEGIN not in content:
        return public_key(content, origin)
    _require_library()
    return certificates.root(content, origin)


def read_public_key(path: str | Path) -> PublicKey:
    return public_key(read_file(Path(path)), str(path))


def read_trusted(path: str | Path) -> Trusted:
    return trusted(read_file(Path(path)), str(path))


def trusted_keys(
    given: str | Path | Sequence[str | Path], asked: str = "trusted_keys"
) -> tuple[Trusted, ...]:
    """The keys and roots in files, or in folders of which every `*.pem` and `*.pub` is one.

    Where trust is asked for and there is no key, SignatureError: a folder that was lost does not
    become trust in everything.
    """
    keys: list[Trusted] = []
    for path in map(Path, [given] if isinstance(given, str | Path) else given):
        files = sorted(f for f in path.iterdir() if f.suffix in (".pem", ".pub")) \
            if path.is_dir() else [path]  # fmt: skip
        if not files:
            raise SignatureError(f"{asked}: there is no *.pem and no *.pub in {path}")
        keys += map(read_trusted, files)
    if not keys:
        raise SignatureError(f"{asked} names no key, so no signature could be trusted")
    return tuple(keys)


def host_keys() -> tuple[Trusted, ...] | None:
    """Those of the files and folders in PIPELINE_TRUSTED_KEYS, with `:` in between; None: this host
    asks for no signature."""
    text = os.environ.get(TRUSTED_KEYS_VARIABLE)
    if text is None:
        return None
    return trusted_keys([part for part in text.split(os.pathsep) if part], TRUSTED_KEYS_VARIABLE)


def sign(
    bundle: Bundle,
    key: Path,
    password: str | None = None,
    chain: Sequence[Path] = (),
) -> PublicKey:
    """Write `bundle.sig`, in place of one that is there, and return the key it is good for.

    `bundle` must have been opened with its digests verified: that is what is signed. `key` is a
    private EC key in PEM format. With a `chain`, of its own certificate first and then those on the
    way to the root, the signature is good for whoever trusts the root.
    """
    _require_library()
    from cryptography.hazmat.primitives import serialization
    from model_signing import signing

    secret = None if password is None else password.encode()
    try:
        private: Any = serialization.load_pem_private_key(read_file(key), secret)
    except SignatureError:
        raise
    except TypeError as error:  # a password that is missing, or not needed
        needs = "needs a password" if password is None else "has no password"
        raise SignatureError(f"{key}: this key {needs}") from error
    except Exception as error:
        wrong = "" if password is None else ", or the password is wrong"
        raise SignatureError(f"{key}: not a private key in PEM format{wrong}") from error
    public = public_key(
        private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        str(key),
    )
    config = cast(Any, signing.Config)()  # it says the password is text, and takes bytes
    if not chain:
        config.use_elliptic_key_signer(private_key=key, password=secret)
    else:
        if secret is not None:
            raise SignatureError(f"{key}: with a certificate, model-signing takes no password")
        certificates.require_for_signing(chain, private.public_key())
        config.use_certificate_signer(
            private_key=key,
            signing_certificate=chain[0],
            certificate_chain=chain[1:] or chain,  # none at all is refused; itself adds nothing
        )
    config.set_hashing_config(_Hashed(bundle))
    # Beside the folder, for in it would lie a file that does not belong there.
    partial = bundle.path.parent / f".{bundle.path.name}.{uuid.uuid4().hex[:8]}.sig"
    try:
        config.sign(bundle.path, partial)
        partial.replace(bundle.path / SIGNATURE)
    finally:
        partial.unlink(missing_ok=True)
    return public


def require_signature(bundle: Bundle, keys: Iterable[Trusted]) -> Trusted:
    """The one of `keys` that signed exactly these files, or the root that vouches for who did;
    SignatureError if there is none."""
    _require_library()
    allowed = {key.fingerprint: key for key in keys}
    names = ", ".join(map(str, allowed.values()))
    content = bundle.signature()
    if content is None:
        raise SignatureError(f"{bundle.path}: not signed; trusted keys: {names}")
    signer = certificates.signer_of(content)
    if signer is not None:
        return _require_certified(bundle, content, signer, list(allowed.values()))
    hint = _hint(bundle, content)
    key = allowed.get(hint)
    if not isinstance(key, PublicKey):
        raise SignatureError(
            f"{bundle.path}: signed with the key {hint[:16]}, which is none of those trusted: "
            f"{names}"
        )
    try:
        _verify(bundle, content, key)
    except Exception as error:  # the library lets many kinds through
        raise SignatureError(
            f"{bundle.path}: {SIGNATURE} is not a signature of these files by {key}: it is forged, "
            "damaged, or of another bundle"
        ) from error
    return key


def _require_certified(
    bundle: Bundle, content: bytes, signer: str, allowed: Sequence[Trusted]
) -> Root:
    roots = [each for each in allowed if isinstance(each, Root)]
    if not roots:
        raise SignatureError(
            f"{bundle.path}: signed with a certificate, of {signer}, and no root certificate is "
            f"trusted, only: {', '.join(map(str, allowed))}"
        )
    why: Exception | None = None
    for each in roots:
        try:
            _verify(bundle, content, each)
        except Exception as error:  # the library lets many kinds through
            why = error
        else:
            return replace(each, signer=signer)
    raise SignatureError(
        f"{bundle.path}: {SIGNATURE} is not a signature of these files by {signer} under "
        f"{', '.join(map(str, roots))}: it is forged, damaged, of another bundle, or no chain "
        "leads to such a root"
    ) from why


def _verify(bundle: Bundle, content: bytes, by: Trusted) -> None:
    from model_signing import verifying

    with tempfile.TemporaryDirectory(prefix="soa-signature-") as folder:
        signature, pem = Path(folder, SIGNATURE), Path(folder, "trusted.pem")
        signature.write_bytes(content)
        pem.write_text(by.pem)
        config = cast(Any, verifying.Config)()
        if isinstance(by, Root):
            config.use_certificate_verifier(certificate_chain=[pem])
        else:
            config.use_elliptic_key_verifier(public_key=pem)
        config.set_hashing_config(_Hashed(bundle))
        config.verify(bundle.path, signature)


def _hint(bundle: Bundle, content: bytes) -> str:
    """The fingerprint of the key that a signature says it was made with."""
    try:
        found = parse_json(content)["verificationMaterial"]["publicKey"]["hint"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or not found.isalnum():
        raise SignatureError(f"{bundle.path}: {SIGNATURE} is not a signature made with a key")
    return found


class _Hashed:
    """In place of the library's `hashing.Config`: files and digests as they are known already."""

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
        # Annexes came later, and are under no signature.
        own = {n: d for n, d in bundle.files.items() if not n.startswith(f"{ANNEXES}/")}
        digests = {**own, SUMS: bundle.digest}
        items = [
            kind.new_item(name, Digest("sha256", bytes.fromhex(digest)))
            for name, digest in digests.items()
        ]
        self._manifest = manifest.Manifest(bundle.manifest.name, items, kind)

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
        return self._manifest

    def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
        """A signature may not take files out of what it has to cover."""


def _require_library() -> None:
    try:
        import model_signing  # noqa: F401
    except ImportError as error:
        raise SignatureError(
            "signatures need OpenSSF model-signing: pip install 'soa-pipeline[sign]'"
        ) from error
