"""Promotion: each gate refuses with its number and changes nothing; other versions pass."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engines import Executable
from engines.processes.isolation import Outcome
from pipeline.promotion import measuring
from pipeline.promotion.promoting import promote
from registry.promotion import PromotionRefused
from registry.store.registry import Registry
from runtime.opening import open_candidate
from stages.errors import NotMeasuredError
from stages.judging import validate
from tests.models.project import PASSED, TARGET, Built, answer, cli, described, resealed

Edit = Callable[[Path, dict[str, Any]], None]


def state(registry: Registry) -> dict[str, Any]:
    """Everything that a promotion may change."""
    return {v.ref: (v.aliases, dict(v.tags)) for v in registry.versions("jets")}


def refused(registry: Registry, ref: str, gate: str, **options: Any) -> str:
    """The detail of the one gate that refuses; the promotion changes nothing."""
    before = state(registry)
    with pytest.raises(PromotionRefused) as caught:
        promote(registry, ref, "production", **options)
    assert state(registry) == before
    (refusal,) = [decision for decision in caught.value.decisions if not decision.passed]
    assert refusal.gate == gate
    assert str(caught.value) == f"{ref} to @production refused: {gate}: {refusal.detail}"
    return refusal.detail


@pytest.fixture
def damaged(registry: Registry) -> Registry:
    """The registry, in which a file of jets/1 is empty."""
    folder = registry.local_path(registry.find("jets"))
    assert folder is not None
    (folder / "reference.safetensors").write_bytes(b"")
    return registry


PROMOTE = ("promote", "jets/1", "--to", "production")


def test_a_refused_promotion_names_the_gate(damaged: Registry) -> None:
    result = cli(*PROMOTE, "--registry", damaged.uri, code=1)
    assert "REFUSED" in result.stdout
    line = result.stderr.splitlines()[-1]
    assert line.startswith("pipeline: jets/1 to @production refused: digests: ")
    assert "reference.safetensors is truncated or altered (0 bytes" in line


def test_a_refused_promotion_as_json(damaged: Registry) -> None:
    report = answer(*PROMOTE, registry=damaged, code=1)
    assert report["promoted"] is None
    refused = [decision for decision in report["decisions"] if not decision["passed"]]
    assert [decision["gate"] for decision in refused] == ["digests"]


def test_a_validation_without_time_is_no_verdict(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_VALIDATION_LIMIT_S", 1e-6)
    before, events = state(registry), registry.history("jets")
    with pytest.raises(NotMeasuredError, match=r"could not be validated: no answer"):
        promote(registry, "jets/1", "production")
    assert (state(registry), registry.history("jets")) == (before, events)


def registered(registry: Registry, built: Built, folder: Path, edit: Edit) -> str:
    """The version of an edited copy of the bundle, which is sealed again."""
    return registry.register(resealed(built.bundle, folder, edit)).ref


FAR = "cuda/sm_90"


@pytest.fixture
def cross_built(registry: Registry, jets: Built, tmp_path: Path) -> str:
    """A version with a required target that no device here can run."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][FAR] = {**manifest["targets"][TARGET], "status": "unverified"}
        manifest["provenance"]["config"]["gates"]["required_targets"] = [FAR]

    return registered(registry, jets, tmp_path / "edited", edit)


def test_a_target_that_no_device_has_run_is_refused(registry: Registry, cross_built: str) -> None:
    before = state(registry)
    with pytest.raises(PromotionRefused) as caught:
        promote(registry, cross_built, "production")
    assert state(registry) == before
    decisions = {d.gate: (d.passed, d.found) for d in caught.value.decisions}
    assert decisions["verified"] == (False, "unverified")
    assert decisions["tolerance"] == (False, "not run")


