"""Policies from the file to the gate, and the history that the command shows.

The versions are bundles for a target that this host does not run. So nothing is measured, the gates
that need a measurement refuse or are excused by name, and a promotion takes no time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config, load_policy
from pipeline.promotion.promoting import promote
from registry.bundle.bundle import Bundle
from registry.errors import RegistryError
from registry.promotion import PromotionRefused
from registry.promotion.policy import Policy, SourcedPolicy
from registry.store.registry import Registry
from tests.models import bundles
from tests.models.keys import make_keys
from tests.models.project import PASSED, answer, cli, refusal
from tests.models.versions import copy_of, store_of
from tests.pipeline.config import mistakes

ROOT = Path(__file__).parents[3]
FAR = bundles.FAR
EXCUSED = frozenset({FAR})


@pytest.fixture(scope="module")
def store_of_two(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `two`, made once for all tests."""
    folder = tmp_path_factory.mktemp("two")

    def fill(registry: Registry) -> None:
        for seed in range(2):
            bundles.write_bundle(folder / str(seed), bundles.elsewhere(), seed)
            registry.register(Bundle.open(folder / str(seed)))

    return store_of(tmp_path_factory, empty_database, fill)


@pytest.fixture
def two(store_of_two: Path, tmp_path: Path) -> Registry:
    """A registry with jets/1 and jets/2, for a device that this host lacks."""
    return copy_of(store_of_two, tmp_path / "store")


def write(folder: Path, text: str) -> Path:
    """Writes a policy."""
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def of_the_page(tmp_path: Path) -> SourcedPolicy:
    """The policy that the page shows."""
    page = (ROOT / "docs" / "howto" / "gates.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (text,) = [block for block in blocks if "approvals:" in block]
    (tmp_path / "big.safetensors").write_bytes(b"")
    make_keys(tmp_path, "release")
    return load_policy(write(tmp_path, text))


def test_the_page_shows_every_key(of_the_page: SourcedPolicy) -> None:
    shown = of_the_page.policy.model_dump(exclude_defaults=True)
    assert set(shown) == set(Policy.model_fields)


def test_the_page_names_outputs_of_the_demo(of_the_page: SourcedPolicy) -> None:
    demo = load_config(ROOT / "configs" / "demo.yaml")
    outputs = {output.name for output in demo.outputs}
    assert set(of_the_page.policy.max_outside_by_output) <= outputs


def test_a_policy_says_its_file_and_finds_others_from_its_folder(
    of_the_page: SourcedPolicy, tmp_path: Path
) -> None:
    assert of_the_page.origin.startswith("policy.yaml (")
    assert of_the_page.reference is not None
    assert of_the_page.reference.path == tmp_path / "big.safetensors"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("max_slowdwon: 1", 1, "max_slowdwon: unknown key; allowed: "),
        ("max_outside_by_output: {y: -1}", 1, "max_outside_by_output.y: found -1; it should be g"),
        ("min_time_in_staging: 24", 1, "min_time_in_staging: found 24; expected text (quote it)"),
        ("min_time_in_staging: soon", 1, "min_time_in_staging: found 'soon'; write a number and"),
        ("targets: [gpu]", 1, "targets[0]: unknown target 'gpu'"),
        ("targets: [cpu]", 1, "targets[0]: found 'cpu'; write it in full, as 'cpu/x86-64-v"),
        ("reference: big.safetensors", 1, "reference: big.safetensors does not exist"),
        ("signed_by:\n- nobody.pem", 2, "signed_by[0]: "),
    ],
)
def test_a_mistake_in_a_policy_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    (message,) = mistakes.refused(load_policy, tmp_path / "policy.yaml", text)
    assert message.startswith(f"{line}: {problem}"), message


def events(registry: Registry) -> list[tuple[str, int | None]]:
    """What happened to which version, in order."""
    return [(event.kind, event.version) for event in registry.history("jets")]


def answers(decisions: Any) -> dict[str, str]:
    """The answer of each gate, by its name."""
    return {decision.gate: decision.answer for decision in decisions}


def test_an_excused_target_has_a_target_s_name(two: Registry) -> None:
    command = ("promote", "jets/1", "--to", "staging", "--allow-unverified", "all")
    assert "unknown target 'all'" in cli(*command, "--registry", two.uri, code=1).stderr


