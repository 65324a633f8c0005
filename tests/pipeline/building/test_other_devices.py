"""A target whose device is not here: portable artifacts are packaged, as unverified."""

from __future__ import annotations

import shutil

import pytest

import pipeline
from engines.target import Target, host_runs
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.errors import LoadError
from tests.models.project import TARGET, TARGETS, Built, cli, refusal, write_project

ROCM = "rocm/gfx90a"

pytestmark = pytest.mark.skipif(host_runs(Target.parse(ROCM)), reason="this host has that GPU")


@pytest.fixture(scope="module")
def built(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A project with its own registry; artifacts for the CPU are taken from `jets`."""
    project = write_project(tmp_path_factory.mktemp("rocm"))
    shutil.copytree(jets.project.work, project.work)
    config = project.variant(
        "both.yaml",
        (TARGETS, f"targets: [{TARGET}, {ROCM}]"),
        ("[aoti, torchscript, exported]", "[exported, torchscript]"),
    )
    answer = project.run(config)
    return Built(project, answer, Bundle.open(answer["bundle"]))


def test_the_portable_candidates_are_packaged_unverified(built: Built) -> None:
    record = built.bundle.manifest.targets[ROCM]
    assert record.status == "unverified"
    assert {name: c.status for name, c in record.candidates.items()} == {
        "exported": "unverified",
        "torchscript": "unverified",
    }
    assert record.chosen == "exported"
    assert record.candidates["exported"].reason == (
        "no device here runs rocm/gfx90a: it was not validated"
    )


def test_a_portable_candidate_is_the_file_of_the_capture(built: Built) -> None:
    candidates = built.bundle.manifest.targets[ROCM].candidates
    assert candidates["exported"].files == ["program.pt2"]
    assert candidates["torchscript"].files == ["model.ts"]


def test_the_target_of_this_host_is_verified(built: Built) -> None:
    version = Registry(built.project.registry).find("jets")
    assert dict(version.targets) == {TARGET: "verified", ROCM: "unverified"}


def test_show_says_that_no_device_ran_it(built: Built) -> None:
    shown = cli("show", "jets/1", "--registry", built.project.registry).stdout
    assert f"{ROCM} (unverified)" in shown
    assert "exported is unverified: no device here runs rocm/gfx90a: it was not validated" in shown


def test_a_promotion_needs_the_name_of_the_unverified_target(
    built: Built, measured_once: None
) -> None:
    where = ("--registry", built.project.registry)
    cli("promote", "jets/1", "--to", "production", *where, code=1)
    cli("promote", "jets/1", "--to", "production", "--allow-unverified", ROCM, *where)
    assert Registry(built.project.registry).find("jets@production").number == 1


def test_a_target_without_its_device_is_not_run(built: Built) -> None:
    with pytest.raises(LoadError, match="torch sees 0 GPUs here"):
        pipeline.load(built.bundle.path, device="cuda", mode="test")


def test_a_version_that_was_proven_nowhere_is_refused(built: Built) -> None:
    project = built.project
    config = project.variant("alone.yaml", (TARGETS, f"targets: [{ROCM}]"))
    message = refusal("run", config, "--work", project.work, "--registry", project.registry)
    assert message.startswith("no artifact of 'jets' is valid: ")
    assert "no device here runs rocm/gfx90a: it was not validated" in message
