"""Promotion: each gate refuses with its number and changes nothing; other versions pass."""

from __future__ import annotations

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
    (no,) = [decision for decision in caught.value.decisions if not decision.passed]
    assert no.gate == gate
    assert str(caught.value) == f"{ref} to @production refused: {gate}: {no.detail}"
    return no.detail


def test_command_names_the_gate_and_exits_with_1(registry: Registry) -> None:
    folder = registry.local_path(registry.find("jets"))
    assert folder is not None
    (folder / "reference.safetensors").write_bytes(b"")
    asked = ("promote", "jets/1", "--to", "production", "--registry", registry.uri)
    text = cli(*asked, code=1)
    assert "REFUSED" in text.stdout
    line = text.stderr.splitlines()[-1]
    assert line.startswith("pipeline: jets/1 to @production refused: digests: ")
    assert "reference.safetensors is truncated or altered (0 bytes" in line
    said = answer(*asked[:-2], registry=registry, code=1)
    assert said["promoted"] is None
    assert [d["gate"] for d in said["decisions"] if not d["passed"]] == ["digests"]


def test_what_fails_for_want_of_time_is_no_verdict(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_VALIDATION_LIMIT_S", 1e-6)
    before, events = state(registry), registry.history("jets")
    with pytest.raises(NotMeasuredError, match=r"could not be validated: no answer"):
        promote(registry, "jets/1", "production")
    assert (state(registry), registry.history("jets")) == (before, events)


def registered(registry: Registry, built: Built, folder: Path, edit: Edit) -> str:
    return registry.register(resealed(built.bundle, folder, edit)).ref


def test_target_that_no_device_has_run(registry: Registry, jets: Built, tmp_path: Path) -> None:
    """Only the status of such a target, which was cross-built, is a reason to refuse it."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"]["cuda/sm_90"] = {**manifest["targets"][TARGET], "status": "unverified"}
        manifest["provenance"]["config"]["gates"]["required_targets"] = ["cuda/sm_90"]

    ref = registered(registry, jets, tmp_path / "edited", edit)
    before = state(registry)
    with pytest.raises(PromotionRefused) as caught:
        promote(registry, ref, "production")
    assert state(registry) == before
    found = {d.gate: (d.passed, d.found) for d in caught.value.decisions}
    assert found["verified"] == (False, "unverified")
    assert found["tolerance"] == (False, "not run")

    asked = ("promote", ref, "--to", "production", "--allow-unverified", "cuda/sm_90")
    done = answer(*asked, registry=registry)
    decisions = {d["gate"]: d["detail"] for d in done["decisions"]}
    assert "no device of this kind has run it; allowed by name" in decisions["verified"]
    assert registry.find("jets@production").ref == ref


def test_artifact_of_another_model(
    registry: Registry, jets: Built, heavy: Built, tmp_path: Path
) -> None:
    """It is sealed and recorded as verified: only running it again shows the error."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        shutil.copy(heavy.bundle.file("program.pt2"), folder / "program.pt2")
        manifest["targets"][TARGET]["chosen"] = "exported"

    ref = registered(registry, jets, tmp_path / "edited", edit)
    detail = refused(registry, ref, "tolerance")
    assert f"{TARGET}: output probabilities has a fraction of 0.9" in detail or (
        f"{TARGET}: output probabilities has a fraction of 1 " in detail
    )
    assert "limit 0; largest deviation 0." in detail


class Faulty(Executable):
    """A right artifact that changes one answer if `at` says so."""

    def __init__(self, right: Executable, at: Callable[[int, torch.Tensor], bool]) -> None:
        self.right, self.at = right, at

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.right(arguments)
        n, answers = arguments[0].shape[0], arguments[-1]
        if n and self.at(n, answers):
            answers[0, 0] += 1


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (lambda n, answers: answers.data_ptr() % 128 != 0, {"windows": True}),
        (lambda n, answers: n == 64, {"tile": 64}),
    ],
    ids=["windows", "tiles"],
)
def test_rows_are_judged_again_as_production_takes_them(
    registry: Registry, jets: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    at: Callable[[int, torch.Tensor], bool], says: dict[str, Any],
) -> None:  # fmt: skip
    """The artifact is right on whole collections, but not in windows or tiles."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["chosen"] = "exported"
        manifest["targets"][TARGET]["candidates"]["exported"] |= {"windows": False, **says}

    def here(_: str, payload: dict[str, Any], folder: Path, *rest: object) -> Outcome:
        return Outcome(validate.validate_here(**payload), None, folder, folder)

    ref = registered(registry, jets, tmp_path / "edited", edit)
    opened = open_candidate
    faulty = lambda *a: Faulty(opened(*a), at)  # noqa: E731
    monkeypatch.setattr(validate, "open_candidate", faulty)
    monkeypatch.setattr(validate, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(validate, "run_isolated", here)
    assert refused(registry, ref, "tolerance")
    at = lambda n, answers: False  # noqa: E731
    assert promote(registry, ref, "production", dry_run=True).passed


def edit_answers(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the reference's answers; `edit` gets them by name."""
    path = folder / "reference.safetensors"
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(path)
    edit({name: tensor for name, tensor in tensors.items() if name.startswith("output/")})
    save_file(tensors, path, metadata)


