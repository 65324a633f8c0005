"""Signatures with a key alone and with a certificate: which are accepted, and for which files."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from registry import Bundle, Registry, TrustError, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.trust import host_keys, read_trusted, require_signature, sign, trusted, trusted_keys
from tests.models.authorities import TODAY, Certified, certify
from tests.models.bundles import MakeBundle
from tests.models.keys import KeyPair, make_keys, write_keys


def standard(*arguments: object) -> int:
    """The exit code of the command `model_signing`, run in this process."""
    from model_signing._cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments]).exit_code


MODEL = "targets/cpu/x86-64-v3/aoti/model.pt2"


@dataclass(frozen=True)
class House:
    """A root certificate, an office that it certifies, and a signer that the office certifies."""

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
def release(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path, "release")


@dataclass(frozen=True)
class Signer:
    """How a bundle is signed: a key, perhaps with certificates, and the file that a host trusts."""

    private: Path
    trusted: Path
    chain: Sequence[Path] = ()
    command: tuple[str, str] = ("key", "--public_key")


@pytest.fixture(params=["key", "certificate"])
def signer(request: pytest.FixtureRequest) -> Signer:
    if request.param == "key":
        release: KeyPair = request.getfixturevalue("release")
        return Signer(release.private, release.public)
    house: House = request.getfixturevalue("house")
    command = ("certificate", "--certificate_chain")
    return Signer(house.ada.private, house.root.pem, house.chain, command)


@pytest.fixture
def signed(make_bundle: MakeBundle, release: KeyPair) -> Path:
    path = make_bundle()
    sign(Bundle.open(path), release.private)
    return path


@pytest.fixture
def certified(make_bundle: MakeBundle, house: House) -> Path:
    path = make_bundle()
    sign(Bundle.open(path), house.ada.private, chain=house.chain)
    return path


def refused(path: Path, *keys: Path) -> str:
    with pytest.raises(TrustError) as caught:
        require_signature(Bundle.open(path), [read_trusted(key) for key in keys])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_standard_command_agrees(make_bundle: MakeBundle, signer: Signer) -> None:
    path, (kind, option) = make_bundle(), signer.command
    bundle = Bundle.open(path)
    sign(bundle, signer.private, chain=signer.chain)
    write_note(path, PulledNote("jets/1", bundle.digest, "ada", "2026-01-01T00:00:00+00:00"))
    options = [f"--signature={path / 'bundle.sig'}", f"{option}={signer.trusted}"]

    assert standard("verify", kind, path, *options) == 0
    (path / MODEL).write_bytes(b"other")
    assert standard("verify", kind, path, *options) == 1


@pytest.mark.parametrize("change", ["altered", "taken out", "of another bundle"])
def test_changed_and_sealed_again(make_bundle: MakeBundle, signer: Signer, change: str) -> None:
    """Every digest is right then; only the signature shows the change."""
    path = make_bundle()
    sign(Bundle.open(path), signer.private, chain=signer.chain)
    if change == "altered":
        (path / MODEL).write_bytes(b"other weights")
    elif change == "taken out":
        (path / "reports/benchmark.json").unlink()
    else:
        shutil.copy(path / "bundle.sig", path := make_bundle(seed=1))
    seal(path)
    assert "not a signature of these files" in refused(path, signer.trusted)


def test_every_byte_of_the_signature_counts(make_bundle: MakeBundle, signer: Signer) -> None:
    """A changed byte is refused, unless it changes no meaning (white space, an unused name)."""
    path = make_bundle()
    sign(Bundle.open(path), signer.private, chain=signer.chain)
    content = (path / "bundle.sig").read_bytes()
    key = read_trusted(signer.trusted)
    refusals = 0
    for at in range(0, len(content), len(content) // 100):
        altered = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (path / "bundle.sig").write_bytes(altered)
        try:
            found = require_signature(Bundle.open(path), [key])
            assert found.fingerprint == key.fingerprint
        except TrustError:
            refusals += 1
    assert refusals > 70


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_signed_and_verified(
    make_bundle: MakeBundle, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    path, key = make_bundle(), make_keys(tmp_path, "release", curve)
    before = Bundle.open(path)
    made = sign(before, key.private)
    after = Bundle.open(path)  # a signature is allowed; the digest is the same
    assert after.digest == before.digest
    found = require_signature(after, [read_trusted(key.public)])
    assert found.fingerprint == made.fingerprint
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_a_signature_of_the_standard_command_is_taken(
    make_bundle: MakeBundle, tmp_path: Path, release: KeyPair
) -> None:
    path, signature = make_bundle(), ("--signature", tmp_path / "sig")
    assert standard("sign", "key", path, *signature, "--private_key", release.private) == 0
    shutil.copy(tmp_path / "sig", path / "bundle.sig")
    require_signature(Bundle.open(path), [read_trusted(release.public)])


def test_a_collector_that_came_between(
    make_bundle: MakeBundle, release: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file beside the folder is removed before it is renamed."""
    bundle = Bundle.open(make_bundle())
    replace = Path.replace

    def collected(path: Path, target: Path) -> Path:
        if path.suffix == ".sig":
            path.unlink()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", collected)
    with pytest.raises(TrustError, match="gc"):
        sign(bundle, release.private)
    monkeypatch.undo()
    sign(bundle, release.private)
    require_signature(bundle, [read_trusted(release.public)])


