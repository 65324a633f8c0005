"""Signatures with a key alone and with a certificate: which are accepted, and for which files."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from registry import Bundle, Registry, TrustError, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.trust import (
    Trusted,
    host_keys,
    parse_trusted,
    read_trusted,
    require_signature,
    sign,
    trusted_keys,
)
from tests.models.authorities import TODAY, Certified, certify
from tests.models.bundles import MakeBundle
from tests.models.keys import KeyPair, make_keys, write_keys


def standard(*arguments: object) -> int:
    """The exit code of the command `model_signing`, run in this process."""
    from model_signing._cli import main  # test_oci imports this file, perhaps without the library

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
        """The certificates that Ada gives when she signs."""
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
    """A bundle signed with the key `release`."""
    path = make_bundle()
    sign(Bundle.open(path), release.private)
    return path


@pytest.fixture
def certified(make_bundle: MakeBundle, house: House) -> Path:
    """A bundle that Ada signed with her certificate."""
    path = make_bundle()
    sign(Bundle.open(path), house.ada.private, chain=house.chain)
    return path


def refusal(path: Path, *keys: Path) -> str:
    """The message, of one line, with which the signature is refused by those who trust the keys."""
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


def alter_a_file(bundle: Path) -> None:
    (bundle / MODEL).write_bytes(b"other weights")


def remove_a_file(bundle: Path) -> None:
    (bundle / "reports/benchmark.json").unlink()


@pytest.mark.parametrize("change", [alter_a_file, remove_a_file])
def test_a_bundle_that_was_changed_and_sealed_again_is_refused(
    make_bundle: MakeBundle, signer: Signer, change: Callable[[Path], None]
) -> None:
    """Every digest is right then; only the signature shows the change."""
    path = make_bundle()
    sign(Bundle.open(path), signer.private, chain=signer.chain)
    change(path)
    seal(path)
    assert "not a signature of these files" in refusal(path, signer.trusted)


def test_the_signature_of_another_bundle_is_refused(
    make_bundle: MakeBundle, signer: Signer
) -> None:
    path, other = make_bundle(), make_bundle(seed=1)
    sign(Bundle.open(path), signer.private, chain=signer.chain)
    shutil.copy(path / "bundle.sig", other)
    assert "not a signature of these files" in refusal(other, signer.trusted)


def test_every_byte_of_the_signature_counts(make_bundle: MakeBundle, signer: Signer) -> None:
    """A changed byte is refused, unless it changes no meaning (white space, an unused name)."""
    path = make_bundle()
    sign(Bundle.open(path), signer.private, chain=signer.chain)
    content = (path / "bundle.sig").read_bytes()
    key = read_trusted(signer.trusted)
    refusals = 0
    for offset in range(0, len(content), len(content) // 100):
        altered = bytearray(content)
        altered[offset] ^= 1
        (path / "bundle.sig").write_bytes(altered)
        try:
            accepted = require_signature(Bundle.open(path), [key])
        except TrustError:
            refusals += 1
        else:
            assert accepted.fingerprint == key.fingerprint
    assert refusals > 70  # of about 100


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_a_bundle_is_signed_and_verified(
    make_bundle: MakeBundle, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    path, key = make_bundle(), make_keys(tmp_path, "release", curve)
    before = Bundle.open(path)
    signature = sign(before, key.private)
    after = Bundle.open(path)  # a signature is allowed; the digest is the same
    assert after.digest == before.digest
    accepted = require_signature(after, [read_trusted(key.public)])
    assert accepted.fingerprint == signature.fingerprint
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_a_signature_of_the_standard_command_is_taken(
    make_bundle: MakeBundle, tmp_path: Path, release: KeyPair
) -> None:
    path, signature = make_bundle(), ("--signature", tmp_path / "sig")
    assert standard("sign", "key", path, *signature, "--private_key", release.private) == 0
    shutil.copy(tmp_path / "sig", path / "bundle.sig")
    require_signature(Bundle.open(path), [read_trusted(release.public)])


def test_a_signature_whose_file_a_collector_removed_can_be_made_again(
    make_bundle: MakeBundle, release: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file beside the folder is removed before it is renamed."""
    bundle = Bundle.open(make_bundle())
    replace = Path.replace

    def replace_what_was_collected(path: Path, target: Path) -> Path:
        if path.suffix == ".sig":
            path.unlink()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_what_was_collected)
    with pytest.raises(TrustError, match="gc"):
        sign(bundle, release.private)
    monkeypatch.undo()
    sign(bundle, release.private)
    require_signature(bundle, [read_trusted(release.public)])


def test_an_unsigned_bundle_is_refused(make_bundle: MakeBundle, release: KeyPair) -> None:
    assert "not signed; trusted keys: " in refusal(make_bundle(), release.public)


