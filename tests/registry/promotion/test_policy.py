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
from registry.promotion.policy import (
    Policy,
    ReferenceFile,
    SourcedPolicy,
    parse_duration,
    strictest,
)
from tests.models.bundles import PASSED, V3
from tests.models.mlflow_server import client_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30min", 1800), ("24h", 86400), ("1.5 d", 129600)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1w", "1e3h", "inf h", "9999999d"])
def test_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and s, min, h or d"):
        parse_duration(text)
    with pytest.raises(ValidationError):
        Policy(min_time_in_staging=text)


def asked(policy: Policy, origin: str = "p", sha256: str = "") -> SourcedPolicy:
    """A policy as gates get it; with a digest, it has a reference set."""
    return SourcedPolicy(policy, origin, ReferenceFile(Path(sha256), sha256) if sha256 else None)


def test_without_a_policy_the_limits_of_the_config_count() -> None:
    requirements = strictest([V3], 0.1, 1.1, [])
    assert (requirements.targets, requirements.max_outside, requirements.max_slowdown) == (
        (V3,),
        0.1,
        1.1,
    )
    assert (requirements.named_targets, requirements.references, requirements.approvals) == (
        frozenset(),
        (),
        (),
    )
    assert not requirements.min_time_in_staging


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
    requirements = strictest([V3], 0.1, 1.1, [asked(policy) for policy in policies])
    assert (requirements.max_outside, requirements.max_slowdown) == (0.01, 1.05)
    assert requirements.max_outside_by_output == {"y": 0.1, "z": 0.2}
    assert requirements.min_time_in_staging == timedelta(days=2)


@in_both_orders
def test_what_several_policies_ask_for_adds_up(policies: tuple[Policy, Policy]) -> None:
    all_asked = [asked(policy, sha256=str(i)) for i, policy in enumerate(policies)]
    requirements = strictest([V3], 0.1, 1.1, all_asked)
    assert requirements.targets == (V3, "cuda/sm_90")
    assert requirements.named_targets == {"cuda/sm_90"}
    assert set(requirements.approvals) == {"Ada", "Bob"}
    assert len(requirements.references) == 2


@in_both_orders
def test_approvals_and_staging_are_for_production(policies: tuple[Policy, Policy]) -> None:
    requirements = strictest(
        [V3], 0.1, 1.1, [asked(policy) for policy in policies], production=False
    )
    assert (requirements.max_outside, requirements.approvals) == (0.01, ())
    assert not requirements.min_time_in_staging


limits = st.none() | st.floats(0, 1)


@given(st.lists(st.tuples(limits, limits), max_size=4), st.tuples(limits, limits))
def test_another_policy_never_loosens(
    policies: list[tuple[float | None, float | None]], another: tuple[float | None, float | None]
) -> None:
    """A pair is the limit on values outside, and how much slower a version may be."""

    def policy(outside: float | None, slower: float | None) -> SourcedPolicy:
        slowdown = None if slower is None else 1 + slower
        return asked(Policy(max_outside=outside, max_slowdown=slowdown))

    before = strictest([V3], 0.5, 1.5, [policy(*pair) for pair in policies])
    after = strictest([V3], 0.5, 1.5, [policy(*pair) for pair in [*policies, another]])
    assert after.max_outside <= before.max_outside
    assert after.max_slowdown <= before.max_slowdown