def test_unsigned(make_bundle: MakeBundle, release: KeyPair) -> None:
    assert "not signed; trusted keys: " in refused(make_bundle(), release.public)


def test_another_key(signed: Path, release: KeyPair, tmp_path: Path) -> None:
    other = make_keys(tmp_path, "other")
    said = refused(signed, other.public)
    assert read_trusted(release.public).fingerprint[:16] in said
    assert "none of those trusted" in said
    require_signature(Bundle.open(signed), [read_trusted(key.public) for key in (other, release)])


def test_forged_hint(signed: Path, release: KeyPair, tmp_path: Path) -> None:
    """A stranger signs, and names the release key as the signer."""
    genuine = json.loads((signed / "bundle.sig").read_text())
    sign(Bundle.open(signed), make_keys(tmp_path, "stranger").private)
    forged = json.loads((signed / "bundle.sig").read_text())
    forged["verificationMaterial"]["publicKey"] = genuine["verificationMaterial"]["publicKey"]
    (signed / "bundle.sig").write_text(json.dumps(forged))
    assert "not a signature of these files" in refused(signed, release.public)


def test_rewritten_statement(signed: Path, release: KeyPair) -> None:
    """The signature's list is changed to fit altered files; it was signed with the old list."""
    before = Bundle.open(signed).files[MODEL]
    (signed / MODEL).write_bytes(b"other weights")
    seal(signed)
    content = json.loads((signed / "bundle.sig").read_text())
    envelope = content["dsseEnvelope"]
    statement = base64.b64decode(envelope["payload"]).decode()
    assert before in statement
    changed = statement.replace(before, Bundle.open(signed).files[MODEL])
    envelope["payload"] = base64.b64encode(changed.encode()).decode()
    (signed / "bundle.sig").write_text(json.dumps(content))
    assert "not a signature of these files" in refused(signed, release.public)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a": 1'])
def test_no_signature_at_all(signed: Path, release: KeyPair, content: bytes) -> None:
    (signed / "bundle.sig").write_bytes(content)
    assert "bundle.sig is not a signature made with a key" in refused(signed, release.public)


def test_key_with_a_password(make_bundle: MakeBundle, tmp_path: Path) -> None:
    key = make_keys(tmp_path, "closed", password="open sesame")
    bundle = Bundle.open(make_bundle())
    for password, why in ((None, "needs a password"), ("wrong", "the password is wrong")):
        with pytest.raises(TrustError, match=why):
            sign(bundle, key.private, password)
    assert not (bundle.path / "bundle.sig").exists()
    sign(bundle, key.private, "open sesame")
    require_signature(bundle, [read_trusted(key.public)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate,
        lambda: ec.generate_private_key(ec.SECP256K1()),
    ],
    ids=["RSA", "Ed25519", "secp256k1"],
)
def test_keys_of_other_kinds(bundle: Bundle, tmp_path: Path, make: Callable[[], Any]) -> None:
    pair = write_keys(tmp_path, "odd", make())
    with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
        sign(bundle, pair.private)
    with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
        read_trusted(pair.public)


def test_a_key_in_place_of_the_other_one(bundle: Bundle, release: KeyPair) -> None:
    with pytest.raises(TrustError, match="this is a private key, the public one is needed"):
        read_trusted(release.private)
    with pytest.raises(TrustError, match="not a private key in PEM format"):
        sign(bundle, release.public)


def test_what_is_no_key(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="not a public key in PEM format"):
        trusted("nothing", "here")
    with pytest.raises(TrustError, match="nowhere: cannot be read"):
        sign(bundle, tmp_path / "nowhere")


def test_trusted_keys(tmp_path: Path, release: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    assert host_keys() is None
    key, other = read_trusted(release.public), make_keys(tmp_path, "other")
    one_path: tuple[str | Path, ...] = (release.public, str(release.public))
    for given in ([release.public], *one_path):
        assert [each.fingerprint for each in trusted_keys(given)] == [key.fingerprint]
    folder = tmp_path / "keys"
    folder.mkdir()
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(folder))
    with pytest.raises(TrustError, match=r"PIPELINE_TRUSTED_KEYS: there is no \*.pem"):
        host_keys()
    shutil.copy(release.public, folder)
    assert [each.fingerprint for each in host_keys() or ()] == [key.fingerprint]
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", f"{folder}:{other.public}")
    assert len(host_keys() or ()) == 2
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", "")
    with pytest.raises(TrustError, match="PIPELINE_TRUSTED_KEYS names no key"):
        host_keys()
    with pytest.raises(TrustError, match="trusted_keys names no key"):
        trusted_keys([])


@pytest.mark.parametrize("given", ["", [""]])
def test_an_empty_path_is_not_the_working_folder(
    given: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path, "release")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrustError, match="trusted_keys: an empty path"):
        trusted_keys(given)


# With a certificate