def test_a_signature_with_another_key_is_refused(
    signed: Path, release: KeyPair, tmp_path: Path
) -> None:
    message = refusal(signed, make_keys(tmp_path, "other").public)
    assert read_trusted(release.public).fingerprint[:16] in message
    assert "none of those trusted" in message


def test_any_of_several_trusted_keys_may_have_signed(
    signed: Path, release: KeyPair, tmp_path: Path
) -> None:
    keys = [read_trusted(pair.public) for pair in (make_keys(tmp_path, "other"), release)]
    assert require_signature(Bundle.open(signed), keys).fingerprint == keys[1].fingerprint


def test_a_signature_that_names_a_key_with_which_it_was_not_made_is_refused(
    signed: Path, release: KeyPair, tmp_path: Path
) -> None:
    """A stranger signs, and names the release key as the signer."""
    genuine = json.loads((signed / "bundle.sig").read_text())
    sign(Bundle.open(signed), make_keys(tmp_path, "stranger").private)
    forged = json.loads((signed / "bundle.sig").read_text())
    forged["verificationMaterial"]["publicKey"] = genuine["verificationMaterial"]["publicKey"]
    (signed / "bundle.sig").write_text(json.dumps(forged))
    assert "not a signature of these files" in refusal(signed, release.public)


def test_a_signature_with_a_rewritten_list_of_files_is_refused(
    signed: Path, release: KeyPair
) -> None:
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
    assert "not a signature of these files" in refusal(signed, release.public)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a": 1'],
    ids=["empty", "no fields", "not UTF-8", "deep", "cut off"],
)
def test_a_file_that_is_no_signature_is_refused(
    signed: Path, release: KeyPair, content: bytes
) -> None:
    (signed / "bundle.sig").write_bytes(content)
    assert "bundle.sig is not a signature made with a key" in refusal(signed, release.public)


@pytest.fixture
def closed(tmp_path: Path) -> KeyPair:
    """A key with a password."""
    return make_keys(tmp_path, "closed", password="open sesame")


@pytest.mark.parametrize(
    ("password", "message"), [(None, "needs a password"), ("wrong", "the password is wrong")]
)
def test_a_key_with_a_password_does_not_sign_without_it(
    bundle: Bundle, closed: KeyPair, password: str | None, message: str
) -> None:
    with pytest.raises(TrustError, match=message):
        sign(bundle, closed.private, password)
    assert not (bundle.path / "bundle.sig").exists()


def test_a_key_with_a_password_signs_with_it(bundle: Bundle, closed: KeyPair) -> None:
    sign(bundle, closed.private, "open sesame")
    key = read_trusted(closed.public)
    assert require_signature(bundle, [key]).fingerprint == key.fingerprint


@pytest.mark.parametrize(
    "make",
    [
        lambda: rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate,
        lambda: ec.generate_private_key(ec.SECP256K1()),
    ],
    ids=["RSA", "Ed25519", "secp256k1"],
)
def test_a_key_of_another_kind_is_refused(
    bundle: Bundle, tmp_path: Path, make: Callable[[], Any]
) -> None:
    pair = write_keys(tmp_path, "odd", make())
    with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
        sign(bundle, pair.private)
    with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
        read_trusted(pair.public)


def test_a_private_key_is_not_trusted(release: KeyPair) -> None:
    with pytest.raises(TrustError, match="this is a private key, the public one is needed"):
        read_trusted(release.private)


def test_a_public_key_does_not_sign(bundle: Bundle, release: KeyPair) -> None:
    with pytest.raises(TrustError, match="not a private key in PEM format"):
        sign(bundle, release.public)


def test_text_that_is_no_key_is_not_trusted() -> None:
    with pytest.raises(TrustError, match="not a public key in PEM format"):
        parse_trusted("nothing", "here")


def test_a_missing_key_does_not_sign(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="nowhere: cannot be read"):
        sign(bundle, tmp_path / "nowhere")


def fingerprints(keys: Iterable[Trusted] | None) -> list[str]:
    return [key.fingerprint for key in keys or ()]


@pytest.mark.parametrize(
    "form", [lambda path: [path], lambda path: path, str], ids=["list", "path", "text"]
)
def test_trusted_keys_are_a_path_or_several(
    release: KeyPair, form: Callable[[Path], str | Path | list[Path]]
) -> None:
    key = read_trusted(release.public)
    assert fingerprints(trusted_keys(form(release.public))) == [key.fingerprint]


def test_without_its_variable_a_host_asks_for_no_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    assert host_keys() is None


