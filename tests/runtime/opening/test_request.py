"""The one way to open an artifact: a promotion counts only for the version that was promoted."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from engines.errors import RunError
from pipeline.deployment.repository import deploy
from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle
from registry.bundle.digests import seal
from registry.bundle.pulled import read_note, write_note
from registry.errors import TrustError
from registry.promotion.policy import Policy
from registry.store.recorded_lookups import LookupCache
from registry.store.registry import Registry
from registry.trust import read_trusted, sign
from runtime import loader
from runtime.errors import LoadError
from runtime.loader import load as load_here
from runtime.opening import LOOKUPS, Opening, open_version
from runtime.opening.production_trust import usable_annexes
from serving.errors import ServingError
from serving.native.artifact import Backend
from soa import SoaPipelineError
from tests.models.bundles import write_annex
from tests.models.keys import KeyPair, make_keys
from tests.models.project import PASSED, TARGET, Built, described
from tests.models.versions import promoted

TAG = "promotion.production"
UNKNOWN = "the history of jets has no such promotion"


@pytest.fixture
def registry(jets: Built, empty: Registry, tmp_path: Path) -> Registry:
    """jets/1 is in production, jets/2 was never promoted."""
    promoted(empty, jets.bundle)
    empty.register(described(jets.bundle, tmp_path / "other", "other"))
    return empty


def by_hand(registry: Registry, call: Callable[[Any], Any]) -> None:
    """Changes the registry with MLflow's own client, without any gate."""
    with registry.client() as client:
        call(client)


def write_promotion(registry: Registry, number: int, record: dict[str, Any]) -> None:
    """Sets the record of a version's promotion."""
    text = json.dumps(record)
    by_hand(registry, lambda c: c.set_model_version_tag("jets", str(number), TAG, text))


def record_of_1(registry: Registry, named: bool = True) -> dict[str, Any]:
    """The record of the promotion of jets/1. Older ones do not name the version."""
    record: dict[str, Any] = json.loads(registry.find("jets/1").tags[TAG])
    if not named:
        for name in ("model", "number", "digest"):
            del record[name]
    return record


def ways(registry: Registry, ref: str | Path, out: Path) -> list[Callable[[], Any]]:
    """Every way to run a version in production, or to hand it to a server that runs it."""
    nobody = "triton://127.0.0.1:9"
    servers = pipeline.Site.model_validate({"servers": [{"name": "one", "url": nobody}]})
    here = pipeline.Site.model_validate({"local": {"devices": ["cpu"]}})
    return [
        lambda: pipeline.load(ref, registry=registry),
        lambda: pipeline.load(ref, registry=registry, device="auto"),
        lambda: pipeline.load(ref, registry=registry, lookup="prefer-cache"),
        lambda: pipeline.load(ref, registry=registry, build="missing"),
        lambda: pipeline.load(ref, registry=registry, device=nobody),
        lambda: pipeline.load(ref, registry=registry, site=servers),
        lambda: pipeline.load(ref, registry=registry, site=here),
        *(
            partial(deploy, registry, str(ref), out, backend=backend)
            for backend in typing.get_args(Backend)
        ),
    ]


def require_refusals(
    ways: list[Callable[[], Any]], kind: type[SoaPipelineError], match: str, out: Path
) -> None:
    """Requires that each way refuses in one line, and writes nothing to `out`."""
    for way in ways:
        with pytest.raises(kind, match=match) as caught:
            way()
        assert "\n" not in str(caught.value)
    assert not out.exists()


def require_refusal_everywhere(registry: Registry, ref: str, tmp_path: Path, match: str) -> None:
    """Requires that no way runs, serves or pulls the version."""
    out = tmp_path / "out"
    openings = [*ways(registry, ref, out), lambda: pull(registry, ref, out)]
    require_refusals(openings, LoadError, match, out)