def test_reference_with_one_other_number(registry: Registry, jets: Built, tmp_path: Path) -> None:
    def other(found: dict[str, torch.Tensor]) -> None:
        max(found.values(), key=len)[500, 1] += 0.25

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        edit_answers(folder, other)
        manifest["targets"][TARGET]["chosen"] = "exported"

    ref = registered(registry, jets, tmp_path / "edited", edit)
    detail = refused(registry, ref, "tolerance")
    assert detail.endswith("limit 0; largest deviation 0.25")


@pytest.mark.parametrize("limit", [{}, {"nonfinite": 0.99}])
def test_reference_that_is_mostly_nan(
    registry: Registry, jets: Built, tmp_path: Path, limit: dict[str, float]
) -> None:
    """Refused without a limit, as in old versions, and with any limit: no value is finite."""

    def nan(found: dict[str, torch.Tensor]) -> None:
        for tensor in found.values():
            tensor[:] = float("nan")

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        edit_answers(folder, nan)
        manifest["provenance"]["config"]["reference"] = {"seed": 1, **limit}

    ref = registered(registry, jets, tmp_path / "edited", edit)
    with pytest.raises(PromotionRefused) as caught:
        promote(registry, ref, "production")
    (gate,) = [d for d in caught.value.decisions if d.gate == "reference"]
    assert not gate.passed
    assert "no value at all is finite at n=1" in gate.detail
    assert "column 'x', row 0" in gate.detail


def test_larger_reference_set(registry: Registry, jets: Built, tmp_path: Path) -> None:
    """Named by the registry's policy; the gate compares each row with the portable program."""
    names = load_file(jets.bundle.file("reference.safetensors"))
    torch.manual_seed(5)
    save_file(
        {name: torch.randn(1500) for name in names if name.startswith("input/")},
        tmp_path / "many.safetensors",
    )
    (tmp_path / "policy.yaml").write_text("reference: many.safetensors\n")
    cli("policy", tmp_path / "policy.yaml", "--model", "jets", "--registry", registry.uri)
    (tmp_path / "many.safetensors").unlink()  # the registry has a copy
    found = promote(registry, "jets/1", "staging", dry_run=True)
    (gate,) = [d for d in found.decisions if d.gate == "reference set"]
    assert (gate.passed, gate.found) == (True, "outside 0")
    assert f"{TARGET}: {jets.bundle.manifest.targets[TARGET].chosen} beside" in gate.detail
    assert found.passed


def test_slower_than_the_version_in_place(registry: Registry, heavy: Built) -> None:
    registry.promote(registry.find("jets/1"), "production", PASSED)
    registry.register(heavy.bundle)
    detail = refused(registry, "jets/2", "speed")
    assert f"{TARGET} at n=1000: median " in detail
    assert "s of jets/1, ratio " in detail
    assert float(detail.partition("ratio ")[2].partition(",")[0]) > 1.1
    assert detail.endswith("limit 1.1")

    asked = ("promote", "jets/2", "--to", "production", "--max-slowdown", "100000")
    done = answer(*asked, registry=registry)
    assert (done["promoted"], done["replaced"]) == ("jets/2", "jets/1")
    (speed,) = [d for d in done["decisions"] if d["gate"] == "speed"]
    assert speed["limit"] == "ratio <= 100000"
    assert registry.find("jets@previous").ref == "jets/1"


def test_version_in_place_is_broken(registry: Registry, jets: Built, tmp_path: Path) -> None:
    """It cannot be compared with: the gate says so, and refuses."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    folder = registry.local_path(registry.find("jets/1"))
    assert folder is not None
    (folder / "model.ts").unlink()
    ref = registry.register(described(jets.bundle, tmp_path / "other", "other")).ref
    before = state(registry)
    said: list[str] = []
    with pytest.raises(PromotionRefused, match="not measured beside jets/1") as refused:
        promote(registry, ref, "production", say=said.append)
    assert [d.gate for d in refused.value.decisions if not d.passed] == ["speed"]
    assert any("model.ts is missing" in text and "jets/1" in text for text in said)
    assert state(registry) == before


def test_alias_of_ones_own_compares_with_its_holder(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """`staging` is compared with its own version in place; production is not changed."""
    other = registry.register(described(jets.bundle, tmp_path / "other", "other"))
    registry.promote(registry.find("jets/1"), "production", PASSED)
    said: list[str] = []
    done = promote(registry, other.ref, "staging", say=said.append)
    assert done.replaced is None
    assert not any("beside" in line for line in said)
    assert [d.found for d in done.decisions if d.gate == "speed"] == ["no version in place"]
    aliases = {v.ref: v.aliases for v in registry.versions("jets")}
    assert aliases == {"jets/1": ("production",), "jets/2": ("staging",)}
