"""Policies as data: what several of them require together, and where they are kept."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from pydantic import ValidationError

from registry import Bundle, NotFoundError, PromotionRefused, Registry, RegistryError
from registry.promotion.policy import Asked, Policy, ReferenceFile, duration, strictest
from tests.models.bundles import PASSED, V3
from tests.models.mlflow_server import client_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30min", 1800), ("24h", 86400), ("1.5 d", 129600)]
)
def test_duration(text: str, seconds: float) -> None:
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1w", "1e3h", "inf h", "9999999d"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and s, min, h or d"):
        duration(text)
    with pytest.raises(ValidationError):
        Policy(min_time_in_staging=text)


def asked(policy: Policy, origin: str = "p", sha256: str = "") -> Asked:
    return Asked(policy, origin, ReferenceFile(Path(sha256), sha256) if sha256 else None)


def test_no_policy_is_the_configs_gates() -> None:
    found = strictest([V3], 0.1, 1.1, [])
    assert (found.targets, found.max_outside, found.max_slowdown) == ((V3,), 0.1, 1.1)
    assert (found.named_targets, found.references, found.approvals) == (frozenset(), (), ())
    assert not found.min_time_in_staging


ONE = Policy(
    targets=("cuda/sm_90",),
    max_slowdown=1.5,
    max_outside_by_output={"y": 0.1, "z": 0.2},
    min_time_in_staging="2d",
    approvals=("Ada",),
)
OTHER = Policy(
    max_slowdown=1.05,
    max_outside=0.01,
    max_outside_by_output={"y": 0.2},
    min_time_in_staging="24h",
    approvals=("Bob", "Ada"),
)
in_both_orders = pytest.mark.parametrize("policies", [(ONE, OTHER), (OTHER, ONE)])


@in_both_orders
def test_the_strictest_limit_of_several_policies_counts(policies: tuple[Policy, Policy]) -> None:
    found = strictest([V3], 0.1, 1.1, [asked(policy) for policy in policies])
    assert (found.max_outside, found.max_slowdown) == (0.01, 1.05)
    assert found.max_outside_by_output == {"y": 0.1, "z": 0.2}
    assert found.min_time_in_staging == timedelta(days=2)


@in_both_orders
def test_what_several_policies_ask_for_adds_up(policies: tuple[Policy, Policy]) -> None:
    all_asked = [asked(policy, sha256=str(i)) for i, policy in enumerate(policies)]
    found = strictest([V3], 0.1, 1.1, all_asked)
    assert found.targets == (V3, "cuda/sm_90")
    assert found.named_targets == {"cuda/sm_90"}
    assert set(found.approvals) == {"Ada", "Bob"}
    assert len(found.references) == 2


@in_both_orders
def test_approvals_and_staging_are_for_production(policies: tuple[Policy, Policy]) -> None:
    found = strictest([V3], 0.1, 1.1, [asked(policy) for policy in policies], production=False)
    assert (found.max_outside, found.approvals) == (0.01, ())
    assert not found.min_time_in_staging


limits = st.none() | st.floats(0, 1)


@given(st.lists(st.tuples(limits, limits), max_size=4), st.tuples(limits, limits))
def test_another_policy_never_loosens(
    some: list[tuple[float | None, float | None]], more: tuple[float | None, float | None]
) -> None:
    def policy(pair: tuple[float | None, float | None]) -> Asked:
        outside, slowdown = pair
        return asked(
            Policy(max_outside=outside, max_slowdown=None if slowdown is None else slowdown + 1)
        )

    before = strictest([V3], 0.5, 1.5, [policy(pair) for pair in some])
    after = strictest([V3], 0.5, 1.5, [policy(pair) for pair in [*some, more]])
    assert after.max_outside <= before.max_outside
    assert after.max_slowdown <= before.max_slowdown


class TestKept:
    def test_the_last_policy_for_all_models_counts(self, registry: Registry) -> None:
        assert registry.policies() == []
        registry.set_policy(Policy(max_slowdown=1.2))
        registry.set_policy(Policy(max_slowdown=1.3))
        (every,) = registry.policies("tracks")
        assert every.policy == Policy(max_slowdown=1.3)
        assert every.origin.startswith("the registry's policy, set by ")

    def test_a_model_has_a_policy_beside_that_for_all(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        registry.register(bundle)
        for_all, own = Policy(max_slowdown=1.2), Policy(approvals=("Ada",))
        registry.set_policy(for_all)
        registry.set_policy(own, "jets")
        assert [each.policy for each in registry.policies("jets")] == [for_all, own]

    def test_a_policy_of_no_model(self, registry: Registry) -> None:
        with pytest.raises(NotFoundError):
            registry.set_policy(Policy(), "tracks")

    def test_a_promotion_that_did_not_ask_it(self, registry: Registry, bundle: Bundle) -> None:
        """A policy set while the gates measured, or ignored by a program, still refuses."""
        version = registry.register(bundle)
        registry.set_policy(Policy(approvals=("Ada",)))
        (asked_for,) = registry.policies("jets")
        with pytest.raises(PromotionRefused, match=r"policy: the registry's policy, .* not asked"):
            registry.promote(version, "staging", PASSED)
        registry.promote(version, "staging", PASSED, policies=[asked_for.origin])
        registry.set_policy(Policy(approvals=("Ada", "Bob")))
        with pytest.raises(PromotionRefused):
            registry.promote(version, "staging", PASSED, policies=[asked_for.origin])

    def test_its_reference_set_comes_along(self, registry: Registry, tmp_path: Path) -> None:
        (tmp_path / "big.safetensors").write_bytes(b"numbers")
        policy = Policy(reference="data/big.safetensors")
        registry.set_policy(policy, reference=tmp_path / "big.safetensors")
        (tmp_path / "big.safetensors").write_bytes(b"others")
        assert registry.policies()[0].reference is None  # showing it copies nothing
        (found,) = registry.policies(into=tmp_path)
        assert found.reference is not None
        assert found.reference.path.read_bytes() == b"numbers"

        (stored,) = (tmp_path / "store" / "artifacts").rglob("big.safetensors")
        stored.write_bytes(b"forged")
        (tmp_path / "again").mkdir()
        with pytest.raises(RegistryError, match="its reference set is not the file that was name"):
            registry.policies(into=tmp_path / "again")

    def test_a_policy_whose_setting_was_killed_asks_for_nothing(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        def set_and_killed() -> None:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(MlflowClient, "set_terminated", killed)
                registry.set_policy(Policy(max_slowdown=1.3))

        set_and_killed()
        assert registry.policies() == []
        registry.set_policy(Policy(max_slowdown=1.2))
        set_and_killed()
        assert [each.policy for each in registry.policies()] == [Policy(max_slowdown=1.2)]

    def test_deleting_its_run_does_not_lift_it(self, registry: Registry) -> None:
        registry.set_policy(Policy(max_slowdown=1.2))
        client = client_of(registry)
        experiment = client.get_experiment_by_name("soa-pipeline policy")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        client.delete_run(run.info.run_id)
        assert [each.policy for each in registry.policies()] == [Policy(max_slowdown=1.2)]

    def test_of_a_newer_installation(self, registry: Registry) -> None:
        registry.set_policy(Policy(max_slowdown=1.2))
        client = client_of(registry)
        (run,) = client.search_runs(["1"])
        client.set_tag(run.info.run_id, "soa.policy", '{"signature": "required"}')
        with pytest.raises(RegistryError, match=r"cannot be read.*update soa-pipeline"):
            registry.policies()