DRY_RUN = ("promote", "jets/1", "--to", "production", "--dry-run")


def test_dry_run_of_what_would_be_refused(two: Registry) -> None:
    text = cli(*DRY_RUN, "--registry", two.uri, code=1).stdout
    assert "REFUSED" in text
    assert text.endswith("it would be refused; nothing was changed\n")
    assert answer(*DRY_RUN, registry=two, code=1)["would_promote"] is False


def test_dry_run_of_what_would_pass_shows_each_gate(two: Registry) -> None:
    text = cli(*DRY_RUN, "--allow-unverified", FAR, "--registry", two.uri).stdout
    assert text.endswith("it would pass; nothing was changed\n")
    for gate in ("digests", "verified", "tolerance", "speed"):
        assert gate in text


def test_dry_run_changes_nothing(two: Registry) -> None:
    cli(*DRY_RUN, "--registry", two.uri, code=1)
    cli(*DRY_RUN, "--allow-unverified", FAR, "--registry", two.uri)
    assert two.history("jets") == []
    assert two.find("jets/1").aliases == ()


@pytest.mark.parametrize("alias", ["previous", "latest", "a b"])
def test_dry_run_refuses_what_the_command_refuses(two: Registry, alias: str) -> None:
    command = ("promote", "jets/1", "--to", alias, "--allow-unverified", FAR, "--registry", two.uri)
    assert refusal(*command, "--dry-run") == refusal(*command)


def test_the_history_has_the_reason_of_a_promotion_and_of_a_refusal(two: Registry) -> None:
    command = (
        "promote",
        "jets/2",
        "--to",
        "production",
        "--registry",
        two.uri,
        "--reason",
        "why so",
    )
    cli(*command, code=1)
    cli(*command, "--allow-unverified", FAR)
    assert [(e.kind, e.reason) for e in two.history("jets")] == [
        ("refusal", "why so"),
        ("promotion", "why so"),
    ]
    assert cli("history", "jets", "--registry", two.uri).stdout.count("why so") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--override", "speed"), "takes a reason"),
        (("--override", "digests", "--reason", "r"), "'digests' cannot be overridden"),
    ],
)
def test_an_override_without_a_reason_or_of_digests_is_refused(
    two: Registry, options: tuple[str, ...], says: str
) -> None:
    command = ("promote", "jets/2", "--to", "production", "--registry", two.uri)
    assert says in refusal(*command, "--allow-unverified", FAR, *options)


def test_an_override_of_a_gate_that_does_not_exist_is_refused(two: Registry) -> None:
    with pytest.raises(RegistryError, match="no gate 'sped' was asked; there are: verified"):
        promote(two, "jets/2", "production", override=frozenset({"sped"}), reason="r", dry_run=True)


REASON = "the clocks were wrong that day"