def test_a_target_that_no_device_has_run_may_be_allowed_by_name(
    registry: Registry, cross_built: str
) -> None:
    options = ("--to", "production", "--allow-unverified", FAR)
    report = answer("promote", cross_built, *options, registry=registry)
    details = {decision["gate"]: decision["detail"] for decision in report["decisions"]}
    assert "no device of this kind has run it; allowed by name" in details["verified"]
    assert registry.find("jets@production").ref == cross_built


def test_an_artifact_of_another_model_is_refused(
    registry: Registry, jets: Built, heavy: Built, tmp_path: Path
) -> None:
    """It is sealed and recorded as verified: only running it again shows the error."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")
        manifest["targets"][TARGET]["chosen"] = "exported"

    ref = registered(registry, jets, tmp_path / "edited", edit)
    detail = refused(registry, ref, "tolerance")
    assert re.search(rf"{TARGET}: output probabilities has a fraction of (0\.9|1 )", detail)
    assert "limit 0; largest deviation 0." in detail


class Faulty(Executable):
    """A right artifact that changes one answer in calls for which `is_wrong` is true.

    `is_wrong` gets the number of rows and the answers.
    """

    def __init__(self, right: Executable, is_wrong: Callable[[int, torch.Tensor], bool]) -> None:
        self.right, self.is_wrong = right, is_wrong

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.right(arguments)
        n, answers = arguments[0].shape[0], arguments[-1]
        if n and self.is_wrong(n, answers):
            answers[0, 0] += 1


@pytest.mark.parametrize("faulty", [True, False])
@pytest.mark.parametrize("taken", [{"windows": True}, {"windows": False, "tile": 64}])
def test_rows_are_judged_again_as_production_takes_them(
    registry: Registry, jets: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    taken: dict[str, Any], faulty: bool,
) -> None:  # fmt: skip
    """An artifact that is right on whole collections, but not in windows or tiles, is refused."""

    def is_wrong(n: int, answers: torch.Tensor) -> bool:
        in_window = answers.data_ptr() % 128 != 0  # a whole collection is aligned
        return faulty and (in_window if taken["windows"] else n == taken["tile"])

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["chosen"] = "exported"
        manifest["targets"][TARGET]["candidates"]["exported"] |= taken

    def validate_in_this_process(
        _: str, payload: dict[str, Any], folder: Path, *rest: object
    ) -> Outcome:
        return Outcome(validate.validate_here(**payload), None, folder, folder)

    ref = registered(registry, jets, tmp_path / "edited", edit)
    opened = open_candidate
    monkeypatch.setattr(validate, "open_candidate", lambda *a: Faulty(opened(*a), is_wrong))
    monkeypatch.setattr(validate, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(validate, "run_isolated", validate_in_this_process)
    if faulty:
        assert refused(registry, ref, "tolerance")
    else:
        assert promote(registry, ref, "production", dry_run=True).passed


def edit_answers(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the reference's answers; `edit` gets them by name."""
    path = folder / "reference.safetensors"
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(path)
    edit({name: tensor for name, tensor in tensors.items() if name.startswith("output/")})
    save_file(tensors, path, metadata)


