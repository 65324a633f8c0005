"""`pipeline sign`, how `check` and `verify` judge a signature, and the gate for `signed_by`."""

from __future__ import annotations

from dataclasses import dataclass
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
from tests.models.authorities import Certified, certify
from tests.models.keys import KeyPair, make_keys
from tests.models.project import answer, cli, refusal


@pytest.fixture
def release(tmp_path: Path) -> KeyPair:
    """The keys release.pem and its private part, in the test's folder."""
    return make_keys(tmp_path, "release")


@pytest.fixture
def store(empty: Registry, tmp_path: Path) -> Registry:
    """A registry with jets/1, for a device that this host lacks."""
    bundles.write_bundle(tmp_path / "jets", bundles.elsewhere())
    empty.register(Bundle.open(tmp_path / "jets"))
    return empty


def signature_gate(registry: Registry, alias: str = "production", **options: Any) -> list[bool]:
    """Whether the signature gate passes; empty if it is not asked."""
    excused = frozenset({bundles.FAR})
    assessment = promote(
        registry, "jets/1", alias, allow_unverified=excused, dry_run=True, **options
    )
    return [decision.passed for decision in assessment.decisions if decision.gate == "signature"]


def test_a_folder_is_signed_and_verified(store: Registry, release: KeyPair, tmp_path: Path) -> None:
    folder = tmp_path / "jets"
    verify = ("verify", folder, "--key", release.public)
    assert "not signed" in refusal(*verify)
    assert "is signed" in cli("sign", folder, "--key", release.private).stdout
    assert "is signed by" in cli(*verify).stdout


def test_a_signed_folder_that_was_altered_is_refused(
    store: Registry, release: KeyPair, tmp_path: Path
) -> None:
    folder = tmp_path / "jets"
    cli("sign", folder, "--key", release.private)
    (folder / "program.pt2").write_bytes(b"other")
    assert "truncated or altered" in refusal("verify", folder, "--key", release.public)


