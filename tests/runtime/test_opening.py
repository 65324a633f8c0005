"""The one route to an artifact: a promotion counts for the version that it was given to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from pipeline.deploy import deploy
from pipeline.pull import pull
from registry.promoted import read_promoted
from registry.store import Registry
from runtime.errors import LoadError
from tests.models.project import PASSED, Built, described
from tests.models.versions import promoted

TAG = "promotion.production"
UNKNOWN = "the history of jets has no such promotion"


@pytest.fixture(autouse=True)
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def registry(jets: Built, empty: Registry, tmp_path: Path) -> Registry:
    """jets/1 is in production, jets/2 was never promoted."""
    promoted(empty, jets.bundle)
    empty.register(described(jets.bundle, tmp_path / "other", "other"))
    return empty


def by_hand(registry: Registry, call: Callable[[Any], Any]) -> None:
    """With MLflow's own client, past every gate."""
    with registry._access.client() as client:
        call(client)


def tagged(registry: Registry, number: int, text: str) -> None:
    by_hand(registry, lambda c: c.set_model_version_tag("jets", str(number), TAG, text))


def everywhere_refused(registry: Registry, ref: str, tmp_path: Path, match: str) -> None:
    """By every way that runs it or hands it on; nothing is left behind."""
    ways: list[Callable[[], Any]] = [
        lambda: pipeline.load(ref, registry=registry),
        lambda: pipeline.load(ref, registry=registry, lookup="prefer-cache"),
        lambda: pipeline.load(ref, registry=registry, device="triton://127.0.0.1:9"),
        lambda: pipeline.load(ref, registry=registry, site=pipeline.Site()),
        lambda: deploy(registry, ref, tmp_path / "out"),
        lambda: pull(registry, ref, tmp_path / "out"),
    ]
    for way in ways:
        with pytest.raises(LoadError, match=match) as caught:
            way()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


class TestAPromotionIsOfOneVersion:
    def test_it_names_model_number_and_digest(self, registry: Registry, jets: Built) -> None:
        record = json.loads(registry.find("jets/1").tags[TAG])
        found = (record["model"], record["number"], record["digest"])
        assert found == ("jets", 1, jets.bundle.digest)

    def test_copied_into_another_model(self, registry: Registry, tmp_path: Path) -> None:
        """MLflow copies a version with its tags; the gates of the other model were never asked."""

        def copy(client: Any) -> None:
            client.create_registered_model("tracks")
            client.copy_model_version("models:/jets/1", "tracks")
            client.set_registered_model_alias("tracks", "production", "1")

        by_hand(registry, copy)
        match = "tracks/1: its record of a promotion is that of jets/1"
        everywhere_refused(registry, "tracks@production", tmp_path, match)

    @pytest.mark.parametrize("old", [True, False], ids=["as before", "as now"])
    def test_written_by_hand(self, registry: Registry, tmp_path: Path, old: bool) -> None:
        other = registry.find("jets/2")
        record = json.loads(registry.find("jets/1").tags[TAG])
        record |= {"number": 2, "digest": other.digest}
        if old:
            for name in ("model", "number", "digest"):
                del record[name]
        tagged(registry, 2, json.dumps(record))
        everywhere_refused(registry, "jets/2", tmp_path, UNKNOWN)

    def test_targets_added_by_hand(self, registry: Registry, tmp_path: Path) -> None:
        record = json.loads(registry.find("jets/1").tags[TAG])
        record["annexes"] = {"cpu/x86-64-v2": "0" * 64}
        tagged(registry, 1, json.dumps(record))
        everywhere_refused(registry, "jets/1", tmp_path, UNKNOWN)

    def test_one_from_before_they_named_the_version(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        record = json.loads(registry.find("jets/1").tags[TAG])
        for name in ("model", "number", "digest"):
            del record[name]
        tagged(registry, 1, json.dumps(record))
        session = pipeline.load("jets@production", registry=registry, lookup="prefer-cache")
        assert type(session) is pipeline.Session
        pipeline.load("jets@production", registry=registry, lookup="offline")
        pull(registry, "jets@production", tmp_path / "pulled")
        assert read_promoted(tmp_path / "pulled") is not None

    def test_the_history_of_a_deleted_experiment_counts(self, registry: Registry) -> None:
        def delete(client: Any) -> None:
            client.delete_experiment(client.get_experiment_by_name("jets").experiment_id)

        by_hand(registry, delete)
        pipeline.load("jets@production", registry=registry)

    def test_what_was_kept_is_compared_too(self, registry: Registry, tmp_path: Path) -> None:
        """Offline nobody is asked, but a record of another version is none."""
        from registry.resolved import Resolved

        pipeline.load("jets@production", registry=registry, lookup="prefer-cache")
        kept = Resolved(tmp_path / "cache", repr(registry), "production")
        found = kept.read("jets@production")
        assert found is not None
        kept.write("jets@production", replace(found, version=replace(found.version, number=2)))
        with pytest.raises(LoadError, match="jets/2: its record of a promotion is that of jets/1"):
            pipeline.load("jets@production", registry=registry, lookup="offline")

    def test_a_killed_promotion_has_not_happened(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between its tag and its alias: a killed writer's, which the next writer takes back."""
        from mlflow.tracking import MlflowClient

        def killed(*arguments: Any, **more: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in (
                "set_registered_model_alias",
                "delete_model_version_tag",
                "set_terminated",
            ):
                patch.setattr(MlflowClient, name, killed)
            with pytest.raises(KeyboardInterrupt):
                registry.promote(registry.find("jets/2"), "production", PASSED)
        assert registry.find("jets/2").promotion("production") is not None
        with pytest.raises(LoadError, match=UNKNOWN):
            pipeline.load("jets/2", registry=registry)
        pipeline.load("jets@production", registry=registry)