def test_the_root_vouches(certified: Path, house: House, tmp_path: Path) -> None:
    other = make_keys(tmp_path, "other").public
    keys = [read_trusted(path) for path in (other, house.root.pem)]
    assert not keys[0].is_root
    found = require_signature(Bundle.open(certified), keys)
    assert found.is_root
    assert keys[1].is_root
    assert (found.fingerprint, found.signer) == (keys[1].fingerprint, "CN=ada")
    assert "root " in str(found)


def test_straight_under_the_root(make_bundle: MakeBundle, house: House, tmp_path: Path) -> None:
    bob, path = certify(tmp_path, "bob", house.root), make_bundle()
    sign(Bundle.open(path), bob.private, chain=[bob.pem])
    found = require_signature(Bundle.open(path), [read_trusted(house.root.pem)])
    assert found.is_root
    assert found.signer == "CN=bob"


def test_another_root_does_not_vouch(certified: Path, tmp_path: Path) -> None:
    message = refused(certified, certify(tmp_path, "other", authority=True).pem)
    assert "by CN=ada under root " in message
    assert "no chain leads to such a root" in message


def test_a_trusted_key_does_not_make_a_certificate_valid(certified: Path, tmp_path: Path) -> None:
    key = make_keys(tmp_path, "release").public
    assert "signed with a certificate, of CN=ada, and no root certificate is trusted" in refused(
        certified, key
    )


def test_a_signer_and_a_root_with_the_same_names_are_not_certified(
    make_bundle: MakeBundle, house: House, tmp_path: Path
) -> None:
    true = tmp_path / "true.pem"
    true.write_text(read_trusted(house.root.pem).pem)
    path = make_bundle(seed=1)
    eve = certify(tmp_path, "ada", certify(tmp_path, "root", authority=True))
    sign(Bundle.open(path), eve.private, chain=[eve.pem])
    assert "no chain leads to such a root" in refused(path, true)


def test_a_chain_that_has_a_gap(make_bundle: MakeBundle, house: House) -> None:
    path = make_bundle()
    with pytest.raises(TrustError, match="its issuer, CN=office, is not in the chain"):
        sign(Bundle.open(path), house.ada.private, chain=[house.ada.pem, house.root.pem])
    assert not (path / "bundle.sig").exists()
    # The office may be a trusted root.
    sign(Bundle.open(path), house.ada.private, chain=[house.ada.pem])
    assert "no chain leads" in refused(path, house.root.pem)


def test_who_may_not_certify(make_bundle: MakeBundle, house: House, tmp_path: Path) -> None:
    """Ada's certificate allows her to sign, but not to certify others."""
    eve, path = certify(tmp_path, "eve", house.ada), make_bundle()
    chain = [eve.pem, house.ada.pem, house.office.pem]
    sign(Bundle.open(path), eve.private, chain=chain)
    assert "no chain leads to such a root" in refused(path, house.root.pem)


def test_another_certificate_in_the_signature(
    certified: Path, house: House, tmp_path: Path
) -> None:
    """Ada signs, and the certificate in the signature is Bob's."""
    bob = certify(tmp_path, "bob", house.office)
    data = json.loads((certified / "bundle.sig").read_text())
    from cryptography.hazmat.primitives import serialization

    content = bob.certificate.public_bytes(serialization.Encoding.DER)
    chain = data["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain[0]["rawBytes"] = base64.b64encode(content).decode()
    (certified / "bundle.sig").write_text(json.dumps(data))
    assert "by CN=bob under" in refused(certified, house.root.pem)


def test_it_has_run_out_since(make_bundle: MakeBundle, tmp_path: Path, house: House) -> None:
    """As in docs/howto/signing.md, only the time from which the certificate is valid counts."""
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
    with pytest.raises(TrustError, match="2 certificates: give the signer's alone"):
        sign(bundle, house.ada.private, chain=[both])
    assert not (bundle.path / "bundle.sig").exists()


def test_what_cannot_be_trusted(house: House, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="not a root: the certificate of CN=office was issued"):
        read_trusted(house.office.pem)
    both = tmp_path / "both.pem"
    both.write_bytes(house.root.pem.read_bytes() * 2)
    with pytest.raises(TrustError, match="2 certificates: the file of a trusted root has only"):
        read_trusted(both)
    both.write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    with pytest.raises(TrustError, match="not a certificate in PEM format"):
        read_trusted(both)


def test_a_folder_of_keys_and_roots(
    registry: Registry,
    certified: Path,
    house: House,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    shutil.copy(house.root.pem, folder)
    shutil.copy(make_keys(tmp_path, "release").public, folder)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(folder))
    keys = host_keys()
    assert keys is not None
    assert len(keys) == 2
    version = registry.register(Bundle.open(certified))
    found = registry.require_signature(version, registry.open(version), keys)
    assert found.fingerprint == read_trusted(house.root.pem).fingerprint
    bob = certify(tmp_path, "bob", house.office)
    registry.sign(version, bob.private, chain=[bob.pem, house.office.pem])
    found = registry.require_signature(version, registry.open(version), keys)
    assert found.is_root
    assert found.signer == "CN=bob"