@pytest.fixture
def refused(two: Registry, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """The promotion of jets/2, which was refused as its speed cannot be measured here."""
    monkeypatch.setenv("COLUMNS", "200")  # no line is broken
    promote(two, "jets/1", "production", allow_unverified=EXCUSED)
    excused = ("--allow-unverified", FAR, "--registry", two.uri)
    promotion = ("promote", "jets/2", "--to", "production", *excused)
    assert "speed: not measured beside jets/1" in cli(*promotion, code=1).stderr
    return promotion


def test_override_by_name_and_reason(two: Registry, refused: tuple[object, ...]) -> None:
    text = cli(*refused, "--override", "speed", "--reason", REASON).stdout
    assert f"(overridden: {REASON})" in text
    assert two.find("jets@production").number == 2
    assert answers(two.history("jets")[-1].decisions)["speed"] == "overridden"


def test_the_history_shows_a_refusal_and_its_override(
    two: Registry, refused: tuple[object, ...]
) -> None:
    cli(*refused, "--override", "speed", "--reason", REASON)
    text = " ".join(cli("history", "jets", "--registry", two.uri).stdout.split())
    assert f"{REASON}; speed overridden" in text
    assert "refused by speed" in text


def test_an_altered_version_cannot_be_overridden(two: Registry) -> None:
    folder = two.local_path(two.find("jets/1"))
    assert folder is not None
    (folder / "program.pt2").write_bytes(b"")
    over = frozenset({"speed", "verified"})
    with pytest.raises(PromotionRefused, match=r"digests: .*program\.pt2 is truncated"):
        promote(two, "jets/1", "production", override=over, reason="hurry")
    assert events(two) == [("refusal", 1)]


@pytest.mark.parametrize("options", [(), ("--model", "jets")], ids=["of all", "of a model"])
def test_the_policies_of_all_and_of_a_model_are_shown(
    two: Registry, tmp_path: Path, options: tuple[str, ...]
) -> None:
    uri = ("--registry", two.uri)
    cli("policy", write(tmp_path, "max_slowdown: 1.01\n"), *uri)
    cli("policy", write(tmp_path, "approvals: [ada]\n"), "--model", "jets", *uri)
    text = cli("policy", *options, *uri).stdout
    assert "max_slowdown: 1.01" in text and 'approvals: ["ada"]' in text


def test_a_model_that_does_not_exist_has_no_policy(two: Registry) -> None:
    assert "no such model" in refusal("policy", "--model", "tracks", "--registry", two.uri)


STRICT = f"targets: [{FAR}]\nmax_slowdown: 1.01\n"


def test_a_policy_is_set_and_shown(two: Registry, tmp_path: Path) -> None:
    uri = ("--registry", two.uri)
    assert "no policy" in cli("policy", *uri).stdout
    assert "max_slowdown: 1.01" in cli("policy", write(tmp_path, STRICT), *uri).stdout
    (shown,) = answer("policy", registry=two)
    assert shown["targets"] == [FAR]


def test_registrys_policy_is_not_loosened(two: Registry, tmp_path: Path) -> None:
    """Neither a local file nor options can loosen it."""
    two.set_policy(load_policy(write(tmp_path, STRICT)).policy)
    loose = tmp_path / "loose.yaml"
    loose.write_text("max_slowdown: 1000\n")
    options: Any = {"allow_unverified": EXCUSED, "max_slowdown": 1000.0, "policy": loose}
    assessment = promote(two, "jets/1", "production", dry_run=True, **options)
    assert not assessment.passed
    assert answers(assessment.decisions)["verified"] == "REFUSED"
    (speed,) = [decision for decision in assessment.decisions if decision.gate == "speed"]
    assert speed.limit == "ratio <= 1.01"
    origins = [re.split(r", | \(", origin)[0] for origin in assessment.policies]
    assert origins == ["the registry's policy", "loose.yaml"]


@pytest.fixture
def with_approvals(two: Registry, tmp_path: Path) -> Registry:
    """A registry that asks for two approvals and a time in staging before production."""
    policy = write(tmp_path, "approvals: [Ada, Bob]\nmin_time_in_staging: 0.001s")
    cli("policy", policy, "--registry", two.uri)
    return two


def refused_gates(registry: Registry) -> dict[str, str]:
    """The details of the gates that would refuse jets/1 for production."""
    options: Any = {"allow_unverified": EXCUSED, "dry_run": True}
    assessment = promote(registry, "jets/1", "production", **options)
    return {d.gate: d.detail for d in assessment.decisions if not d.passed}


def test_production_needs_staging_and_approvals(with_approvals: Registry) -> None:
    details = refused_gates(with_approvals)
    assert set(details) == {"staging", "approvals"}
    assert details["staging"].startswith("not in staging by a promotion")


def test_staging_needs_no_approval(with_approvals: Registry) -> None:
    promote(with_approvals, "jets/1", "staging", allow_unverified=EXCUSED)
    assert with_approvals.find("jets/1").aliases == ("staging",)


def test_an_approval_names_who_gave_and_who_recorded_it(with_approvals: Registry) -> None:
    where = ("--registry", with_approvals.uri)
    text = cli("approve", "jets/1", "--as", "Ada", "--reason", "the plots", *where).stdout
    assert text.startswith("jets/1 is approved by Ada (recorded by ")


def test_an_approval_is_of_one_version_only(with_approvals: Registry) -> None:
    promote(with_approvals, "jets/1", "staging", allow_unverified=EXCUSED)
    for ref, name in (("jets/1", "Ada"), ("jets/2", "Bob")):
        cli("approve", ref, "--as", name, "--registry", with_approvals.uri)
    assert refused_gates(with_approvals) == {
        "approvals": "approved by Ada; needed: Ada, Bob; missing: Bob (pipeline approve)"
    }


def test_the_history_names_the_policy_and_the_approvals(with_approvals: Registry) -> None:
    """Of a version that was refused first, and promoted with all approvals."""
    with pytest.raises(PromotionRefused):
        promote(with_approvals, "jets/1", "production", allow_unverified=EXCUSED)
    promote(with_approvals, "jets/1", "staging", allow_unverified=EXCUSED)
    for ref, name in (("jets/1", "Ada"), ("jets/2", "Bob"), ("jets/1", "Bob")):
        cli("approve", ref, "--as", name, "--registry", with_approvals.uri)
    promotion = promote(with_approvals, "jets/1", "production", allow_unverified=EXCUSED)
    assert promotion.version.ref == "jets/1"
    (origin,) = with_approvals.history("jets")[-1].policies
    assert origin.startswith("the registry's policy, set by ")
    assert events(with_approvals) == [
        ("refusal", 1), ("promotion", 1), ("approval", 1), ("approval", 2), ("approval", 1),
        ("promotion", 1),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def back(store_of_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """jets/1 in production, then jets/2, then jets/1 again by a rollback. It is only read."""
    registry = copy_of(store_of_two, tmp_path_factory.mktemp("back"))
    for ref in ("jets/1", "jets/2"):
        registry.promote(registry.find(ref), "production", PASSED)
    cli("rollback", "jets", "--reason", "the rate went up", "--registry", registry.uri)
    return registry


def test_history_of_a_model_to_which_nothing_happened(two: Registry) -> None:
    assert "nothing has happened to jets" in cli("history", "jets", "--registry", two.uri).stdout


def test_history_as_text_has_each_event(back: Registry) -> None:
    text = cli("history", "jets", "--registry", back.uri).stdout
    assert "history of jets, times in UTC" in text
    assert "rollback of jets/1" in text


def test_history_as_json_has_what_each_event_replaced(back: Registry) -> None:
    events: list[dict[str, Any]] = answer("history", "jets", registry=back)
    assert [event["kind"] for event in events] == ["promotion", "promotion", "rollback"]
    assert [event["replaced"] for event in events] == [None, 1, 2]
    assert events[2]["reason"] == "the rate went up"


def aliases_at(registry: Registry, moment: str) -> dict[str, str]:
    """The version of each alias at a time in ISO format."""
    return dict(answer("history", "jets", "--at", moment, registry=registry)["aliases"])


def test_the_aliases_after_each_event_are_known(back: Registry) -> None:
    assert [aliases_at(back, event.time.isoformat()) for event in back.history("jets")] == [
        {"production": "jets/1"},
        {"production": "jets/2", "previous": "jets/1"},
        {"production": "jets/1", "previous": "jets/2"},
    ]


def test_the_aliases_of_a_moment_as_text(back: Registry) -> None:
    moment = back.history("jets")[0].time.isoformat()
    text = cli("history", "jets", "--at", moment, "--registry", back.uri).stdout
    assert text.startswith("jets@production was jets/1 at ")


@pytest.mark.parametrize("zone", ["", "+00:00", "Z"])
def test_a_moment_without_a_zone_is_one_in_utc(back: Registry, zone: str) -> None:
    plain = back.history("jets")[1].time.replace(tzinfo=None).isoformat()
    assert aliases_at(back, plain + zone)["production"] == "jets/2"


def test_a_moment_before_the_history(back: Registry) -> None:
    plain = back.history("jets")[1].time.replace(tzinfo=None).isoformat()
    text = cli("history", "jets", "--at", f"{plain}+02:00", "--registry", back.uri).stdout
    assert "does not go back to" in text


def test_a_time_of_the_history_that_is_none_is_refused(two: Registry) -> None:
    where = ("--at", "yesterday", "--registry", two.uri)
    assert "is not a time" in cli("history", "jets", *where, code=2).stderr


def test_the_history_of_a_model_that_does_not_exist_is_refused(two: Registry) -> None:
    assert "no such model" in refusal("history", "tracks", "--registry", two.uri)
