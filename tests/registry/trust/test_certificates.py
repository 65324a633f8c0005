"""Signatures with a certificate: good for whoever trusts the root, and for nobody else."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from registry import Bundle, Registry, TrustError, seal
from registry.trust import host_keys, read_trusted, require_signature, sign
from tests.models.authorities import TODAY, Certified, certify
from tests.models.keys import make_keys

MakeBundle = Callable[..., Path]


@dataclass(frozen=True)
class House:
    """A root, who works under it, and who signs."""

    root: Certified
    office: Certified
    ada: Certified

    @property
    def chain(self) -> list[Path]:
        return [self.ada.pem, self.office.pem]


@pytest.fixture
def house(tmp_path: Path) -> House:
    root = certify(tmp_path, "root", authority=True)
    office = certify(tmp_path, "office", root, authority=True)
    return House(root, office, certify(tmp_path, "ada", office))


@pytest.fixture
def signed(make_bundle: MakeBundle, house: House) -> Path:
    path = make_bundle()
    sign(Bundle.open(path), house.ada.private, chain=house.chain)
    return path


def refused(path: Path, *trusted: Path) -> str:
    with pytest.raises(TrustError) as caught:
        require_signature(Bundle.open(path), [read_trusted(each) for each in trusted])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_signed_and_verified(signed: Path, house: House, tmp_path: Path) -> None:
    other = make_keys(tmp_path, "other").public
    keys = [read_trusted(path) for path in (other, house.root.pem)]
    assert not keys[0].is_root
    found = require_signature(Bundle.open(signed), keys)
    assert found.is_root
    assert keys[1].is_root
    assert (found.fingerprint, found.signer) == (keys[1].fingerprint, "CN=ada")
    assert "root " in str(found)


def test_the_standard_command_agrees(signed: Path, house: House) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "certificate", str(signed)]
    options = [f"--signature={signed / 'bundle.sig'}", f"--certificate_chain={house.root.pem}"]
    assert subprocess.run([*command, *options], capture_output=True).returncode == 0
    (signed / "program.pt2").write_bytes(b"other")
    assert subprocess.run([*command, *options], capture_output=True).returncode != 0


def test_straight_under_the_root(make_bundle: MakeBundle, house: House, tmp_path: Path) -> None:
    bob, path = certify(tmp_path, "bob", house.root), make_bundle()
    sign(Bundle.open(path), bob.private, chain=[bob.pem])
    found = require_signature(Bundle.open(path), [read_trusted(house.root.pem)])
    assert found.is_root
    assert found.signer == "CN=bob"


def test_who_is_not_certified(
    signed: Path, make_bundle: MakeBundle, house: House, tmp_path: Path
) -> None:
    other = certify(tmp_path, "other", authority=True)
    said = refused(signed, other.pem)
    assert "by CN=ada under root " in said
    assert "no chain leads to such a root" in said
    # The key itself is not among those trusted, and no key vouches for a certificate.
    key = make_keys(tmp_path, "release").public
    assert "signed with a certificate, of CN=ada, and no root certificate is trusted" in refused(
        signed, key
    )
    # Somebody with the same names, and an authority that made itself.
    fake = certify(tmp_path, "root", authority=True)
    path = make_bundle(seed=1)
    eve = certify(tmp_path, "ada", fake)
    sign(Bundle.open(path), eve.private, chain=[eve.pem])
    (tmp_path / "true.pem").write_text(read_trusted_text(house))
    assert "no chain leads to such a root" in refused(path, tmp_path / "true.pem")


def read_trusted_text(house: House) -> str:
    from cryptography.hazmat.primitives import serialization

    return house.root.certificate.public_bytes(serialization.Encoding.PEM).decode()


def test_a_chain_that_has_a_gap(make_bundle: MakeBundle, house: House) -> None:
    path = make_bundle()
    with pytest.raises(TrustError, match="its issuer, CN=office, is not in the chain"):
        sign(Bundle.open(path), house.ada.private, chain=[house.ada.pem, house.root.pem])
    assert not (path / "bundle.sig").exists()
    sign(Bundle.open(path), house.ada.private, chain=[house.ada.pem])  # the root may be the office
    assert "no chain leads" in refused(path, house.root.pem)


def test_who_may_not_certify(make_bundle: MakeBundle, house: House, tmp_path: Path) -> None:
    """Ada is certified to sign, and not to let others."""
    eve, path = certify(tmp_path, "eve", house.ada), make_bundle()
    chain = [eve.pem, house.ada.pem, house.office.pem]
    sign(Bundle.open(path), eve.private, chain=chain)
    assert "no chain leads to such a root" in refused(path, house.root.pem)


def test_changed_files(signed: Path, house: House, make_bundle: MakeBundle) -> None:
    (signed / "program.pt2").write_bytes(b"other")
    seal(signed)
    assert "not a signature of these files" in refused(signed, house.root.pem)
    other = make_bundle(seed=1)
    shutil.copy(signed / "bundle.sig", other / "bundle.sig")
    assert "not a signature of these files" in refused(other, house.root.pem)


def test_another_certificate_in_the_signature(signed: Path, house: House, tmp_path: Path) -> None:
    """Signed by Ada, who writes that Bob did it."""
    bob = certify(tmp_path, "bob", house.office)
    data = json.loads((signed / "bundle.sig").read_text())
    from cryptography.hazmat.primitives import serialization

    content = bob.certificate.public_bytes(serialization.Encoding.DER)
    chain = data["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain[0]["rawBytes"] = base64.b64encode(content).decode()
    (signed / "bundle.sig").write_text(json.dumps(data))
    assert "by CN=bob under" in refused(signed, house.root.pem)


def test_every_byte_of_the_signature_counts(signed: Path, house: House) -> None:
    """Changed anywhere, it is refused, or still vouches for the same."""
    content = (signed / "bundle.sig").read_bytes()
    keys = [read_trusted(house.root.pem)]
    refusals = 0
    for at in range(0, len(content), len(content) // 100):
        altered = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (signed / "bundle.sig").write_bytes(altered)
        try:
            assert require_signature(Bundle.open(signed), keys).fingerprint == keys[0].fingerprint
        except TrustError:
            refusals += 1
    assert refusals > 70


def test_it_has_run_out_since(make_bundle: MakeBundle, tmp_path: Path, house: House) -> None:
    """As docs/signing.md says: what counts is the moment from which the certificate is valid."""
    old = certify(tmp_path, "old", house.office, days=1)
    path = make_bundle()
    sign(Bundle.open(path), old.private, chain=[old.pem, house.office.pem])
    require_signature(Bundle.open(path), [read_trusted(house.root.pem)])
    early = certify(tmp_path, "early", house.office, began=TODAY - timedelta(days=9))
    sign(Bundle.open(path), early.private, chain=[early.pem, house.office.pem])
    assert "no chain leads" in refused(path, house.root.pem)  # before the office was certified


def test_what_cannot_sign(make_bundle: MakeBundle, house: House, tmp_path: Path) -> None:
    bundle = Bundle.open(make_bundle())
    other = certify(tmp_path, "tls", house.office, may_sign=False)
    closed = make_keys(tmp_path, "closed", password="sesame").private
    for key, chain, password, why in (
        (other.private, [other.pem], None, "not for signing: it needs the key usage"),
        (house.office.private, house.chain, None, r"certificate of another key \(CN=ada\)"),
        (house.ada.private, [house.ada.private], None, "not a certificate in PEM format"),
        (house.ada.private, [tmp_path / "nothing"], None, "nothing: cannot be read"),
        (closed, house.chain, "sesame", "model-signing takes no password"),
    ):
        with pytest.raises(TrustError, match=why):
            sign(bundle, key, password, chain)
    both = tmp_path / "both.pem"
    both.write_bytes(house.ada.pem.read_bytes() + house.office.pem.read_bytes())
    with pytest.raises(TrustError, match="2 certificates: the chain goes apart"):
        sign(bundle, house.ada.private, chain=[both])
    assert not (bundle.path / "bundle.sig").exists()


def test_what_cannot_be_trusted(house: House, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="not a root: the certificate of CN=office was issued"):
        read_trusted(house.office.pem)
    both = tmp_path / "both.pem"
    both.write_bytes(house.root.pem.read_bytes() * 2)
    with pytest.raises(TrustError, match="2 certificates: trust takes one a file"):
        read_trusted(both)
    both.write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    with pytest.raises(TrustError, match="not a certificate in PEM format"):
        read_trusted(both)


def test_a_folder_of_keys_and_roots(
    registry: Registry, signed: Path, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    shutil.copy(house.root.pem, folder)
    shutil.copy(make_keys(tmp_path, "release").public, folder)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(folder))
    keys = host_keys()
    assert keys is not None
    assert len(keys) == 2
    version = registry.register(Bundle.open(signed))
    found = registry.require_signature(version, registry.open(version), keys)
    assert found.fingerprint == read_trusted(house.root.pem).fingerprint
    bob = certify(tmp_path, "bob", house.office)
    registry.sign(version, bob.private, chain=[bob.pem, house.office.pem])
    found = registry.require_signature(version, registry.open(version), keys)
    assert found.is_root
    assert found.signer == "CN=bob"
