"""Makes key pairs; the project keeps none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path


def make_keys(
    folder: Path, name: str, curve: ec.EllipticCurve | None = None, password: str | None = None
) -> KeyPair:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    return write_keys(folder, name, key, password)


def write_keys(folder: Path, name: str, key: object, password: str | None = None) -> KeyPair:
    """Writes any kind of key that `cryptography` has, in PEM format."""
    made = KeyPair(folder / f"{name}.key", folder / f"{name}.pem")
    closed: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        closed = serialization.BestAvailableEncryption(password.encode())
    made.private.write_bytes(
        key.private_bytes(  # type: ignore[attr-defined]
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, closed
        )
    )
    made.public.write_bytes(
        key.public_key().public_bytes(  # type: ignore[attr-defined]
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return made
