"""The registry on a real MLflow and SQLite, also seen through MLflow's own client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from registry import (
    Bundle,
    BundleError,
    Decision,
    NoRegistryError,
    NotFoundError,
    PromotionRefused,
    Registry,
    RegistryError,
    Version,
)
from registry.bundle.pulled import PulledNote, read_note, write_note
from tests.models import registries
from tests.models.bundles import PASSED, V3, MakeBundle
from tests.models.mlflow_server import client_of


class TestRegister:
    def test_mlflow_shows_the_targets(self, registry: Registry, bundle: Bundle) -> None:
        registry.register(bundle)
        assert client_of(registry).get_model_version("jets", "1").tags == {
            "digest": bundle.digest,
            "target.cpu.x86-64-v3": "verified",
            "chosen.cpu.x86-64-v3": "aoti",
        }

    def test_mlflow_shows_a_description(self, registry: Registry, bundle: Bundle) -> None:
        registry.register(bundle)
        client = client_of(registry)
        version = client.get_model_version("jets", "1")
        assert version.description is not None
        assert "a small tagger" in version.description
        assert f"| {V3} | verified | aoti (chosen) | valid |" in version.description
        assert "probabilities 2.5e-7 | 11.5 µs at n=10, 210 µs at n=1000 |" in version.description
        assert "failed: the compiler crashed \\| signal 11" in version.description
        assert client.get_registered_model("jets").description == "a small tagger"

    def test_mlflow_shows_the_run(self, registry: Registry, bundle: Bundle) -> None:
        client, run_id = client_of(registry), registry.register(bundle).run_id
        assert run_id is not None
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert client.get_experiment(run.info.experiment_id).name == "jets"
        listed = {file.path for file in client.list_artifacts(run_id, "bundle")}
        assert {"bundle/manifest.json", "bundle/SHA256SUMS", "bundle/targets"} <= listed

    def test_mlflow_shows_metrics(self, registry: Registry, bundle: Bundle) -> None:
        run = client_of(registry).get_run(str(registry.register(bundle).run_id))
        assert run.data.metrics["cpu.x86-64-v3.aoti.n1000.median_us"] == 210.0
        assert run.data.metrics["cpu.x86-64-v3.aoti.worst.probabilities.max_abs"] == 2.5e-7
        assert run.data.metrics["cpu.x86-64-v3.aoti.compile_seconds"] == 12.5
        assert run.data.params["tool.torch"] == "2.13.0"
        assert run.data.params["git_commit"] == "0123abc"

    def test_same_bundle_again_is_the_same_version(
        self, registry: Registry, make_bundle: MakeBundle
    ) -> None:
        first = registry.register(Bundle.open(make_bundle(0)))
        second = registry.register(Bundle.open(make_bundle(1)))
        again = registry.register(Bundle.open(make_bundle(0)))
        assert (first.number, second.number) == (1, 2)
        assert again == first
        assert len(client_of(registry).search_runs(["1"])) == 2

    def test_a_bundle_is_registered_under_several_names(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        assert registry.register(bundle).ref == "jets/1"
        assert registry.register(bundle, "other").ref == "other/1"

    def test_a_name_that_no_model_may_have_is_refused(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        with pytest.raises(RegistryError, match="is not a version"):
            registry.register(bundle, "no/slash")

    def test_many_candidates_with_infinite_numbers_are_registered(
        self, registry: Registry, make_bundle: MakeBundle, manifest_data: dict[str, Any]
    ) -> None:
        aoti = manifest_data["targets"][V3]["candidates"]["aoti"]
        aoti["worst"]["probabilities"] |= {"max_rel": float("inf"), "max_abs": float("nan")}
        aoti["benchmark"] = {str(n): aoti["benchmark"]["10"] for n in range(5)}
        engines = {f"engine{i}": aoti | {"reason": "long " * 40} for i in range(30)}
        record = {"status": "unverified", "chosen": "engine3", "candidates": engines}
        version = registry.register(Bundle.open(make_bundle(targets={"rocm/gfx90a": record})))
        assert version.targets == {"rocm/gfx90a": "unverified"}
        description = client_of(registry).get_model_version("jets", "1").description
        assert description is not None
        assert len(description) <= 5000  # MLflow's limit
        assert "more rows" in description
        # Of each engine: the median and two percentiles at 5 sizes, and as three curves; three
        # deviations; the time to compile.
        run = client_of(registry).get_run(str(version.run_id))
        assert len(run.data.metrics) == 30 * (5 * 3 + 3 + 3 + 1)

    def test_altered_bundle_is_not_registered(self, registry: Registry, bundle: Bundle) -> None:
        (bundle.path / "program.pt2").write_bytes(b"other")
        with pytest.raises(BundleError, match="truncated or altered"):
            registry.register(bundle)
        assert registry.list() == []
        assert client_of(registry).search_experiments(filter_string="name = 'jets'") == []

    def test_failure_leaves_no_version_and_no_files(
        self, registry: Registry, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            Path("/dev/full").write_bytes(b"0" * 100_000)  # a real ENOSPC

        monkeypatch.setattr(MlflowClient, "create_model_version", fail)
        with pytest.raises(RegistryError, match="No space left on device"):
            registry.register(bundle)
        monkeypatch.undo()
        files = {file.name for file in (tmp_path / "store").rglob("*") if file.is_file()}
        assert files == {"registry.db", "registry.db.lock"}
        (run,) = client_of(registry).search_runs(["1"])
        assert run.info.status == "FAILED"
        os.chdir(tmp_path / "cwd")  # `undo` has gone back to the folder before the test
        assert registry.register(bundle).ref == "jets/1"

    def test_a_registration_interrupted_after_its_version_was_made_keeps_its_files(
        self, registry: Registry, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = MlflowClient.create_model_version

        def create_and_be_interrupted(*arguments: Any, **options: Any) -> None:
            create(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(MlflowClient, "create_model_version", create_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            registry.register(bundle)
        assert registry.open(registry.find("jets/1")).digest == bundle.digest

    def test_a_deleted_experiment_must_be_restored_first(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        client = client_of(registry)
        client.delete_experiment(client.create_experiment("jets"))
        with pytest.raises(RegistryError, match="mlflow experiments restore -x 1"):
            registry.register(bundle)


class TestFind:
    def test_a_version_is_found_by_its_number(
        self, registry: Registry, three: list[Version]
    ) -> None:
        assert registry.find("jets/2") == three[1]

    def test_a_version_is_found_by_its_alias(
        self, registry: Registry, three: list[Version]
    ) -> None:
        registry.set_alias(three[0], "golden")
        golden = registry.find("jets@golden")
        assert (golden.number, golden.aliases) == (1, ("golden",))

    def test_a_name_alone_is_its_last_version(
        self, registry: Registry, three: list[Version]
    ) -> None:
        assert registry.find("jets") == three[2]

    def test_versions_come_in_order(self, registry: Registry, three: list[Version]) -> None:
        assert [version.number for version in registry.versions("jets")] == [1, 2, 3]

    def test_models_with_versions_are_listed(
        self, registry: Registry, three: list[Version], make_bundle: MakeBundle
    ) -> None:
        registry.register(Bundle.open(make_bundle(name="electrons")))
        registry.set_alias(three[1], "staging")
        client_of(registry).create_registered_model("empty")
        electrons, jets = registry.list()
        assert electrons.name == "electrons"
        assert (jets.name, jets.versions, jets.latest.ref) == ("jets", 3, "jets/3")
        assert jets.aliases == {"staging": 2}
        assert jets.description == "a small tagger"

    @pytest.mark.parametrize(
        ("ref", "message"),
        [
            ("jet", r"^jet: no such model in sqlite:.*; its models: jets$"),
            ("jets/9", r"^jets/9: no such version; there are: 1, 3$"),
            ("jets/2", r"^jets/2: no such version; there are: 1, 3$"),
            ("jets@gold", r"^jets@gold: jets has no such alias; its aliases: @golden$"),
        ],
    )
    def test_a_version_that_there_is_not_is_refused_with_those_there_are(
        self, registry: Registry, three: list[Version], ref: str, message: str
    ) -> None:
        registry.set_alias(three[0], "golden")
        client_of(registry).delete_model_version("jets", "2")
        with pytest.raises(NotFoundError, match=message):
            registry.find(ref)

    def test_a_path_is_not_a_version(self, registry: Registry) -> None:
        with pytest.raises(RegistryError, match="the path of a folder"):
            registry.find("./jets")

    def test_reading_makes_no_registry(self, own_working_folder: Path) -> None:
        registry = Registry()
        assert registry.policies() == []
        with pytest.raises(NoRegistryError, match="nothing is registered in sqlite:"):
            registry.list()
        reads: list[Callable[[str], object]] = [registry.find, registry.versions, registry.history]
        for read in reads:
            with pytest.raises(NoRegistryError, match="nothing is registered in sqlite:"):
                read("jets")
        assert os.listdir(own_working_folder) == []

    def test_versions_of_others_are_left_alone(self, registry: Registry, bundle: Bundle) -> None:
        client = client_of(registry)
        client.create_registered_model("jets")
        client.create_model_version("jets", "file:///somewhere")
        assert registry.list() == []
        assert registry.versions("jets") == []
        with pytest.raises(NotFoundError, match="has no versions"):
            registry.find("jets")
        with pytest.raises(RegistryError, match="not registered by soa-pipeline"):
            registry.find("jets/1")
        assert registry.register(bundle).number == 2


Reader = Callable[[Registry, Version, Path], Bundle]
each_reader = pytest.mark.parametrize(
    "read",
    [lambda registry, version, folder: registry.open(version), Registry.fetch],
    ids=["open", "fetch"],
)


class TestFiles:
    def test_a_fetched_copy_is_whole(
        self, registry: Registry, bundle: Bundle, tmp_path: Path
    ) -> None:
        copy = registry.fetch(registry.register(bundle), tmp_path / "copies" / "one")
        assert copy.digest == bundle.digest
        copy.verify()
        assert os.listdir(tmp_path / "copies") == ["one"]

    def test_a_fetch_replaces_no_folder(
        self, registry: Registry, bundle: Bundle, tmp_path: Path
    ) -> None:
        version = registry.register(bundle)
        (tmp_path / "copies" / "one").mkdir(parents=True)
        with pytest.raises(BundleError, match="exists already"):
            registry.fetch(version, tmp_path / "copies" / "one")

    @each_reader
    def test_an_altered_file_in_the_store_is_refused(
        self, registry: Registry, bundle: Bundle, read: Reader, tmp_path: Path
    ) -> None:
        version = registry.register(bundle)
        (registries.folder_of(version) / "program.pt2").write_bytes(b"other")
        with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
            read(registry, version, tmp_path / "copy")

    @each_reader
    def test_another_bundle_in_the_store_is_refused(
        self, registry: Registry, make_bundle: MakeBundle, read: Reader, tmp_path: Path
    ) -> None:
        version = registry.register(Bundle.open(make_bundle()))
        shutil.rmtree(registries.folder_of(version))
        shutil.copytree(make_bundle(seed=7), registries.folder_of(version))
        with pytest.raises(BundleError, match="are another bundle"):
            read(registry, version, tmp_path / "copy")

    def test_a_fetch_that_fails_leaves_no_folder(
        self, registry: Registry, bundle: Bundle, tmp_path: Path
    ) -> None:
        version = registry.register(bundle)
        (registries.folder_of(version) / "program.pt2").write_bytes(b"other")
        with pytest.raises(BundleError):
            registry.fetch(version, tmp_path / "copies" / "one")
        assert os.listdir(tmp_path / "copies") == []

    def test_a_version_whose_files_are_gone_from_the_store_is_refused(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        version = registry.register(bundle)
        shutil.rmtree(registries.folder_of(version))
        assert registry.local_path(version) is None
        with pytest.raises(BundleError, match="jets/1: its files are gone"):
            registry.open(version)

    def test_a_note_of_promotion_does_not_travel_through_a_registry(
        self, registry: Registry, bundle: Bundle, tmp_path: Path
    ) -> None:
        """A pulled bundle has a note of its promotion, which does not count in another registry."""
        write_note(bundle.path, PulledNote("jets/9", bundle.digest, "somebody", "then"))
        version = registry.register(bundle)
        assert version.promotion("production") is None
        copy = registry.fetch(version, tmp_path / "copy")
        assert read_note(copy.path) is None


class TestPromotion:
    def test_the_first_promotion_has_no_previous(
        self, registry: Registry, three: list[Version]
    ) -> None:
        assert registry.promote(three[0], "production", PASSED).aliases == ("production",)
        assert registry.list()[0].aliases == {"production": 1}

    def test_production_moves_previous(self, registry: Registry, promoted: list[Version]) -> None:
        assert registry.list()[0].aliases == {"production": 2, "previous": 1}
        registry.promote(promoted[2], "production", PASSED)
        assert registry.list()[0].aliases == {"production": 3, "previous": 2}
        client = client_of(registry)
        assert int(client.get_model_version_by_alias("jets", "production").version) == 3

    def test_the_version_in_production_does_not_become_previous(
        self, registry: Registry, promoted: list[Version]
    ) -> None:
        registry.promote(promoted[1], "production", PASSED)
        assert registry.list()[0].aliases == {"production": 2, "previous": 1}

    def test_a_refused_promotion_changes_nothing(
        self, registry: Registry, three: list[Version]
    ) -> None:
        registry.promote(three[0], "production", PASSED)
        slow = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")
        with pytest.raises(
            PromotionRefused,
            match=r"^jets/2 to @production refused: speed: ratio 1\.5, limit 1\.1$",
        ) as caught:
            registry.promote(three[1], "production", [*PASSED, slow])
        assert caught.value.decisions == (*PASSED, slow)
        assert registry.list()[0].aliases == {"production": 1}
        assert registry.find("jets/2") == three[1]

    def test_a_promotion_without_a_decision_is_refused(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        version = registry.register(bundle)
        with pytest.raises(PromotionRefused, match="no gate was evaluated"):
            registry.promote(version, "production", [])
        assert registry.find("jets/1") == version

    @pytest.mark.parametrize("alias", ["previous", "latest", "v3", "a b", "a@b", ""])
    def test_an_alias_that_no_promotion_may_move_is_refused(
        self, registry: Registry, bundle: Bundle, alias: str
    ) -> None:
        version = registry.register(bundle)
        with pytest.raises(RegistryError):
            registry.promote(version, alias, PASSED)
        assert registry.find("jets/1") == version

    @pytest.mark.parametrize("alias", ["production", "previous"])
    def test_only_gates_move_production(
        self, registry: Registry, bundle: Bundle, alias: str
    ) -> None:
        version = registry.register(bundle)
        with pytest.raises(RegistryError, match="only a promotion or a rollback"):
            registry.set_alias(version, alias)

    def test_a_version_that_was_deleted_gets_no_alias(
        self, registry: Registry, three: list[Version]
    ) -> None:
        client_of(registry).delete_model_version("jets", "2")
        with pytest.raises(NotFoundError, match="there are: 1, 3"):
            registry.promote(three[1], "production", PASSED)
        with pytest.raises(NotFoundError, match="there are: 1, 3"):
            registry.set_alias(three[1], "staging")

    def test_without_a_previous_version_there_is_no_rollback(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        registry.promote(registry.register(bundle), "production", PASSED)
        with pytest.raises(NotFoundError, match="nothing to roll back to: no version is @previous"):
            registry.rollback("jets")

    @pytest.mark.usefixtures("promoted")
    def test_a_rollback_exchanges_production_and_previous(self, registry: Registry) -> None:
        back = registry.rollback("jets")
        assert (back.ref, back.aliases) == ("jets/1", ("production",))
        replaced = registry.find("jets@previous")
        assert replaced.number == 2
        assert '"to": "jets/1"' in replaced.tags["rolled_back"]
        assert registry.rollback("jets").ref == "jets/2"

    @pytest.mark.usefixtures("promoted")
    def test_a_model_that_there_is_not_is_not_rolled_back(self, registry: Registry) -> None:
        with pytest.raises(NotFoundError, match="no such model"):
            registry.rollback("jet")


SCRIPT = """
import os, sys
from registry import Bundle, Registry
registry = Registry()
assert "mlflow" not in sys.modules
version = registry.register(Bundle.open(sys.argv[1]))
assert registry.open(version).digest == version.digest
registry.fetch(version, os.path.join(sys.argv[2], "copy"))
registry.set_alias(version, "staging")
assert [model.name for model in registry.list()] == ["jets"]
import mlflow
assert "pipeline-registry" not in mlflow.get_tracking_uri(), mlflow.get_tracking_uri()
assert "pipeline-registry" not in mlflow.get_registry_uri(), mlflow.get_registry_uri()
assert mlflow.active_run() is None
print(version.ref)
"""


def test_a_registry_that_is_made_ready_needs_no_more_tables(
    tmp_path: Path, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_ready` makes no file: it prepares the tables in memory."""
    from mlflow.store.db import utils  # it takes long to import

    registry = Registry(f"sqlite:///{tmp_path}/new/registry.db")
    registry.get_ready()
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(utils, "_initialize_tables", None)  # not called again
    assert registry.register(Bundle.open(make_bundle())).number == 1


