"""Makes certificates, signed by an authority of the test itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.models.keys import write_keys

TODAY = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Certified:
    """A key, its certificate, and the files of both in PEM format."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    private: Path
    pem: Path


def certify(
    folder: Path,
    name: str,
    issuer: Certified | None = None,
    *,
    authority: bool = False,
    may_sign: bool = True,
    began: datetime = TODAY,
    days: int = 3650,
    address: str = "127.0.0.1",
) -> Certified:
    """A certificate for a new key, signed by `issuer`; without an issuer it signs itself.

    `address`: of the server that may use it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=may_sign and not authority,
        content_commitment=False,
        key_encipherment=not may_sign,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False
        )
        .sign(key if issuer is None else issuer.key, hashes.SHA256())
    )
    pair = write_keys(folder, name, key)
    pem = folder / f"{name}.crt.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Certified(key, certificate, pair.private, pem)
