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
from registry.promotion.policy import Policy
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
    folder = tmp_path_factory.mktemp("two")

    def fill(made: Registry) -> None:
        for seed in range(2):
            bundles.write_bundle(folder / str(seed), bundles.elsewhere(), seed)
            made.register(Bundle.open(folder / str(seed)))

    return store_of(tmp_path_factory, empty_database, fill)


@pytest.fixture
def two(store_of_two: Path, tmp_path: Path) -> Registry:
    """A registry with jets/1 and jets/2, for a device that this host lacks."""
    return copy_of(store_of_two, tmp_path / "store")


def write(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def test_the_page_shows_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "gates.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (text,) = [block for block in blocks if "approvals:" in block]
    (tmp_path / "big.safetensors").write_bytes(b"")
    make_keys(tmp_path, "release")
    found = load_policy(write(tmp_path, text))
    assert set(found.policy.model_dump(exclude_defaults=True)) == set(Policy.model_fields)
    demo = load_config(ROOT / "configs" / "demo.yaml")
    assert set(found.policy.max_outside_by_output) <= {output.name for output in demo.outputs}
    assert found.reference is not None
    assert found.reference.path == tmp_path / "big.safetensors"
    assert found.origin.startswith("policy.yaml (")


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
def test_mistakes(tmp_path: Path, text: str, line: int, problem: str) -> None:
    (said,) = mistakes.refused(load_policy, tmp_path / "policy.yaml", text)
    assert said.startswith(f"{line}: {problem}"), said


def events(registry: Registry) -> list[tuple[str, int | None]]:
    return [(event.kind, event.version) for event in registry.history("jets")]


def answers(decisions: Any) -> dict[str, str]:
    return {decision.gate: decision.answer for decision in decisions}


def test_an_excused_target_has_a_target_s_name(two: Registry) -> None:
    asked = ("promote", "jets/1", "--to", "staging", "--allow-unverified", "all")
    assert "unknown target 'all'" in cli(*asked, "--registry", two.uri, code=1).stderr


def test_dry_run_changes_nothing(two: Registry) -> None:
    asked = ("promote", "jets/1", "--to", "production", "--dry-run", "--registry", two.uri)
    text = cli(*asked, code=1).stdout
    assert "REFUSED" in text
    assert text.endswith("it would be refused; nothing was changed\n")
    assert answer(*asked[:-2], registry=two, code=1)["would_promote"] is False
    text = cli(*asked, "--allow-unverified", FAR).stdout
    assert text.endswith("it would pass; nothing was changed\n")
    for gate in ("digests", "verified", "tolerance", "speed"):
        assert gate in text
    assert two.history("jets") == []
    assert two.find("jets/1").aliases == ()


@pytest.mark.parametrize("alias", ["previous", "latest", "a b"])
def test_dry_run_refuses_what_the_command_refuses(two: Registry, alias: str) -> None:
    asked = ("promote", "jets/1", "--to", alias, "--allow-unverified", FAR, "--registry", two.uri)
    assert refusal(*asked, "--dry-run") == refusal(*asked)


def test_the_reason_stays(two: Registry) -> None:
    asked = ("promote", "jets/2", "--to", "production", "--registry", two.uri, "--reason", "why so")
    cli(*asked, code=1)
    cli(*asked, "--allow-unverified", FAR)
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
def test_overrides_that_are_refused(two: Registry, options: tuple[str, ...], says: str) -> None:
    asked = ("promote", "jets/2", "--to", "production", "--registry", two.uri)
    assert says in refusal(*asked, "--allow-unverified", FAR, *options)


def test_override_of_no_gate(two: Registry) -> None:
    with pytest.raises(RegistryError, match="no gate 'sped' was asked; there are: verified"):
        promote(two, "jets/2", "production", override=frozenset({"sped"}), reason="r", dry_run=True)


def test_override_by_name_and_reason(two: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no line is broken
    promote(two, "jets/1", "production", allow_unverified=EXCUSED)
    asked = ("promote", "jets/2", "--to", "production", "--registry", two.uri)
    excused = ("--allow-unverified", FAR)
    assert "speed: not measured beside jets/1" in cli(*asked, *excused, code=1).stderr
    why = "the clocks were wrong that day"
    text = cli(*asked, *excused, "--override", "speed", "--reason", why).stdout
    assert f"(overridden: {why})" in text
    assert two.find("jets@production").number == 2
    last = two.history("jets")[-1]
    assert answers(last.decisions)["speed"] == "overridden"
    text = cli("history", "jets", "--registry", two.uri).stdout
    assert f"{why}; speed overridden" in " ".join(text.split())
    assert "refused by speed" in " ".join(text.split())


def test_altered_version_cannot_be_overridden(two: Registry) -> None:
    folder = two.local_path(two.find("jets/1"))
    assert folder is not None
    (folder / "program.pt2").write_bytes(b"")
    over = frozenset({"speed", "verified"})
    with pytest.raises(PromotionRefused, match=r"digests: .*program\.pt2 is truncated"):
        promote(two, "jets/1", "production", override=over, reason="hurry")
    assert events(two) == [("refusal", 1)]


def test_all_policies_are_shown(two: Registry, tmp_path: Path) -> None:
    uri = ("--registry", two.uri)
    cli("policy", write(tmp_path, "max_slowdown: 1.01\n"), *uri)
    cli("policy", write(tmp_path, "approvals: [ada]\n"), "--model", "jets", *uri)
    for which in ((), ("--model", "jets")):
        text = cli("policy", *which, *uri).stdout
        assert "max_slowdown: 1.01" in text and 'approvals: ["ada"]' in text
    assert "no such model" in refusal("policy", "--model", "tracks", *uri)


def test_registrys_policy_is_not_loosened(two: Registry, tmp_path: Path) -> None:
    """Neither a local file nor options can loosen it."""
    strict = write(tmp_path, f"targets: [{FAR}]\nmax_slowdown: 1.01\n")
    uri = ("--registry", two.uri)
    assert "no policy" in cli("policy", *uri).stdout
    assert "max_slowdown: 1.01" in cli("policy", strict, *uri).stdout
    (shown,) = answer("policy", registry=two)
    assert shown["targets"] == [FAR]
    loose = tmp_path / "loose.yaml"
    loose.write_text("max_slowdown: 1000\n")
    options = {"allow_unverified": EXCUSED, "max_slowdown": 1000.0, "policy": loose}
    found = promote(two, "jets/1", "production", dry_run=True, **options)  # type: ignore[arg-type]
    assert not found.passed
    assert answers(found.decisions)["verified"] == "REFUSED"
    (speed,) = [d for d in found.decisions if d.gate == "speed"]
    assert speed.limit == "ratio <= 1.01"
    assert [origin.split(",")[0].split(" (")[0] for origin in found.policies] == [
        "the registry's policy",
        "loose.yaml",
    ]


def test_staging_and_approvals(two: Registry, tmp_path: Path) -> None:
    """They are needed for production only; the history names the policy that asked for them."""
    uri = ("--registry", two.uri)
    cli("policy", write(tmp_path, "approvals: [Ada, Bob]\nmin_time_in_staging: 0.05s"), *uri)
    with pytest.raises(PromotionRefused) as caught:
        promote(two, "jets/1", "production", allow_unverified=EXCUSED)
    refused = {d.gate: d.detail for d in caught.value.decisions if not d.passed}
    assert set(refused) == {"staging", "approvals"}
    assert refused["staging"].startswith("not in staging by a promotion")

    promote(two, "jets/1", "staging", allow_unverified=EXCUSED)
    text = cli("approve", "jets/1", "--as", "Ada", "--reason", "the plots", *uri).stdout
    assert text.startswith("jets/1 is approved by Ada (recorded by ")
    cli("approve", "jets/2", "--as", "Bob", *uri)  # for another version
    found = promote(two, "jets/1", "production", allow_unverified=EXCUSED, dry_run=True)
    missing = {d.gate: d.detail for d in found.decisions if not d.passed}
    assert missing == {
        "approvals": "approved by Ada; needed: Ada, Bob; missing: Bob (pipeline approve)"
    }
    cli("approve", "jets/1", "--as", "Bob", *uri)
    done = promote(two, "jets/1", "production", allow_unverified=EXCUSED)
    assert done.version.ref == "jets/1"
    (origin,) = two.history("jets")[-1].policies
    assert origin.startswith("the registry's policy, set by ")
    kinds = ["refusal", "promotion", "approval", "approval", "approval", "promotion"]
    assert events(two) == list(zip(kinds, (1, 1, 1, 2, 1, 1), strict=True))


@pytest.fixture(scope="module")
def back(store_of_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """jets/1 in production, then jets/2, then jets/1 again by a rollback. It is only read."""
    made = copy_of(store_of_two, tmp_path_factory.mktemp("back"))
    for ref in ("jets/1", "jets/2"):
        made.promote(made.find(ref), "production", PASSED)
    cli("rollback", "jets", "--reason", "the rate went up", "--registry", made.uri)
    return made


def test_history_of_a_model_to_which_nothing_happened(two: Registry) -> None:
    assert "nothing has happened to jets" in cli("history", "jets", "--registry", two.uri).stdout


def test_history_as_text(back: Registry) -> None:
    text = cli("history", "jets", "--registry", back.uri).stdout
    assert "history of jets, times in UTC" in text
    assert "rollback of jets/1" in text


def test_history_as_json(back: Registry) -> None:
    listed: list[dict[str, Any]] = answer("history", "jets", registry=back)
    assert [e["kind"] for e in listed] == ["promotion", "promotion", "rollback"]
    assert [e["replaced"] for e in listed] == [None, 1, 2]
    assert listed[2]["reason"] == "the rate went up"


def aliases_at(registry: Registry, moment: str) -> dict[str, str]:
    return dict(answer("history", "jets", "--at", moment, registry=registry)["aliases"])


def test_aliases_at_each_event(back: Registry) -> None:
    assert [aliases_at(back, each.time.isoformat()) for each in back.history("jets")] == [
        {"production": "jets/1"},
        {"production": "jets/2", "previous": "jets/1"},
        {"production": "jets/1", "previous": "jets/2"},
    ]


def test_the_aliases_of_a_moment_as_text(back: Registry) -> None:
    moment = back.history("jets")[0].time.isoformat()
    text = cli("history", "jets", "--at", moment, "--registry", back.uri).stdout
    assert text.startswith("jets@production was jets/1 at ")


@pytest.mark.parametrize("zone", ["", "+00:00", "Z"])
def test_a_moment_in_utc(back: Registry, zone: str) -> None:
    plain = back.history("jets")[1].time.replace(tzinfo=None).isoformat()
    assert aliases_at(back, plain + zone)["production"] == "jets/2"


def test_a_moment_before_the_history(back: Registry) -> None:
    plain = back.history("jets")[1].time.replace(tzinfo=None).isoformat()
    text = cli("history", "jets", "--at", f"{plain}+02:00", "--registry", back.uri).stdout
    assert "does not go back to" in text


def test_history_of_what_does_not_exist(two: Registry) -> None:
    uri = ("--registry", two.uri)
    assert "is not a time" in cli("history", "jets", "--at", "yesterday", *uri, code=2).stderr
    assert "no such model" in refusal("history", "tracks", *uri)