def test_a_host_trusts_the_keys_of_its_folders_and_files(
    tmp_path: Path, release: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "keys", make_keys(tmp_path, "other").public
    folder.mkdir()
    shutil.copy(release.public, folder)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", f"{folder}:{other}")
    expected = [read_trusted(path).fingerprint for path in (release.public, other)]
    assert fingerprints(host_keys()) == expected


def test_a_folder_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").mkdir()
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(tmp_path / "keys"))
    with pytest.raises(TrustError, match=r"PIPELINE_TRUSTED_KEYS: there is no \*.pem"):
        host_keys()


def test_an_empty_variable_trusts_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", "")
    with pytest.raises(TrustError, match="PIPELINE_TRUSTED_KEYS names no key"):
        host_keys()


def test_an_empty_list_trusts_no_key() -> None:
    with pytest.raises(TrustError, match="trusted_keys names no key"):
        trusted_keys([])


@pytest.mark.parametrize("paths", ["", [""]])
def test_an_empty_path_is_not_the_working_folder(
    paths: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path, "release")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrustError, match="trusted_keys: an empty path"):
        trusted_keys(paths)


# With a certificate


def test_a_signature_is_accepted_by_the_root_of_its_certificate(
    certified: Path, house: House, tmp_path: Path
) -> None:
    key, root = (
        read_trusted(path) for path in (make_keys(tmp_path, "other").public, house.root.pem)
    )
    assert (key.is_root, root.is_root) == (False, True)
    accepted = require_signature(Bundle.open(certified), [key, root])
    assert accepted.is_root
    assert (accepted.fingerprint, accepted.signer) == (root.fingerprint, "CN=ada")
    assert "root " in str(accepted)


def test_a_signer_may_be_certified_by_the_root_itself(
    make_bundle: MakeBundle, house: House, tmp_path: Path
) -> None:
    bob, path = certify(tmp_path, "bob", house.root), make_bundle()
    sign(Bundle.open(path), bob.private, chain=[bob.pem])
    accepted = require_signature(Bundle.open(path), [read_trusted(house.root.pem)])
    assert accepted.is_root
    assert accepted.signer == "CN=bob"


def test_another_root_does_not_vouch(certified: Path, tmp_path: Path) -> None:
    message = refusal(certified, certify(tmp_path, "other", authority=True).pem)
    assert "by CN=ada under root " in message
    assert "no chain leads to such a root" in message


def test_a_trusted_key_does_not_make_a_certificate_valid(certified: Path, tmp_path: Path) -> None:
    key = make_keys(tmp_path, "release").public
    assert "signed with a certificate, of CN=ada, and no root certificate is trusted" in refusal(
        certified, key
    )


def test_a_signer_and_a_root_with_the_same_names_are_not_certified(
    make_bundle: MakeBundle, house: House, tmp_path: Path
) -> None:
    true_root = tmp_path / "true.pem"
    true_root.write_text(read_trusted(house.root.pem).pem)  # `root.pem` is overwritten below
    path = make_bundle(seed=1)
    eve = certify(tmp_path, "ada", certify(tmp_path, "root", authority=True))
    sign(Bundle.open(path), eve.private, chain=[eve.pem])
    assert "no chain leads to such a root" in refusal(path, true_root)


def test_a_chain_with_a_gap_does_not_sign(bundle: Bundle, house: House) -> None:
    with pytest.raises(TrustError, match="its issuer, CN=office, is not in the chain"):
        sign(bundle, house.ada.private, chain=[house.ada.pem, house.root.pem])
    assert not (bundle.path / "bundle.sig").exists()


def test_a_chain_that_ends_below_the_root_is_refused(bundle: Bundle, house: House) -> None:
    """It can be signed with: the office may be a trusted root elsewhere."""
    sign(bundle, house.ada.private, chain=[house.ada.pem])
    assert "no chain leads" in refusal(bundle.path, house.root.pem)


def test_a_signer_may_not_certify_others(
    make_bundle: MakeBundle, house: House, tmp_path: Path
) -> None:
    """Ada's certificate allows her to sign, but not to certify others."""
    eve, path = certify(tmp_path, "eve", house.ada), make_bundle()
    chain = [eve.pem, house.ada.pem, house.office.pem]
    sign(Bundle.open(path), eve.private, chain=chain)
    assert "no chain leads to such a root" in refusal(path, house.root.pem)