def test_default_registry_leaves_nothing_else(
    make_bundle: MakeBundle, own_working_folder: Path, tmp_path: Path
) -> None:
    """A process of its own prints only its answer, and leaves no file but the registry."""
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    cache = ("PIPELINE_CACHE", "XDG_CACHE_HOME")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "CI", "PYTEST_CURRENT_TEST", *cache):
        environment.pop(name, None)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(make_bundle()), str(tmp_path)],
        cwd=own_working_folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0
    assert process.stdout == "jets/1\n"
    assert process.stderr == ""
    assert os.listdir(own_working_folder) == ["pipeline-registry"]
    assert sorted(os.listdir("pipeline-registry")) == [
        "artifacts",
        "registry.db",
        "registry.db.lock",
    ]
    assert os.listdir(home) == []


@pytest.fixture
def from_environment(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """A registry that only the environment names, in folders with odd characters."""
    folder = tmp_path / "a folder, 100% ünusual"
    folder.mkdir()
    shutil.copy(empty_database, folder / "r.db")
    monkeypatch.setenv("PIPELINE_REGISTRY", f"sqlite:///{folder}/r.db")
    monkeypatch.setenv("PIPELINE_ARTIFACTS", str(tmp_path / "else where"))
    return Registry()


def test_the_environment_names_the_database(
    from_environment: Registry, tmp_path: Path, bundle: Bundle
) -> None:
    version = from_environment.register(bundle)
    assert from_environment.open(version).digest == bundle.digest
    assert sorted(os.listdir(tmp_path / "a folder, 100% ünusual")) == ["r.db", "r.db.lock"]


def test_the_environment_names_the_folder_of_the_files(
    from_environment: Registry, tmp_path: Path, bundle: Bundle
) -> None:
    path = from_environment.local_path(from_environment.register(bundle))
    assert path is not None and path.is_relative_to(tmp_path / "else where" / "jets")


def test_relative_uri_is_of_the_folder_it_was_given_in(
    tmp_path: Path, empty_database: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    shutil.copy(empty_database, tmp_path / "r" / "r.db")
    monkeypatch.chdir(tmp_path)
    registry = Registry("sqlite:///r/r.db")
    monkeypatch.chdir(tmp_path / "cwd")
    registry.register(bundle)
    assert registry.uri == f"sqlite:///{tmp_path}/r/r.db"
    assert sorted(os.listdir(tmp_path / "r")) == ["artifacts", "r.db", "r.db.lock"]