@pytest.fixture
def trusted(store: Registry, release: KeyPair, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, on a host that trusts the key."""
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(release.public))
    return store


def test_a_version_is_signed_and_verified(trusted: Registry, release: KeyPair) -> None:
    assert "not signed" in refusal("verify", "jets/1", "--registry", trusted.uri)
    signature = answer("sign", "jets/1", "--key", release.private, registry=trusted)
    assert signature["key"] == read_trusted(release.public).fingerprint
    assert answer("verify", "jets/1", registry=trusted) == signature


def test_a_pulled_version_has_its_signature(
    trusted: Registry, release: KeyPair, tmp_path: Path
) -> None:
    trusted.sign(trusted.find("jets/1"), release.private)
    cli("pull", "jets/1", tmp_path / "pulled", "--registry", trusted.uri)
    assert "is signed by" in cli("verify", tmp_path / "pulled").stdout


def checked(registry: Registry, *options: object) -> Any:
    """The answer of `check`. It exits with 1, since no artifact is for this host."""
    return answer("check", "jets/1", *options, registry=registry, code=1)


def test_check_refuses_a_version_without_a_signature(store: Registry, release: KeyPair) -> None:
    message = refusal("check", "jets/1", "--key", release.public, "--registry", store.uri)
    assert "not signed" in message


def test_check_names_the_key_that_signed(store: Registry, release: KeyPair) -> None:
    store.sign(store.find("jets/1"), release.private)
    report = checked(store, "--key", release.public)
    assert report["signature"]["key"] == read_trusted(release.public).fingerprint
    assert report["artifacts"] == {}


def test_check_without_trusted_keys_says_nothing_of_a_signature(
    store: Registry, release: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    store.sign(store.find("jets/1"), release.private)
    assert "signature" not in checked(store)


def test_verify_without_a_trusted_key_is_refused(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_TRUSTED_KEYS", raising=False)
    assert "whose signature?" in cli("verify", "jets/1", "--registry", store.uri, code=2).stderr


def test_a_key_with_a_password_takes_it_from_the_environment(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted = make_keys(tmp_path, "closed", password="sesame")
    command = ("sign", tmp_path / "jets", "--key", encrypted.private)
    assert "needs a password" in refusal(*command)
    monkeypatch.setenv("PIPELINE_SIGNING_PASSWORD", "sesame")
    assert "is signed" in cli(*command).stdout


@pytest.fixture
def signed_by(store: Registry, release: KeyPair, tmp_path: Path) -> Registry:
    """The registry with a policy that demands a signature by the release key."""
    (tmp_path / "policy.yaml").write_text("signed_by: [release.pem]\n")
    store.set_policy(load_policy(tmp_path / "policy.yaml").policy)
    return store


def test_the_gate_is_for_production_only(signed_by: Registry) -> None:
    assert signature_gate(signed_by, "staging") == []
    assert signature_gate(signed_by) == [False]


def test_the_gate_cannot_be_overridden(signed_by: Registry) -> None:
    with pytest.raises(RegistryError, match="'signature' cannot be overridden"):
        signature_gate(signed_by, override=frozenset({"signature"}), reason="hurry")


def test_the_gate_passes_by_the_key_of_the_policy_only(
    signed_by: Registry, release: KeyPair, tmp_path: Path
) -> None:
    version = signed_by.find("jets/1")
    signed_by.sign(version, make_keys(tmp_path, "other").private)
    assert signature_gate(signed_by) == [False]
    signed_by.sign(version, release.private)
    assert signature_gate(signed_by) == [True]


def test_each_of_two_policies_needs_a_signature_by_its_own_key(
    signed_by: Registry, release: KeyPair, tmp_path: Path
) -> None:
    signed_by.sign(signed_by.find("jets/1"), release.private)
    make_keys(tmp_path, "other")
    (tmp_path / "other.yaml").write_text("signed_by: [other.pem]\n")
    assert signature_gate(signed_by, policy=tmp_path / "other.yaml") == [False]


@dataclass(frozen=True)
class SignedByAda:
    """jets/1 is signed with a key that the root certified for Ada."""

    registry: Registry
    root: Certified
    text: str
    """What `sign` printed."""


@pytest.fixture
def certified(store: Registry, tmp_path: Path) -> SignedByAda:
    root = certify(tmp_path, "root", authority=True)
    ada = certify(tmp_path, "ada", root)
    key = ("--key", ada.private, "--certificate", ada.pem, "--registry", store.uri)
    return SignedByAda(store, root, cli("sign", "jets/1", *key).stdout)


def test_a_signature_with_a_certificate_names_its_signer(certified: SignedByAda) -> None:
    assert certified.text.startswith("jets/1 is signed; the key is ")
    root, registry = certified.root.pem, certified.registry
    text = cli("verify", "jets/1", "--root", root, "--registry", registry.uri).stdout
    assert text.startswith("jets/1 is signed by CN=ada, certified by root ")
    assert answer("verify", "jets/1", "--key", root, registry=registry)["signer"] == "CN=ada"


def test_a_signature_with_a_certificate_needs_a_trusted_root(
    certified: SignedByAda, tmp_path: Path
) -> None:
    where = ("--key", make_keys(tmp_path, "other").public, "--registry", certified.registry.uri)
    assert "no root certificate is trusted" in refusal("verify", "jets/1", *where)


def test_a_chain_goes_with_a_certificate(certified: SignedByAda, tmp_path: Path) -> None:
    key = ("--key", make_keys(tmp_path, "other").private, "--chain", certified.root.pem)
    assert "--chain goes with" in cli("sign", "jets/1", *key, code=2).stderr


def test_a_policy_may_name_a_root_certificate(certified: SignedByAda, tmp_path: Path) -> None:
    registry, policy = certified.registry, tmp_path / "policy.yaml"
    policy.write_text("signed_by: [root.crt.pem]\n")
    assert load_policy(policy).policy.signed_by == (certified.root.pem.read_text(),)
    assert signature_gate(registry, policy=policy) == [True]
    registry.sign(registry.find("jets/1"), make_keys(tmp_path, "other").private)
    assert signature_gate(registry, policy=policy) == [False]