class TestPoliciesOfARegistry:
    def test_the_last_policy_for_all_models_counts(self, registry: Registry) -> None:
        assert registry.policies() == []
        registry.set_policy(Policy(max_slowdown=1.2))
        registry.set_policy(Policy(max_slowdown=1.3))
        (for_all,) = registry.policies("tracks")
        assert for_all.policy == Policy(max_slowdown=1.3)
        assert for_all.origin.startswith("the registry's policy, set by ")

    def test_a_model_has_a_policy_beside_that_for_all(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        registry.register(bundle)
        for_all, own = Policy(max_slowdown=1.2), Policy(approvals=("Ada",))
        registry.set_policy(for_all)
        registry.set_policy(own, "jets")
        assert [stored.policy for stored in registry.policies("jets")] == [for_all, own]

    def test_a_policy_for_a_missing_model_is_refused(self, registry: Registry) -> None:
        with pytest.raises(NotFoundError):
            registry.set_policy(Policy(), "tracks")

    def test_a_promotion_that_did_not_ask_it(self, registry: Registry, bundle: Bundle) -> None:
        """It is refused: the policy was set while the gates measured, or a program ignored it."""
        version = registry.register(bundle)
        registry.set_policy(Policy(approvals=("Ada",)))
        with pytest.raises(PromotionRefused, match=r"policy: the registry's policy, .* not asked"):
            registry.promote(version, "staging", PASSED)

    def test_a_promotion_that_asked_an_older_policy_is_refused(
        self, registry: Registry, bundle: Bundle
    ) -> None:
        version = registry.register(bundle)
        registry.set_policy(Policy(approvals=("Ada",)))
        (first,) = registry.policies("jets")
        registry.promote(version, "staging", PASSED, policies=[first.origin])
        registry.set_policy(Policy(approvals=("Ada", "Bob")))
        with pytest.raises(PromotionRefused):
            registry.promote(version, "staging", PASSED, policies=[first.origin])

    @pytest.fixture
    def reference(self, registry: Registry, tmp_path: Path) -> Path:
        """The stored reference set of a policy."""
        (tmp_path / "big.safetensors").write_bytes(b"numbers")
        policy = Policy(reference="data/big.safetensors")
        registry.set_policy(policy, reference=tmp_path / "big.safetensors")
        (tmp_path / "big.safetensors").write_bytes(b"others")
        (stored,) = (tmp_path / "store" / "artifacts").rglob("big.safetensors")
        return stored

    @pytest.mark.usefixtures("reference")
    def test_a_reference_set_is_stored_with_its_policy(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        (policy,) = registry.policies(into=tmp_path)
        assert policy.reference is not None
        assert policy.reference.path.read_bytes() == b"numbers"

    @pytest.mark.usefixtures("reference")
    def test_a_policy_is_shown_without_its_reference_set(self, registry: Registry) -> None:
        assert registry.policies()[0].reference is None

    def test_a_reference_set_that_was_altered_is_refused(
        self, registry: Registry, reference: Path, tmp_path: Path
    ) -> None:
        reference.write_bytes(b"forged")
        with pytest.raises(RegistryError, match="its reference set is not the file that was name"):
            registry.policies(into=tmp_path)

    def test_a_policy_whose_setting_was_killed_asks_for_nothing(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def be_killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        def set_and_be_killed() -> None:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(MlflowClient, "set_terminated", be_killed)
                registry.set_policy(Policy(max_slowdown=1.3))

        set_and_be_killed()
        assert registry.policies() == []
        registry.set_policy(Policy(max_slowdown=1.2))
        set_and_be_killed()
        assert [stored.policy for stored in registry.policies()] == [Policy(max_slowdown=1.2)]

    def test_a_policy_whose_run_was_deleted_still_counts(self, registry: Registry) -> None:
        registry.set_policy(Policy(max_slowdown=1.2))
        client = client_of(registry)
        experiment = client.get_experiment_by_name("soa-pipeline policy")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        client.delete_run(run.info.run_id)
        assert [stored.policy for stored in registry.policies()] == [Policy(max_slowdown=1.2)]

    def test_a_policy_with_an_unknown_field_is_refused(self, registry: Registry) -> None:
        registry.set_policy(Policy(max_slowdown=1.2))
        client = client_of(registry)
        (run,) = client.search_runs(["1"])
        client.set_tag(run.info.run_id, "soa.policy", '{"signature": "required"}')
        with pytest.raises(RegistryError, match=r"cannot be read.*update soa-pipeline"):
            registry.policies()