def test_another_certificate_in_the_signature_is_refused(
    certified: Path, house: House, tmp_path: Path
) -> None:
    """Ada signs, and the certificate in the signature is Bob's."""
    bob = certify(tmp_path, "bob", house.office)
    data = json.loads((certified / "bundle.sig").read_text())
    content = bob.certificate.public_bytes(serialization.Encoding.DER)
    chain = data["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain[0]["rawBytes"] = base64.b64encode(content).decode()
    (certified / "bundle.sig").write_text(json.dumps(data))
    assert "by CN=bob under" in refusal(certified, house.root.pem)


def test_a_certificate_that_has_run_out_since_is_accepted(
    bundle: Bundle, tmp_path: Path, house: House
) -> None:
    """As in docs/howto/signing.md, only the time from which the certificate is valid counts."""
    old = certify(tmp_path, "old", house.office, days=1)
    sign(bundle, old.private, chain=[old.pem, house.office.pem])
    root = read_trusted(house.root.pem)
    assert require_signature(bundle, [root]).signer == "CN=old"


def test_a_certificate_that_began_before_that_of_its_issuer_is_refused(
    bundle: Bundle, tmp_path: Path, house: House
) -> None:
    early = certify(tmp_path, "early", house.office, began=TODAY - timedelta(days=9))
    sign(bundle, early.private, chain=[early.pem, house.office.pem])
    assert "no chain leads" in refusal(bundle.path, house.root.pem)


def require_no_signature(
    message: str, bundle: Bundle, key: Path, chain: Sequence[Path], password: str | None = None
) -> None:
    """Checks that the bundle cannot be signed so, and stays unsigned."""
    with pytest.raises(TrustError, match=message):
        sign(bundle, key, password, chain)
    assert not (bundle.path / "bundle.sig").exists()


def test_a_certificate_for_another_use_does_not_sign(
    bundle: Bundle, house: House, tmp_path: Path
) -> None:
    tls = certify(tmp_path, "tls", house.office, may_sign=False)
    require_no_signature("not for signing: it needs the key usage", bundle, tls.private, [tls.pem])


def test_the_key_of_another_certificate_does_not_sign(bundle: Bundle, house: House) -> None:
    message = r"certificate of another key \(CN=ada\)"
    require_no_signature(message, bundle, house.office.private, house.chain)


def test_a_key_in_place_of_a_certificate_does_not_sign(bundle: Bundle, house: House) -> None:
    message = "not a certificate in PEM format"
    require_no_signature(message, bundle, house.ada.private, [house.ada.private])


def test_a_missing_certificate_does_not_sign(bundle: Bundle, house: House, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    require_no_signature("nothing: cannot be read", bundle, house.ada.private, [missing])


def test_a_key_with_a_password_signs_without_a_certificate_only(
    bundle: Bundle, house: House, closed: KeyPair
) -> None:
    message = "model-signing takes no password"
    require_no_signature(message, bundle, closed.private, house.chain, "open sesame")


def test_a_file_of_two_certificates_does_not_sign(
    bundle: Bundle, house: House, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(house.ada.pem.read_bytes() + house.office.pem.read_bytes())
    message = "2 certificates: give the signer's alone"
    require_no_signature(message, bundle, house.ada.private, [both])


def test_a_certificate_that_others_issued_is_no_root(house: House) -> None:
    with pytest.raises(TrustError, match="not a root: the certificate of CN=office was issued"):
        read_trusted(house.office.pem)


def test_a_file_of_two_roots_is_not_trusted(house: House, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(house.root.pem.read_bytes() * 2)
    with pytest.raises(TrustError, match="2 certificates: the file of a trusted root has only"):
        read_trusted(both)


def test_a_damaged_certificate_is_not_trusted(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    with pytest.raises(TrustError, match="not a certificate in PEM format"):
        read_trusted(damaged)


@pytest.fixture
def trusted_folder(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host trusts a root certificate and a key."""
    folder = tmp_path / "trusted"
    folder.mkdir()
    shutil.copy(house.root.pem, folder)
    shutil.copy(make_keys(tmp_path, "release").public, folder)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(folder))


@pytest.mark.usefixtures("trusted_folder")
def test_a_host_trusts_keys_and_roots(registry: Registry, certified: Path, house: House) -> None:
    keys = host_keys() or ()
    assert len(keys) == 2
    version = registry.register(Bundle.open(certified))
    accepted = registry.require_signature(version, registry.open(version), keys)
    assert accepted.fingerprint == read_trusted(house.root.pem).fingerprint


@pytest.mark.usefixtures("trusted_folder")
def test_a_version_is_signed_again_by_another_signer_of_the_root(
    registry: Registry, certified: Path, house: House, tmp_path: Path
) -> None:
    version = registry.register(Bundle.open(certified))
    bob = certify(tmp_path, "bob", house.office)
    registry.sign(version, bob.private, chain=[bob.pem, house.office.pem])
    accepted = registry.require_signature(version, registry.open(version), host_keys() or ())
    assert accepted.is_root
    assert accepted.signer == "CN=bob"
