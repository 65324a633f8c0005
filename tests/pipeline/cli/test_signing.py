"""`pipeline sign`, how `check` and `verify` judge a signature, and the gate for `signed_by`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_policy
from pipeline.promotion.promoting import promote
from registry.bundle.bundle import Bundle
from registry.errors import RegistryError
from registry.store.registry import Registry
from registry.trust import read_trusted
from tests.models import bundles
from tests.models.authorities import certify
from tests.models.keys import KeyPair, make_keys
from tests.models.project import answer, cli, refusal


@pytest.fixture
def release(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path, "release")


@pytest.fixture
def one(empty: Registry, tmp_path: Path) -> Registry:
    """A registry with jets/1, for a device that this host lacks."""
    bundles.write_bundle(tmp_path / "jets", bundles.elsewhere())
    empty.register(Bundle.open(tmp_path / "jets"))
    return empty


def signature_gate(registry: Registry, alias: str = "production", **more: Any) -> list[bool]:
    """Whether the signature gate passes; empty if it is not asked."""
    excused = frozenset({bundles.FAR})
    found = promote(registry, "jets/1", alias, allow_unverified=excused, dry_run=True, **more)
    return [decision.passed for decision in found.decisions if decision.gate == "signature"]


def test_folder(one: Registry, release: KeyPair, tmp_path: Path) -> None:
    folder = tmp_path / "jets"
    verify = ("verify", folder, "--key", release.public)
    assert "not signed" in refusal(*verify)
    assert "is signed" in cli("sign", folder, "--key", release.private).stdout
    assert "is signed by" in cli(*verify).stdout
    (folder / "program.pt2").write_bytes(b"other")
    assert "truncated or altered" in refusal(*verify)


def test_version(
    one: Registry, release: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--registry", one.uri)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(release.public))
    assert "not signed" in refusal("verify", "jets/1", *where)
    said = answer("sign", "jets/1", "--key", release.private, registry=one)
    assert said["key"] == read_trusted(release.public).fingerprint
    assert answer("verify", "jets/1", registry=one) == said
    cli("pull", "jets/1", tmp_path / "pulled", *where)
    assert "is signed by" in cli("verify", tmp_path / "pulled").stdout


def checked(registry: Registry, *more: object) -> Any:
    """The answer of `check`. It exits with 1, since no artifact is for this host."""
    return answer("check", "jets/1", *more, registry=registry, code=1)


def test_check_refuses_a_version_without_a_signature(one: Registry, release: KeyPair) -> None:
    said = refusal("check", "jets/1", "--key", release.public, "--registry", one.uri)
    assert "not signed" in said


def test_check_names_the_key_that_signed(one: Registry, release: KeyPair) -> None:
    one.sign(one.find("jets/1"), release.private)
    said = checked(one, "--key", release.public)
    assert said["signature"]["key"] == read_trusted(release.public).fingerprint
    assert said["artifacts"] == {}


def test_check_without_trusted_keys_says_nothing_of_a_signature(
    one: Registry, release: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    one.sign(one.find("jets/1"), release.private)
    assert "signature" not in checked(one)


def test_nobody_to_trust(one: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    assert "whose signature?" in cli("verify", "jets/1", "--registry", one.uri, code=2).stderr


def test_password(one: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = make_keys(tmp_path, "closed", password="sesame")
    command = ("sign", tmp_path / "jets", "--key", closed.private)
    assert "needs a password" in refusal(*command)
    monkeypatch.setenv("PIPELINE_SIGNING_PASSWORD", "sesame")
    cli(*command)


def test_the_gate(one: Registry, release: KeyPair, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("signed_by: [release.pem]\n")
    one.set_policy(load_policy(tmp_path / "policy.yaml").policy)
    assert signature_gate(one, "staging") == []
    assert signature_gate(one) == [False]
    with pytest.raises(RegistryError, match="'signature' cannot be overridden"):
        signature_gate(one, override=frozenset({"signature"}), reason="hurry")
    one.sign(one.find("jets/1"), make_keys(tmp_path, "other").private)
    assert signature_gate(one) == [False]
    one.sign(one.find("jets/1"), release.private)
    assert signature_gate(one) == [True]
    # Each of two policies needs a signature by one of its own keys.
    (tmp_path / "other.yaml").write_text("signed_by: [other.pem]\n")
    assert signature_gate(one, policy=tmp_path / "other.yaml") == [False]


def test_with_a_certificate(one: Registry, tmp_path: Path) -> None:
    root = certify(tmp_path, "root", authority=True)
    ada = certify(tmp_path, "ada", root)
    where = ("--registry", one.uri)
    signed = cli("sign", "jets/1", "--key", ada.private, "--certificate", ada.pem, *where).stdout
    assert signed.startswith("jets/1 is signed; the key is ")
    said = cli("verify", "jets/1", "--root", root.pem, *where).stdout
    assert said.startswith("jets/1 is signed by CN=ada, certified by root ")
    assert answer("verify", "jets/1", "--key", root.pem, registry=one)["signer"] == "CN=ada"
    other = make_keys(tmp_path, "other")
    assert "no root certificate is trusted" in refusal(
        "verify", "jets/1", "--key", other.public, *where
    )
    chain = ("--chain", root.pem)
    assert "--chain goes with" in cli("sign", "jets/1", "--key", ada.private, *chain, code=2).stderr

    # A policy may name a root certificate.
    (tmp_path / "policy.yaml").write_text("signed_by: [root.crt.pem]\n")
    asked = load_policy(tmp_path / "policy.yaml")
    assert asked.policy.signed_by == (root.pem.read_text(),)
    assert signature_gate(one, policy=tmp_path / "policy.yaml") == [True]
    one.sign(one.find("jets/1"), other.private)
    assert signature_gate(one, policy=tmp_path / "policy.yaml") == [False]