class TestAPromotionIsOfOneVersion:
    def test_copied_into_another_model(self, registry: Registry, tmp_path: Path) -> None:
        """MLflow copies a version with its tags, but no gate of the other model was asked."""

        def copy(client: Any) -> None:
            client.create_registered_model("tracks")
            client.copy_model_version("models:/jets/1", "tracks")
            client.set_registered_model_alias("tracks", "production", "1")

        by_hand(registry, copy)
        match = "tracks/1: its record of a promotion is that of jets/1"
        require_refusal_everywhere(registry, "tracks@production", tmp_path, match)

    @pytest.mark.parametrize("old", [True, False], ids=["as before", "as now"])
    def test_written_by_hand(self, registry: Registry, tmp_path: Path, old: bool) -> None:
        record = record_of_1(registry, named=not old)
        if not old:
            record |= {"number": 2, "digest": registry.find("jets/2").digest}
        write_promotion(registry, 2, record)
        require_refusal_everywhere(registry, "jets/2", tmp_path, UNKNOWN)

    def test_targets_added_by_hand(self, registry: Registry, jets: Built, tmp_path: Path) -> None:
        """Only targets that the gates saw, according to the history, may run, now and offline."""
        (added,) = {"cpu/x86-64-v2", "cpu/x86-64-v3"} - {TARGET}
        annex = write_annex(tmp_path / "annex", jets.bundle, added)
        registry.add_target(registry.find("jets/1"), annex)
        write_promotion(registry, 1, record_of_1(registry) | {"annexes": {added: annex.digest}})
        for lookup in LOOKUPS:
            with pytest.raises(LoadError, match=f"{added} was built after the promotion"):
                pipeline.load("jets/1", registry=registry, target=added, lookup=lookup)
        pull(registry, "jets/1", tmp_path / "pulled")
        note = read_note(tmp_path / "pulled")
        assert note is not None and not note.annexes

    def test_an_old_promotion_that_does_not_name_its_version_counts(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        write_promotion(registry, 1, record_of_1(registry, named=False))
        session = pipeline.load("jets@production", registry=registry, lookup="prefer-cache")
        assert type(session) is pipeline.Session
        pipeline.load("jets@production", registry=registry, lookup="offline")
        pull(registry, "jets@production", tmp_path / "pulled")
        assert read_note(tmp_path / "pulled") is not None

    def test_the_history_of_a_deleted_experiment_counts(self, registry: Registry) -> None:
        def delete(client: Any) -> None:
            client.delete_experiment(client.get_experiment_by_name("jets").experiment_id)

        by_hand(registry, delete)
        pipeline.load("jets@production", registry=registry)

    def test_the_promotion_in_a_recorded_lookup_is_compared_with_its_version(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        """Offline no registry is asked, but a record of another version does not count."""
        pipeline.load("jets@production", registry=registry, lookup="prefer-cache")
        records = LookupCache(tmp_path / "cache", repr(registry), "production")
        lookup = records.read("jets@production")
        assert lookup is not None
        forged = replace(lookup, version=replace(lookup.version, number=2))
        records.write("jets@production", forged)
        with pytest.raises(LoadError, match="jets/2: its record of a promotion is that of jets/1"):
            pipeline.load("jets@production", registry=registry, lookup="offline")

    def test_a_killed_promotion_has_not_happened(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A writer is killed between its tag and its alias; the next one takes the tag back."""
        from mlflow.tracking import MlflowClient  # most tests of this file do without

        def be_killed(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in (
                "set_registered_model_alias",
                "delete_model_version_tag",
                "set_terminated",
            ):
                patch.setattr(MlflowClient, name, be_killed)
            with pytest.raises(KeyboardInterrupt):
                registry.promote(registry.find("jets/2"), "production", PASSED)
        assert registry.find("jets/2").promotion("production") is not None
        with pytest.raises(LoadError, match=UNKNOWN):
            pipeline.load("jets/2", registry=registry)
        pipeline.load("jets@production", registry=registry)


class TestSignatures:
    """If a signature is required, every way to open a version checks it."""

    @pytest.fixture
    def release(self, tmp_path: Path) -> KeyPair:
        return make_keys(tmp_path, "release")

    @pytest.fixture
    def host(self, release: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(release.public))

    @pytest.fixture
    def pulled(self, registry: Registry, tmp_path: Path) -> Path:
        pull(registry, "jets@production", tmp_path / "pulled")
        return tmp_path / "pulled"

    def test_the_host(self, registry: Registry, pulled: Path, host: None, tmp_path: Path) -> None:
        for ref in ("jets@production", pulled):
            openings = ways(registry, ref, tmp_path / "out")
            require_refusals(openings, TrustError, "not signed", tmp_path / "out")

    def test_a_policy_of_the_registry(
        self, registry: Registry, release: KeyPair, tmp_path: Path
    ) -> None:
        load_here("jets@production", registry=registry)
        registry.set_policy(Policy(signed_by=(read_trusted(release.public).pem,)))
        openings = ways(registry, "jets@production", tmp_path / "out")
        require_refusals(
            openings, TrustError, "not signed.*the registry's policy", tmp_path / "out"
        )
        load_here("jets@production", registry=registry, mode="test")
        registry.sign(registry.find("jets/1"), release.private)
        load_here("jets@production", registry=registry)
        pull(registry, "jets@production", tmp_path / "taken")
        load_here(tmp_path / "taken", trusted_keys=[release.public])

    def test_a_folder_without_a_signature_is_refused(self, pulled: Path, release: KeyPair) -> None:
        with pytest.raises(TrustError, match="not signed"):
            load_here(pulled, trusted_keys=[release.public])

    def test_a_folder_without_a_signature_runs_in_test_mode(self, pulled: Path, host: None) -> None:
        load_here(pulled, mode="test")

    def test_a_folder_that_a_trusted_key_signed_runs(
        self, pulled: Path, release: KeyPair, host: None
    ) -> None:
        sign(Bundle.open(pulled), release.private)
        load_here(pulled)

    def test_a_folder_that_another_key_signed_is_refused(
        self, pulled: Path, release: KeyPair, tmp_path: Path
    ) -> None:
        sign(Bundle.open(pulled), make_keys(tmp_path, "other").private)
        with pytest.raises(TrustError, match="none of those trusted"):
            load_here(pulled, trusted_keys=[release.public])

    def test_only_a_signature_shows_a_change_with_every_digest_right(
        self, pulled: Path, release: KeyPair
    ) -> None:
        """The folder is changed and sealed again, and its promotion forged."""
        sign(Bundle.open(pulled), release.private)
        (pulled / "reports/benchmark.json").write_text("{}")
        note = read_note(pulled)
        assert note is not None
        write_note(pulled, replace(note, digest=seal(pulled)))
        load_here(pulled)
        with pytest.raises(TrustError, match="not a signature of these files"):
            load_here(pulled, trusted_keys=[release.public])

    @pytest.mark.parametrize(
        "options",
        [{}, {"device": "triton://127.0.0.1:9"}, {"site": pipeline.Site()}],
        ids=["here", "a server", "a site"],
    )
    def test_a_callers_keys_count_on_every_way(
        self, registry: Registry, release: KeyPair, options: dict[str, Any]
    ) -> None:
        with pytest.raises(TrustError, match="not signed"):
            pipeline.load(
                "jets@production", registry=registry, trusted_keys=release.public, **options
            )

    def test_a_signed_version_is_deployed_with_its_signature(
        self, registry: Registry, release: KeyPair, host: None, pulled: Path, tmp_path: Path
    ) -> None:
        registry.sign(registry.find("jets/1"), release.private)
        sign(Bundle.open(pulled), release.private)
        for ref in ("jets@production", str(pulled)):
            deployed = deploy(registry, ref, tmp_path / "out", replace=True)
            service = deployed.service
            session = load_here(deployed.folder / "1" / ".bundle", target=service.target)
            assert session.origin is not None and session.origin.digest == service.digest
        assert deploy(registry, "jets/1", tmp_path / "native", backend="pytorch").folder.exists()
        pipeline.load("jets@production", registry=registry, site=pipeline.Site()).close()

    def test_the_host_and_the_caller_each_ask_for_a_signature(
        self, registry: Registry, release: KeyPair, host: None, tmp_path: Path
    ) -> None:
        """`trusted_keys` is added to the host's keys: one key of each group must have signed."""
        other = make_keys(tmp_path, "other")
        version = registry.find("jets/1")
        for signer in (release, other):
            registry.sign(version, signer.private)
            with pytest.raises(TrustError, match="none of those trusted"):
                pipeline.load("jets/1", registry=registry, trusted_keys=[other.public])
        registry.sign(version, release.private)
        both = [other.public, release.public]
        pipeline.load("jets/1", registry=registry, trusted_keys=both)

    def test_a_target_built_after_the_signature_runs_only_where_none_is_required(
        self, registry: Registry, release: KeyPair, pulled: Path, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Its annex is not signed."""
        (added,) = {"cpu/x86-64-v2", "cpu/x86-64-v3"} - {TARGET}
        annex = write_annex(pulled / "annexes" / added, Bundle.open(pulled), added)
        note = read_note(pulled)
        assert note is not None
        write_note(pulled, replace(note, annexes={added: annex.digest}))
        sign(Bundle.open(pulled), release.private)
        with pytest.raises(RunError, match="not a whole 64-bit ELF library"):  # random bytes
            load_here(pulled, target=added)
        session = load_here(pulled, trusted_keys=[release.public])
        assert session.origin is not None
        assert session.origin.target == TARGET
        with pytest.raises(LoadError, match=f"{added} was built after the version was signed"):
            load_here(pulled, trusted_keys=[release.public], target=added)
        monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(release.public))
        with pytest.raises(ServingError, match=f"{added} was built after the version was signed"):
            deploy(registry, str(pulled), tmp_path / "out", target=added)
        assert deploy(registry, str(pulled), tmp_path / "out").service.target == TARGET


def test_targets_that_were_not_promoted_or_signed_are_withheld(registry: Registry) -> None:
    version = replace(registry.find("jets/1"), annexes={"cpu/aarch64": "a" * 64, "cpu/x": "b" * 64})
    promotion = version.promotion("production")
    assert promotion is not None
    promotion = replace(promotion, annexes={"cpu/aarch64": "a" * 64})

    usable, withheld = usable_annexes(version, promotion, signed=False)
    assert usable == ["cpu/aarch64"]
    assert "promote" in withheld["cpu/x"]

    usable, withheld = usable_annexes(version, promotion, signed=True)
    assert usable == []
    assert "signed" in withheld["cpu/aarch64"]
    assert "promote" in withheld["cpu/x"]


@pytest.mark.parametrize(
    ("target", "device"), [("cuda/sm_90", "cuda"), ("rocm/gfx90a", "cuda"), (TARGET, "cpu")]
)
def test_a_target_is_measured_on_a_device_of_its_kind(
    jets: Built, monkeypatch: pytest.MonkeyPatch, target: str, device: str
) -> None:
    """`bench` and the speed gate of a promotion do not time a GPU's artifact on the CPU."""
    openings: list[tuple[str, str, str]] = []

    def note(_: object, target: str, engine: str, device: torch.device) -> None:
        openings.append((target, engine, device.type))

    monkeypatch.setattr(loader, "open_artifact", note)
    opened = open_version(Opening(jets.bundle.path, mode="test"))
    session = loader.open_measured_session(opened, target, "exported")
    assert session.device.type == device
    assert openings == [(target, "exported", device)]
