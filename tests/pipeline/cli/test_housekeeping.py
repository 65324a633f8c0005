"""The commands that keep a registry in order, on versions that were really built."""

from __future__ import annotations

import sys
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
    return copy_of(empty_database.parent, tmp_path / "away")


def test_pushed_and_promoted_again(registry: Registry, away: Registry, tmp_path: Path) -> None:
    """Decisions of the other registry's gates do not count here."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    folder = tmp_path / "pulled"
    cli("pull", "jets@production", folder, "--registry", registry.uri)
    assert cli("push", folder, "--registry", away.uri).stdout == f"{folder} is jets/1 now\n"
    again = cli("push", folder, "--registry", away.uri).stdout
    assert again == f"{folder} is jets/1 already\n"
    done = answer("push", folder, registry=away)
    assert (done["version"], done["new"], done["added"]) == ("jets/1", False, [])
    assert done["origin"]["version"] == "jets/1"
    assert "never promoted to production" in refusal_of_production(away)
    shown = cli("show", "jets/1", "--registry", away.uri).stdout
    assert "pushed by" in shown
    assert push(away, folder, "second").version.ref == "second/1"


def refusal_of_production(registry: Registry) -> str:
    with pytest.raises(pipeline.LoadError) as caught:
        pipeline.load("jets/1", registry=registry)
    return str(caught.value)


@pytest.mark.skipif(oci_server.PROGRAM is None, reason="no docker-registry")
def test_by_way_of_an_oci_registry(
    registry: Registry, away: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that was promoted here runs there in production mode, without a registry."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    registry.promote(registry.find("jets/1"), "production", PASSED)
    here, there = tmp_path / "here", tmp_path / "there"
    cli("pull", "jets@production", here, "--registry", registry.uri)
    server = oci_server.OciServer(tmp_path / "server")
    try:
        address = f"oci://{server.host}/physics/jets:1"
        pushed = answer("push", here, address, registry=away)
        pinned, digest = pushed["version"], registry.find("jets/1").digest
        assert pinned.startswith(f"oci://{server.host}/physics/jets@sha256:")
        assert (pushed["digest"], pushed["folder"]) == (digest, str(here))
        assert cli("push", here, address).stdout == f"{here} is {pinned} now\n"
        assert cli("pull", address, there).stdout == f"{pinned} is in {there}\n"
        assert refusal("pull", address, there) == f"{there}: exists already"
        got = answer("pull", pinned, tmp_path / "again", registry=away)
        assert (got["version"], got["digest"]) == (pinned, digest)
        assert pipeline.load(there).layout("jets")
        (here / "PROMOTED.json").unlink()
        cli("push", here, f"{address}.1")
        said = refusal("pull", f"{address}.1", tmp_path / "none", "--runtime")
        assert "no promotion vouches for" in said
        assert not (tmp_path / "none").exists()
        assert cli("push", there, "--registry", away.uri).stdout == f"{there} is jets/1 now\n"
    finally:
        server.close()
    assert "`pipeline pull` copies it to a folder" in refusal("show", address)
    assert "found no oci://HOST/name:TAG" in refusal("push", here, "host/jets:1")
    used = cli("push", here, address, "--name", "other", code=2).stderr
    assert "--name is for a registry of MLflow" in used
    monkeypatch.setitem(sys.modules, "registry.housekeeping.oci_client", None)
    assert "soa-pipeline[oci]" in refusal("push", here, address)


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
def test_rm_takes_a_number(staged: Registry, ref: str, says: str) -> None:
    assert says in refusal("rm", ref, "--yes", "--registry", staged.uri)


def test_rm_removes_nothing_without_an_answer(staged: Registry) -> None:
    asked = cli("rm", "jets/2", "--registry", staged.uri, code=1)
    assert "remove jets/2 (" in asked.stderr and f"from {staged.uri}?" in asked.stderr
    assert asked.stdout == ""
    assert len(staged.versions("jets")) == 2


def test_rm(staged: Registry) -> None:
    where = ("--registry", staged.uri)
    said = cli("rm", "jets/2", "--yes", "--reason", "a trial", *where).stdout
    assert said.startswith("jets/2 is removed (")
    last = answer("history", "jets", registry=staged)[-1]
    assert (last["kind"], last["reason"]) == ("removal", "a trial")
    assert "no such version" in refusal("rm", "jets/2", "--yes", *where)
    pipeline.load("jets/1", mode="test", registry=staged)


def test_gc(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    where = ("--registry", registry.uri)
    assert cli("gc", "--older-than", 0, *where).stdout == "nothing to remove\n"
    asked: list[dict[str, object]] = []

    def collect(_: Registry, **given: object) -> list[Garbage]:
        asked.append(given)
        return [Garbage("registration", "jets: never ended", "some/run", 2000)]

    monkeypatch.setattr("registry.housekeeping.collect", collect)
    said = cli("gc", "--older-than", 2, "--dry-run", *where).stdout
    assert said == "     2.0KB  jets: never ended: some/run\n2.0KB would be removed\n"
    assert asked == [{"older_than": timedelta(days=2), "dry_run": True}]
    done = answer("gc", registry=registry)
    assert (done["bytes"], [each["kind"] for each in done["found"]]) == (2000, ["registration"])


def test_import_asks_the_gates(
    registry: Registry, away: Registry, tmp_path: Path, measured_once: None
) -> None:
    """The other registry's alias is only a request; the policy here decides about production."""
    version = registry.find("jets/1")
    registry.promote(version, "production", PASSED)
    registry.set_alias(version, "golden")
    out = tmp_path / "jets.tar"
    said = cli("export", "jets", out, "--registry", registry.uri).stdout
    assert said == f"jets/1 and 2 events are in {out}\n"
    done = answer("import", out, registry=away)
    assert done == {
        "from": registry.uri,
        "versions": {"jets/1": "jets/1"},
        "events": 2,
        "promoted": {},
        "refused": {},
        "codes": {},
    }
    (tmp_path / "policy.yaml").write_text("approvals: [ada]\n")
    cli("policy", tmp_path / "policy.yaml", "--registry", away.uri)
    done = answer("import", out, "--with-aliases", registry=away, code=1)
    assert done["promoted"] == {"golden": "jets/1"}
    assert "approvals" in done["refused"]["production"]
    assert done["codes"] == {"production": "gate-approvals"}
    said = cli("import", out, "--with-aliases", "--registry", away.uri, code=1).stderr
    assert said.splitlines()[-1].endswith(" [gate-approvals]")
    assert away.find("jets/1").aliases == ("golden",)
    cli("approve", "jets/1", "--as", "ada", "--registry", away.uri)
    said = cli("import", out, "--with-aliases", "--registry", away.uri).stdout
    assert "jets/1 is now @production" in said
    kinds = [event.kind for event in away.history("jets")]
    asked = ["promotion", "refusal"] * 2
    assert kinds == ["import"] * 2 + asked + ["approval"] + ["promotion"] * 2
