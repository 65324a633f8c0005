from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from registry import Bundle, Registry, TrustError, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.trust import (
    host_keys,
    read_trusted,
    require_signature,
    sign,
    trusted,
    trusted_keys,
)
from tests.models.keys import KeyPair, make_keys, write_keys

MakeBundle = Callable[..., Path]
STANDARD = (sys.executable, "-m", "model_signing")
MODEL = "targets/cpu/x86-64-v3/aoti/model.pt2"


@pytest.fixture
def release(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path, "release")


@pytest.fixture
def signed(make_bundle: MakeBundle, release: KeyPair) -> Path:
    path = make_bundle()
    sign(Bundle.open(path), release.private)
    return path


def refused(path: Path, *keys: KeyPair) -> str:
    with pytest.raises(TrustError) as caught:
        require_signature(Bundle.open(path), [read_trusted(key.public) for key in keys])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_signed_and_verified(
    make_bundle: MakeBundle, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    path, key = make_bundle(), make_keys(tmp_path, "release", curve)
    before = Bundle.open(path)
    made = sign(before, key.private)
    after = Bundle.open(path)  # one more file is allowed, and the identity is the same
    assert after.digest == before.digest
    found = require_signature(after, [read_trusted(key.public)])
    assert found.fingerprint == made.fingerprint
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_the_standard_command_agrees(signed: Path, release: KeyPair) -> None:
    bundle = Bundle.open(signed)
    write_note(signed, PulledNote("jets/1", bundle.digest, "ada", "2026-01-01T00:00:00+00:00"))

    signature = ("--signature", signed / "bundle.sig")

    def verify() -> int:
        return subprocess.run(
            [*STANDARD, "verify", "key", signed, *signature, "--public_key", release.public],
            capture_output=True,
        ).returncode

    assert verify() == 0
    (signed / MODEL).write_bytes(b"other")
    assert verify() != 0


def test_a_signature_of_the_standard_command_is_taken(
    make_bundle: MakeBundle, tmp_path: Path, release: KeyPair
) -> None:
    path, signature = make_bundle(), ("--signature", tmp_path / "sig")
    subprocess.run(
        [*STANDARD, "sign", "key", path, *signature, "--private_key", release.private],
        check=True,
        capture_output=True,
    )
    shutil.copy(tmp_path / "sig", path / "bundle.sig")
    require_signature(Bundle.open(path), [read_trusted(release.public)])


def test_unsigned(make_bundle: MakeBundle, release: KeyPair) -> None:
    assert "not signed; trusted keys: " in refused(make_bundle(), release)


def test_another_key(signed: Path, release: KeyPair, tmp_path: Path) -> None:
    other = make_keys(tmp_path, "other")
    said = refused(signed, other)
    assert read_trusted(release.public).fingerprint[:16] in said
    assert "none of those trusted" in said
    require_signature(Bundle.open(signed), [read_trusted(key.public) for key in (other, release)])


@pytest.mark.parametrize("change", ["altered", "taken out"])
def test_changed_and_sealed_again(signed: Path, release: KeyPair, change: str) -> None:
    """Every digest is right then, and only the signature tells."""
    if change == "altered":
        (signed / MODEL).write_bytes(b"other weights")
    else:
        (signed / "reports/benchmark.json").unlink()
    seal(signed)
    assert "not a signature of these files" in refused(signed, release)


def test_signature_of_another_bundle(
    signed: Path, make_bundle: MakeBundle, release: KeyPair
) -> None:
    other = make_bundle(seed=1)
    shutil.copy(signed / "bundle.sig", other / "bundle.sig")
    assert "not a signature of these files" in refused(other, release)


def test_forged_hint(signed: Path, release: KeyPair, tmp_path: Path) -> None:
    """Signed by a stranger, who writes that the release key did it."""
    genuine = json.loads((signed / "bundle.sig").read_text())
    sign(Bundle.open(signed), make_keys(tmp_path, "stranger").private)
    forged = json.loads((signed / "bundle.sig").read_text())
    forged["verificationMaterial"]["publicKey"] = genuine["verificationMaterial"]["publicKey"]
    (signed / "bundle.sig").write_text(json.dumps(forged))
    assert "not a signature of these files" in refused(signed, release)


def test_rewritten_statement(signed: Path, release: KeyPair) -> None:
    """The listing inside is made to fit altered files; the signature is over the old one."""
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
    assert "not a signature of these files" in refused(signed, release)


def test_every_byte_of_the_signature_counts(signed: Path, release: KeyPair) -> None:
    """Changed anywhere, it is refused, or still says the same: white space, a name nobody reads."""
    content = (signed / "bundle.sig").read_bytes()
    keys = [read_trusted(release.public)]
    refusals = 0
    for at in range(0, len(content), len(content) // 150):
        (signed / "bundle.sig").write_bytes(
            content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        )
        bundle = Bundle.open(signed)
        try:
            assert require_signature(bundle, keys) == keys[0]
        except TrustError:
            refusals += 1
    assert refusals > 130


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a": 1'])
def test_no_signature_at_all(signed: Path, release: KeyPair, content: bytes) -> None:
    (signed / "bundle.sig").write_bytes(content)
    assert "bundle.sig is not a signature made with a key" in refused(signed, release)


def test_key_with_a_password(make_bundle: MakeBundle, tmp_path: Path) -> None:
    key = make_keys(tmp_path, "closed", password="open sesame")
    bundle = Bundle.open(make_bundle())
    for password, why in ((None, "needs a password"), ("wrong", "the password is wrong")):
        with pytest.raises(TrustError, match=why):
            sign(bundle, key.private, password)
    assert not (bundle.path / "bundle.sig").exists()
    sign(bundle, key.private, "open sesame")
    require_signature(bundle, [read_trusted(key.public)])


def test_keys_of_other_kinds(bundle: Bundle, tmp_path: Path, release: KeyPair) -> None:
    for key in (
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
        ec.generate_private_key(ec.SECP256K1()),
    ):
        pair = write_keys(tmp_path, "odd", key)
        with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
            sign(bundle, pair.private)
        with pytest.raises(TrustError, match="not an EC key on P-256, P-384 or P-521"):
            read_trusted(pair.public)
    with pytest.raises(TrustError, match="this is a private key, the public one is needed"):
        read_trusted(release.private)
    with pytest.raises(TrustError, match="not a private key in PEM format"):
        sign(bundle, release.public)
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


def test_a_version_signed_in_place(
    registry: Registry, bundle: Bundle, release: KeyPair, tmp_path: Path
) -> None:
    version = registry.register(bundle)
    keys = [read_trusted(release.public)]
    with pytest.raises(TrustError, match="not signed"):
        registry.require_signature(version, registry.open(version), keys)
    registry.sign(version, release.private)
    assert registry.require_signature(version, registry.open(version), keys) == keys[0]
    assert require_signature(registry.fetch(version, tmp_path / "fetched"), keys) == keys[0]
