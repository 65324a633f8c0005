"""Production asks for signatures where the host or a policy does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.errors import RunError
from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle, seal
from registry.bundle.pulled import PulledNote, write_note
from registry.errors import TrustError
from registry.promotion.policy import Policy
from registry.store.registry import Registry
from registry.trust import read_trusted, sign
from runtime.errors import LoadError
from runtime.loader import load
from runtime.session.session import Session
from tests.models.bundles import write_annex
from tests.models.keys import KeyPair, make_keys
from tests.models.project import PASSED, TARGET, Built


@pytest.fixture
def release(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path, "release")


@pytest.fixture
def registry(jets: Built, tmp_path: Path) -> Registry:
    made = Registry(f"sqlite:///{tmp_path}/store/registry.db")
    made.promote(made.register(jets.bundle), "production", PASSED)
    return made


@pytest.fixture
def pulled(jets: Built, tmp_path: Path) -> Path:
    """What `pipeline pull` makes of a promoted version."""
    folder = tmp_path / "pulled"
    shutil.copytree(jets.bundle.path, folder)
    record = PulledNote("jets/1", jets.bundle.digest, "ada", "2026-01-01T00:00:00+00:00")
    write_note(folder, record)
    return folder


def test_a_folder(
    pulled: Path, release: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(pulled)  # nobody asks
    with pytest.raises(TrustError, match="not signed"):
        load(pulled, trusted_keys=[release.public])
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(release.public))
    with pytest.raises(TrustError, match="not signed"):
        load(pulled)
    load(pulled, mode="test")  # takes anything
    sign(Bundle.open(pulled), release.private)
    assert isinstance(load(pulled), Session)
    other = make_keys(tmp_path, "other")
    with pytest.raises(TrustError, match="none of those trusted"):
        load(pulled, trusted_keys=[other.public])


def test_forged_with_every_digest_right(pulled: Path, release: KeyPair) -> None:
    """Altered, sealed again, and its record of promotion rewritten: a bare folder cannot tell."""
    sign(Bundle.open(pulled), release.private)
    (pulled / "reports/benchmark.json").write_text("{}")
    record = PulledNote("jets/1", seal(pulled), "ada", "2026-01-01T00:00:00+00:00")
    write_note(pulled, record)
    load(pulled)
    with pytest.raises(TrustError, match="not a signature of these files"):
        load(pulled, trusted_keys=[release.public])


def test_a_policy_of_the_registry(registry: Registry, release: KeyPair, tmp_path: Path) -> None:
    load("jets@production", registry=registry)
    registry.set_policy(Policy(signed_by=(read_trusted(release.public).pem,)))
    with pytest.raises(TrustError, match=r"not signed; .*the registry's policy"):
        load("jets@production", registry=registry)
    load("jets@production", registry=registry, mode="test")
    registry.sign(registry.find("jets/1"), release.private)
    load("jets@production", registry=registry)
    # What the host asks for comes on top.
    other = make_keys(tmp_path, "other")
    with pytest.raises(TrustError, match="none of those trusted"):
        load("jets@production", registry=registry, trusted_keys=[other.public])
    pull(registry, "jets@production", tmp_path / "taken")
    load(tmp_path / "taken", trusted_keys=[release.public])


def test_a_target_built_after_the_signature(pulled: Path, release: KeyPair) -> None:
    """It lies beside the bundle and under no signature: run where none is asked for, else not."""
    (added,) = {"cpu/x86-64-v2", "cpu/x86-64-v3"} - {TARGET}
    annex = write_annex(pulled / "annexes" / added, Bundle.open(pulled), added)
    record = PulledNote(
        "jets/1", annex.record.base, "ada", "2026-01-01T00:00:00+00:00", {added: annex.digest}
    )
    write_note(pulled, record)
    sign(Bundle.open(pulled), release.private)
    session = load(pulled, trusted_keys=[release.public])
    assert session.origin is not None
    assert session.origin.target == TARGET
    with pytest.raises(LoadError, match=f"{added} was built after the version was signed"):
        load(pulled, trusted_keys=[release.public], target=added)
    with pytest.raises(RunError, match="not a whole 64-bit ELF library"):  # that one is no library
        load(pulled, target=added)
