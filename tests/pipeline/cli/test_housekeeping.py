"""The commands that keep a registry in order, on versions that were really built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import pipeline
from registry.housekeeping import push
from registry.housekeeping.garbage import Garbage
from registry.store.registry import Registry
from tests.models import oci_server
from tests.models.project import PASSED, Built, answer, cli, described, refusal
from tests.models.versions import copy_of


@pytest.fixture
def away(tmp_path: Path, empty_database: Path) -> Registry:
    """Another registry, which is empty."""
    return copy_of(empty_database.parent, tmp_path / "away")


@pytest.fixture
def pulled(registry: Registry, tmp_path: Path) -> Path:
    """jets/1, which was promoted here, as a folder."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    cli("pull", "jets@production", tmp_path / "pulled", "--registry", registry.uri)
    return tmp_path / "pulled"


def test_a_folder_is_pushed_once(pulled: Path, away: Registry) -> None:
    where = ("--registry", away.uri)
    assert cli("push", pulled, *where).stdout == f"{pulled} is jets/1 now\n"
    assert cli("push", pulled, *where).stdout == f"{pulled} is jets/1 already\n"
    report = answer("push", pulled, registry=away)
    assert (report["version"], report["new"], report["added"]) == ("jets/1", False, [])


def test_a_pushed_version_has_its_origin(pulled: Path, away: Registry) -> None:
    assert answer("push", pulled, registry=away)["origin"]["version"] == "jets/1"
    assert "pushed by" in cli("show", "jets/1", "--registry", away.uri).stdout


def test_a_pushed_version_must_be_promoted_again(pulled: Path, away: Registry) -> None:
    """Decisions of the other registry's gates do not count here."""
    cli("push", pulled, "--registry", away.uri)
    with pytest.raises(pipeline.LoadError, match="never promoted to production"):
        pipeline.load("jets/1", registry=away)


def test_a_folder_may_be_pushed_under_another_name(pulled: Path, away: Registry) -> None:
    assert push(away, pulled, "second").version.ref == "second/1"


@pytest.fixture
def oci_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The host and port of a registry of OCI, which needs no login."""
    if oci_server.PROGRAM is None:
        pytest.skip("no docker-registry")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    server = oci_server.OciServer(tmp_path / "server")
    try:
        yield server.host
    finally:
        server.close()


def test_by_way_of_an_oci_registry(
    registry: Registry, pulled: Path, away: Registry, oci_host: str, tmp_path: Path
) -> None:
    """A version that was promoted here runs there in production mode, without a registry."""
    there, address = tmp_path / "there", f"oci://{oci_host}/physics/jets:1"
    report = answer("push", pulled, address, registry=away)
    pinned, digest = report["version"], registry.find("jets/1").digest
    assert pinned.startswith(f"oci://{oci_host}/physics/jets@sha256:")
    assert (report["digest"], report["folder"]) == (digest, str(pulled))
    assert cli("push", pulled, address).stdout == f"{pulled} is {pinned} now\n"
    assert cli("pull", address, there).stdout == f"{pinned} is in {there}\n"
    assert refusal("pull", address, there) == f"{there}: exists already"
    again = answer("pull", pinned, tmp_path / "again", registry=away)
    assert (again["version"], again["digest"]) == (pinned, digest)
    assert pipeline.load(there).layout("jets")
    assert cli("push", there, "--registry", away.uri).stdout == f"{there} is jets/1 now\n"


def test_what_no_promotion_vouches_for_is_not_pulled_to_run(
    pulled: Path, oci_host: str, tmp_path: Path
) -> None:
    (pulled / "PROMOTED.json").unlink()
    address = f"oci://{oci_host}/physics/jets:1"
    cli("push", pulled, address)
    message = refusal("pull", address, tmp_path / "none", "--runtime")
    assert "no promotion vouches for" in message
    assert not (tmp_path / "none").exists()


ADDRESS = "oci://registry.example/physics/jets:1"


def test_an_address_is_not_shown_before_it_is_pulled() -> None:
    assert "`pipeline pull` copies it to a folder" in refusal("show", ADDRESS)


def test_a_folder_is_pushed_to_an_address_of_oci_only(pulled: Path) -> None:
    assert "found no oci://HOST/name:TAG" in refusal("push", pulled, "host/jets:1")


def test_a_name_is_for_a_registry_of_mlflow(pulled: Path) -> None:
    error = cli("push", pulled, ADDRESS, "--name", "other", code=2).stderr
    assert "--name is for a registry of MLflow" in error


def test_a_push_without_the_client_names_the_extra(
    pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "registry.housekeeping.oci_client", None)
    assert "soa-pipeline[oci]" in refusal("push", pulled, ADDRESS)


@pytest.fixture
def staged(registry: Registry, jets: Built, tmp_path: Path) -> Registry:
    """A registry with jets/1 in staging, and jets/2 without an alias."""
    registry.register(described(jets.bundle, tmp_path / "two", "the second"))
    registry.promote(registry.find("jets/1"), "staging", PASSED)
    return registry


@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_rm_refuses_before_it_asks(staged: Registry, yes: list[str]) -> None:
    line = refusal("rm", "jets/1", *yes, "--registry", staged.uri)
    assert "is @staging: move that" in line


@pytest.mark.parametrize(
    ("ref", "says"),
    [("jets", "by its number, as jets/3"), ("./jets", "name a version of the registry")],
)
def test_rm_takes_only_a_number_of_the_registry(staged: Registry, ref: str, says: str) -> None:
    assert says in refusal("rm", ref, "--yes", "--registry", staged.uri)


def test_rm_removes_nothing_without_an_answer(staged: Registry) -> None:
    result = cli("rm", "jets/2", "--registry", staged.uri, code=1)
    assert "remove jets/2 (" in result.stderr and f"from {staged.uri}?" in result.stderr
    assert result.stdout == ""
    assert len(staged.versions("jets")) == 2


def test_rm_removes_a_version_and_the_history_says_why(staged: Registry) -> None:
    where = ("--registry", staged.uri)
    text = cli("rm", "jets/2", "--yes", "--reason", "a trial", *where).stdout
    assert text.startswith("jets/2 is removed (")
    last = answer("history", "jets", registry=staged)[-1]
    assert (last["kind"], last["reason"]) == ("removal", "a trial")
    assert "no such version" in refusal("rm", "jets/2", "--yes", *where)


def test_rm_leaves_the_other_versions(staged: Registry) -> None:
    cli("rm", "jets/2", "--yes", "--registry", staged.uri)
    with pipeline.load("jets/1", mode="test", registry=staged) as session:
        assert session.layout("jets")


def test_gc_of_a_clean_registry(registry: Registry) -> None:
    text = cli("gc", "--older-than", 0, "--registry", registry.uri).stdout
    assert text == "nothing to remove\n"


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The options of each collection, which finds one unfinished registration of 2,000 bytes."""
    options: list[dict[str, object]] = []

    def collect(_: Registry, **given: object) -> list[Garbage]:
        options.append(given)
        return [Garbage("registration", "jets: never ended", "some/run", 2000)]

    monkeypatch.setattr("registry.housekeeping.collect", collect)
    return options


