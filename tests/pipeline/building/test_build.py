"""`pipeline build`: another target for a registered version, from its bundle alone."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from engines.target import Target, host_runs
from pipeline.building.add_target import build
from pipeline.deployment.repository import deploy
from registry.bundle import BENCHMARK, VALIDATION
from registry.errors import BundleError
from registry.history.event_log import Event
from registry.store.registry import Registry
from registry.version import Version
from runtime.errors import LoadError
from serving.errors import ServingError
from stages.errors import StageError
from stages.package import NO_BASELINE
from tests.models.bundles import tree
from tests.models.project import TARGET, Built, answer, cli, refusal, require_right, resealed
from tests.models.registries import file_of
from tests.models.versions import copy_of

LOWER = "cpu/x86-64-v2"

pytestmark = pytest.mark.skipif(
    TARGET == LOWER or not host_runs(Target.parse(LOWER)),
    reason="another CPU level takes a host of x86-64-v3",
)


@dataclass(frozen=True)
class Added:
    """jets/1 in production, to which native code for a lower level was added."""

    registry: Registry
    build_answer: dict[str, Any]
    """The answer of the command."""
    before: dict[str, str]
    after: dict[str, str]
    """The digests of the bundle's files by name, before and after."""

    @property
    def version(self) -> Version:
        return self.registry.find("jets/1")

    def answer(self, *command: object) -> Any:
        return answer(*command, registry=self.registry)


