"""Makes key pairs; the project keeps none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class KeyPair:
    """The files of a private and a public key, in PEM format."""

    private: Path
    public: Path


def make_keys(
    folder: Path, name: str, curve: ec.EllipticCurve | None = None, password: str | None = None
) -> KeyPair:
    """Writes NAME.key and NAME.pem, of a new key on this curve, P-256 by default."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    return write_keys(folder, name, key, password)


def write_keys(folder: Path, name: str, key: object, password: str | None = None) -> KeyPair:
    """Writes any kind of key that `cryptography` has, in PEM format."""
    pair = KeyPair(folder / f"{name}.key", folder / f"{name}.pem")
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password.encode())
    pair.private.write_bytes(
        key.private_bytes(  # type: ignore[attr-defined]
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
    )
    pair.public.write_bytes(
        key.public_key().public_bytes(  # type: ignore[attr-defined]
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return pair