def test_gc_lists_what_it_would_remove(
    registry: Registry, collections: list[dict[str, object]]
) -> None:
    text = cli("gc", "--older-than", 2, "--dry-run", "--registry", registry.uri).stdout
    assert text == "     2.0KB  jets: never ended: some/run\n2.0KB would be removed\n"
    assert collections == [{"older_than": timedelta(days=2), "dry_run": True}]


def test_gc_as_json_counts_bytes_and_kinds(
    registry: Registry, collections: list[dict[str, object]]
) -> None:
    report = answer("gc", registry=registry)
    assert report["bytes"] == 2000
    assert [garbage["kind"] for garbage in report["found"]] == ["registration"]


@pytest.fixture
def archive(registry: Registry, tmp_path: Path) -> Path:
    """An export of jets/1, which is @production and @golden here."""
    version = registry.find("jets/1")
    registry.promote(version, "production", PASSED)
    registry.set_alias(version, "golden")
    archive = tmp_path / "jets.tar"
    text = cli("export", "jets", archive, "--registry", registry.uri).stdout
    assert text == f"jets/1 and 2 events are in {archive}\n"
    return archive


def test_import_moves_no_alias_unless_asked(
    registry: Registry, away: Registry, archive: Path
) -> None:
    assert answer("import", archive, registry=away) == {
        "from": registry.uri,
        "versions": {"jets/1": "jets/1"},
        "events": 2,
        "promoted": {},
        "refused": {},
        "codes": {},
    }


def test_import_asks_the_gates(
    away: Registry, archive: Path, tmp_path: Path, measured_once: None
) -> None:
    """The other registry's alias is only a request; the policy here decides about production."""
    (tmp_path / "policy.yaml").write_text("approvals: [ada]\n")
    cli("policy", tmp_path / "policy.yaml", "--registry", away.uri)
    report = answer("import", archive, "--with-aliases", registry=away, code=1)
    assert report["promoted"] == {"golden": "jets/1"}
    assert "approvals" in report["refused"]["production"]
    assert report["codes"] == {"production": "gate-approvals"}
    error = cli("import", archive, "--with-aliases", "--registry", away.uri, code=1).stderr
    assert error.splitlines()[-1].endswith(" [gate-approvals]")
    assert away.find("jets/1").aliases == ("golden",)
    cli("approve", "jets/1", "--as", "ada", "--registry", away.uri)
    text = cli("import", archive, "--with-aliases", "--registry", away.uri).stdout
    assert "jets/1 is now @production" in text
    kinds = [event.kind for event in away.history("jets")]
    refused = ["promotion", "refusal"]  # of golden, and of production
    assert kinds == ["import"] * 2 + refused * 2 + ["approval"] + ["promotion"] * 2