@pytest.fixture(scope="module")
def added(jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Added:
    """Native code for LOWER, built after jets/1 was promoted."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copy(empty_database, folder / "registry.db")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    version = registry.register(jets.bundle)
    cli("promote", "jets/1", "--to", "production", "--registry", registry.uri)
    bundle = registry.local_path(version)
    assert bundle is not None
    before = tree(bundle)
    build = ("build", "jets/1", "--target", LOWER, "--engine", "lanes", "--work", folder / "work")
    return Added(registry, answer(*build, registry=registry), before, tree(bundle))


def test_the_bundle_stays_as_it_was(added: Added, jets: Built) -> None:
    assert added.before == added.after
    assert added.version.digest == jets.bundle.digest


def test_the_command_says_what_was_built(added: Added, jets: Built) -> None:
    assert added.build_answer == {
        "version": "jets/1",
        "digest": jets.bundle.digest,
        "target": LOWER,
        "annex": added.version.annexes[LOWER],
        "status": "verified",
        "chosen": "lanes",
        "notes": [NO_BASELINE],
    }


def test_the_annex_says_how_it_was_built(added: Added, jets: Built) -> None:
    record = added.registry.open(added.version).annexes[LOWER].record
    assert record.base == jets.bundle.digest
    assert record.tools["torch"] == torch.__version__


def test_the_annex_has_reports_of_its_own(added: Added) -> None:
    bundle = added.registry.open(added.version)
    candidate = bundle.manifest.targets[LOWER].candidates["lanes"]
    assert candidate.worst["probabilities"].outside == 0
    assert bundle.report(VALIDATION)[LOWER]["lanes"]["valid"]
    for timed in bundle.report(BENCHMARK)[LOWER]["timings"].values():
        assert set(timed) == {"lanes"}  # no baseline is invented


def test_the_artifact_is_for_the_lower_level(added: Added) -> None:
    bundle = added.registry.open(added.version)
    files = bundle.manifest.targets[LOWER].candidates["lanes"].files
    (target,) = [bundle.file(name) for name in files if name.endswith("target.txt")]
    assert target.read_text() == f"soa-target 1\n{LOWER}\n"


def test_ls_has_the_new_target(added: Added) -> None:
    (listed,) = added.answer("ls", "jets")["jets"]
    assert (listed["targets"][LOWER], listed["chosen"][LOWER]) == ("verified", "lanes")


def test_show_has_the_annex(added: Added) -> None:
    text = cli("show", "jets/1", "--registry", added.registry.uri).stdout
    shown = " ".join(text.split())  # lines are broken
    assert f"{LOWER} (verified)" in shown
    assert f"annex {added.version.annexes[LOWER]}" in shown
    assert NO_BASELINE in shown
    data = added.answer("show", "jets/1")
    assert data["annexes"][LOWER]["target"] == LOWER
    assert data["version"]["annexes"] == dict(added.version.annexes)


def test_the_new_target_is_validated_and_timed(added: Added) -> None:
    reports = added.answer("validate", "jets/1", "--target", LOWER)
    assert [report["valid"] for report in reports[LOWER]] == [True]
    timed = added.answer("bench", "jets/1", "--target", LOWER, "--seconds", "0.01")
    assert timed[LOWER]["fastest"] == "lanes"


def test_the_history_has_the_build(added: Added) -> None:
    promotion, build, *_ = added.answer("history", "jets")
    assert (promotion["kind"], build["kind"]) == ("promotion", "build")
    assert LOWER in build["annexes"]
    assert "build of jets/1" in cli("history", "jets", "--registry", added.registry.uri).stdout


BUILT_LATER = f"it has: {TARGET}; {LOWER} was built after the promotion"


def test_a_target_built_after_the_promotion_is_not_run_in_production(added: Added) -> None:
    """Test mode runs it."""
    pipeline.load("jets/1", registry=added.registry, target=LOWER, mode="test")
    with pytest.raises(LoadError, match=BUILT_LATER):
        pipeline.load("jets/1", registry=added.registry, target=LOWER)


def test_a_target_built_after_the_promotion_is_not_deployed(added: Added, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=BUILT_LATER):
        deploy(added.registry, "jets/1", tmp_path / "out", target=LOWER)
    assert deploy(added.registry, "jets/1", tmp_path / "out").service.target == TARGET


def test_a_target_built_after_the_promotion_is_not_pulled(added: Added, tmp_path: Path) -> None:
    cli("pull", "jets/1", tmp_path / "pulled", "--registry", added.registry.uri)
    with pytest.raises(LoadError, match=f"jets has no target {LOWER}; it has: {TARGET}"):
        pipeline.load(tmp_path / "pulled", target=LOWER)


@dataclass(frozen=True)
class Promoted:
    """A copy of the registry, in which a promotion let the new target pass."""

    registry: Registry
    details: list[str]
    """What each gate found."""


@pytest.fixture(scope="module")
def promoted(added: Added, tmp_path_factory: pytest.TempPathFactory) -> Promoted:
    """The copy, so that other tests see the registry before this promotion."""
    store = file_of(added.registry).parent
    registry = copy_of(store, tmp_path_factory.mktemp("promoted") / "store")
    report = answer("promote", "jets/1", "--to", "production", registry=registry)
    return Promoted(registry, [decision["detail"] for decision in report["decisions"]])


def test_the_gates_see_the_new_target(promoted: Promoted) -> None:
    assert f"{LOWER} is verified (lanes)" in promoted.details
    within = f"{LOWER}: output probabilities has a fraction of 0"
    assert any(detail.startswith(within) for detail in promoted.details)


def test_production_takes_a_target_once_a_promotion_let_it_pass(promoted: Promoted) -> None:
    session = pipeline.load("jets@production", registry=promoted.registry, target=LOWER)
    assert session.origin is not None
    assert session.origin.target == LOWER
    require_right(session)


def test_the_best_target_of_the_host_is_taken_by_default(promoted: Promoted) -> None:
    session = pipeline.load("jets@production", registry=promoted.registry)
    assert session.origin is not None
    assert session.origin.target == TARGET


def test_a_pulled_target_runs_until_a_file_of_it_is_altered(
    promoted: Promoted, tmp_path: Path
) -> None:
    """The folder may be moved."""
    cli("pull", "jets/1", tmp_path / "pulled", "--registry", promoted.registry.uri)
    moved = (tmp_path / "pulled").rename(tmp_path / "moved")
    require_right(pipeline.load(moved, target=LOWER))
    (library,) = (moved / "annexes" / LOWER).rglob("*.so")
    content = library.read_bytes()
    library.unlink()  # a session still uses the old file
    library.write_bytes(content + b"\0")
    with pytest.raises(BundleError, match="truncated or altered"):
        pipeline.load(moved)


@pytest.mark.parametrize("target", [LOWER, TARGET])
def test_a_target_is_built_once(added: Added, target: str) -> None:
    registry = added.registry
    before: list[Event] = list(registry.history("jets"))
    message = refusal("build", "jets/1", "--target", target, "--registry", registry.uri)
    assert message.startswith(f"jets/1 has {target} already")
    assert "\n" not in message
    assert list(registry.history("jets")) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("jets/1", "--target", "cpu/x86-64-v9"), "unknown target 'cpu/x86-64-v9': use cpu, "),
        (("jets/1", "--target", "rocm/gfx90a"), "this host cannot run rocm/gfx90a: "),
        (("jets/1", "--target", LOWER, "--engine", "gcc"), "unknown engine 'gcc': use one of "),
        (("jets/9", "--target", LOWER), "jets/9: no such version; there are: 1"),
    ],
    ids=["no such target", "target of another host", "no such engine", "no such version"],
)
def test_what_cannot_be_built_is_refused(
    registry: Registry, arguments: tuple[str, ...], says: str
) -> None:
    assert refusal("build", *arguments, "--registry", registry.uri).startswith(says)


def test_what_does_not_validate_is_not_added(
    empty: Registry, jets: Built, heavy: Built, tmp_path: Path
) -> None:
    """The bundle holds another model's program, sealed: only running it shows the error."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")

    version = empty.register(resealed(jets.bundle, tmp_path / "edited", edit))
    with pytest.raises(StageError) as caught:
        build(empty, version.ref, LOWER, ["exported"], tmp_path / "work")
    assert str(caught.value).startswith(f"no artifact of 'jets' for {LOWER} is valid: {LOWER} ")
    assert "exported: output 'probabilities' at n=" in str(caught.value)
    assert empty.find("jets/1") == version
    assert list(empty.history("jets")) == []
    assert not list((tmp_path / "store").rglob("annexes"))