def test_a_reference_with_one_other_number_refuses_the_version(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    def shift_one(answers: dict[str, torch.Tensor]) -> None:
        max(answers.values(), key=len)[500, 1] += 0.25

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        edit_answers(folder, shift_one)
        manifest["targets"][TARGET]["chosen"] = "exported"

    ref = registered(registry, jets, tmp_path / "edited", edit)
    detail = refused(registry, ref, "tolerance")
    assert detail.endswith("limit 0; largest deviation 0.25")


@pytest.mark.parametrize("limit", [{}, {"nonfinite": 0.99}])
def test_a_reference_without_a_finite_value_is_refused(
    registry: Registry, jets: Built, tmp_path: Path, limit: dict[str, float]
) -> None:
    """Refused without a limit, as in old versions, and with any limit: no value is finite."""

    def erase(answers: dict[str, torch.Tensor]) -> None:
        for tensor in answers.values():
            tensor[:] = float("nan")

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        edit_answers(folder, erase)
        manifest["provenance"]["config"]["reference"] = {"seed": 1, **limit}

    ref = registered(registry, jets, tmp_path / "edited", edit)
    with pytest.raises(PromotionRefused) as caught:
        promote(registry, ref, "production")
    (gate,) = [d for d in caught.value.decisions if d.gate == "reference"]
    assert not gate.passed
    assert "no value at all is finite at n=1" in gate.detail
    assert "column 'x', row 0" in gate.detail


def test_a_policy_may_name_a_larger_reference_set(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """The gate compares each row with the portable program."""
    names = load_file(jets.bundle.file("reference.safetensors"))
    torch.manual_seed(5)
    save_file(
        {name: torch.randn(1500) for name in names if name.startswith("input/")},
        tmp_path / "many.safetensors",
    )
    (tmp_path / "policy.yaml").write_text("reference: many.safetensors\n")
    cli("policy", tmp_path / "policy.yaml", "--model", "jets", "--registry", registry.uri)
    (tmp_path / "many.safetensors").unlink()  # the registry has a copy
    assessment = promote(registry, "jets/1", "staging", dry_run=True)
    (gate,) = [d for d in assessment.decisions if d.gate == "reference set"]
    assert (gate.passed, gate.found) == (True, "outside 0")
    assert f"{TARGET}: {jets.bundle.manifest.targets[TARGET].chosen} beside" in gate.detail
    assert assessment.passed


@pytest.fixture
def slower(registry: Registry, heavy: Built) -> Registry:
    """jets/1 is in production; jets/2 has forty times the weights."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    registry.register(heavy.bundle)
    return registry


def test_a_version_slower_than_that_in_place_is_refused(slower: Registry) -> None:
    detail = refused(slower, "jets/2", "speed")
    assert f"{TARGET} at n=1000: median " in detail
    assert "s of jets/1, ratio " in detail
    assert float(detail.partition("ratio ")[2].partition(",")[0]) > 1.1
    assert detail.endswith("limit 1.1")


def test_a_user_sets_how_much_slower_a_version_may_be(slower: Registry) -> None:
    options = ("--to", "production", "--max-slowdown", "100000")
    report = answer("promote", "jets/2", *options, registry=slower)
    assert (report["promoted"], report["replaced"]) == ("jets/2", "jets/1")
    (speed,) = [decision for decision in report["decisions"] if decision["gate"] == "speed"]
    assert speed["limit"] == "ratio <= 100000"
    assert slower.find("jets@previous").ref == "jets/1"


def test_a_broken_version_in_place_cannot_be_compared_with(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """The gate says so, and refuses."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    folder = registry.local_path(registry.find("jets/1"))
    assert folder is not None
    (folder / "model.ts").unlink()
    ref = registry.register(described(jets.bundle, tmp_path / "other", "other")).ref
    before = state(registry)
    lines: list[str] = []
    with pytest.raises(PromotionRefused, match="not measured beside jets/1") as caught:
        promote(registry, ref, "production", say=lines.append)
    assert [d.gate for d in caught.value.decisions if not d.passed] == ["speed"]
    assert any("model.ts is missing" in line and "jets/1" in line for line in lines)
    assert state(registry) == before


def test_alias_of_ones_own_compares_with_its_holder(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """`staging` is compared with its own version in place; production is not changed."""
    other = registry.register(described(jets.bundle, tmp_path / "other", "other"))
    registry.promote(registry.find("jets/1"), "production", PASSED)
    lines: list[str] = []
    assessment = promote(registry, other.ref, "staging", say=lines.append)
    assert assessment.replaced is None
    assert not any("beside" in line for line in lines)
    assert [d.found for d in assessment.decisions if d.gate == "speed"] == ["no version in place"]
    aliases = {v.ref: v.aliases for v in registry.versions("jets")}
    assert aliases == {"jets/1": ("production",), "jets/2": ("staging",)}
