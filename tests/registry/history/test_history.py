"""The history of a model: written once, in order, and read back; MLflow shows it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from registry import Decision, PromotionRefused, Registry, RegistryError, Version
from registry.errors import NotPromotedError
from registry.history.event_log import (
    Event,
    HistoryWriter,
    aliases_at,
    approvers,
    missing_numbers,
    promoted_since,
)
from tests.models import registries
from tests.models.bundles import PASSED
from tests.models.mlflow_server import client_of

SLOW = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, store_of_three: Path) -> Sequence[Event]:
    """Six events in a registry of their own: one of each kind."""
    folder = tmp_path_factory.mktemp("life")
    registries.copy(store_of_three, folder)
    registry = Registry(f"sqlite:///{folder}/registry.db")
    three = registry.versions("jets")
    registry.promote(three[0], "production", PASSED, policies=["the config"])
    with pytest.raises(PromotionRefused):
        registry.promote(three[1], "production", [*PASSED, SLOW])
    overridden = replace(SLOW, override="a new detector, slower on purpose")
    registry.promote(three[1], "production", [*PASSED, overridden])
    registry.approve(three[2], "Ada", "looked at the plots")
    registry.rollback("jets", "the rate went up")
    registry.set_alias(three[2], "golden")
    return registry.history("jets")


def test_a_model_without_events_has_an_empty_history(
    registry: Registry, three: list[Version]
) -> None:
    assert registry.history("jets") == []


def test_events_have_numbers_and_times_that_ascend(life: Sequence[Event]) -> None:
    assert [event.number for event in life] == [1, 2, 3, 4, 5, 6]
    assert all(before.time < event.time for before, event in pairwise(life))


def test_an_event_has_a_title(life: Sequence[Event]) -> None:
    assert {event.state for event in life} == {"done"}
    assert [event.title for event in life] == [
        "promotion of jets/1 to @production",
        "refusal of jets/2 to @production",
        "promotion of jets/2 to @production",
        "approval of jets/3 by Ada",
        "rollback of jets/1 to @production",
        "alias of jets/3 to @golden",
    ]


def test_an_event_has_its_decisions(life: Sequence[Event]) -> None:
    promotion, refusal, overridden, *_ = life
    assert promotion.policies == ("the config",)
    assert refusal.decisions == (*PASSED, SLOW)
    assert overridden.decisions[1].override == "a new detector, slower on purpose"


def test_an_event_has_the_aliases_that_it_moved(
    life: Sequence[Event], three: list[Version]
) -> None:
    _, refusal, promotion, _, rollback, _ = life
    assert [event.replaced for event in life] == [None, 1, 1, None, 2, None]
    assert refusal.before == refusal.after == {"production": 1}
    assert promotion.digests == {"jets/1": three[0].digest, "jets/2": three[1].digest}
    assert rollback.after == {"production": 1, "previous": 2}


def test_an_event_says_who_and_why(life: Sequence[Event]) -> None:
    rollback = life[4]
    assert rollback.reason == "the rate went up"
    assert all("@" in event.by for event in life)


def test_an_approval_is_of_one_version_and_digest(
    life: Sequence[Event], three: list[Version]
) -> None:
    assert approvers(life, 3, three[2].digest) == {"Ada": life[3].by}
    assert approvers(life, 3, three[1].digest) == approvers(life, 2, three[1].digest) == {}


def test_mlflow_shows_an_event_as_a_run_with_a_note(
    registry: Registry, three: list[Version]
) -> None:
    with pytest.raises(PromotionRefused):
        registry.promote(three[1], "production", [*PASSED, SLOW])
    (run,) = client_of(registry).search_runs(["1"], "tags.`soa.event` = 'refusal'")
    assert run.info.run_name == "refusal of jets/2 to @production"
    assert run.info.status == "FINISHED"
    note = run.data.tags["mlflow.note.content"]
    assert "| speed | REFUSED | ratio 1.5 | ratio <= 1.1 | ratio 1.5, limit 1.1 |" in note
    assert f"jets/2 is bundle {three[1].digest[:12]}" in note


def test_the_history_tells_the_aliases_at_any_time(
    registry: Registry, three: list[Version]
) -> None:
    for version in three:
        registry.promote(version, "production", PASSED)
    registry.rollback("jets")
    events = registry.history("jets")
    after_each = [aliases_at(events, event.time) for event in events]
    assert after_each == [
        {"production": 1},
        {"production": 2, "previous": 1},
        {"production": 3, "previous": 2},
        {"production": 2, "previous": 3},
    ]
    tick = timedelta(milliseconds=1)
    assert aliases_at(events, events[0].time - tick) is None
    assert aliases_at(events, events[2].time - tick) == {"production": 2, "previous": 1}
    assert aliases_at(events, datetime.now(UTC)) == after_each[3]


def test_a_record_longer_than_a_tag_is_read_back(registry: Registry, three: list[Version]) -> None:
    many = [
        Decision("tolerance", True, "outside 0", "outside <= 0", f"output número {i} " * 40)
        for i in range(60)
    ]
    registry.promote(three[0], "production", many)
    (event,) = registry.history("jets")
    assert event.decisions == tuple(many)


def test_an_alias_that_others_moved_is_recorded_as_found(
    registry: Registry, three: list[Version]
) -> None:
    registry.promote(three[0], "production", PASSED)
    client_of(registry).set_registered_model_alias("jets", "production", "3")
    registry.promote(three[1], "production", PASSED)
    first, found, last = registry.history("jets")
    assert found.kind == "found"
    assert (found.before, found.after) == (first.after, {"production": 3})
    assert last.after == {"production": 2, "previous": 1}
    assert registry.rollback("jets").ref == "jets/1"


def test_the_way_back_leads_where_a_gate_let_production_be(
    registry: Registry, three: list[Version]
) -> None:
    registry.promote(three[0], "production", PASSED)
    registry.promote(three[1], "production", PASSED)
    registry.promote(three[2], "staging", PASSED)
    client_of(registry).set_registered_model_alias("jets", "previous", "3")
    with pytest.raises(NotPromotedError, match=r"jets/3 .*jets/1 was in production before"):
        registry.rollback("jets")
    assert registry.list()[0].aliases == {"production": 2, "previous": 3, "staging": 3}
    assert [event.kind for event in registry.history("jets")][3:] == ["found"]


def test_a_rollback_skips_what_others_put_into_production(
    registry: Registry, promoted: list[Version]
) -> None:
    """@previous becomes the version that the gates let into production last."""
    client_of(registry).set_registered_model_alias("jets", "production", "3")
    assert registry.rollback("jets").ref == "jets/1"
    assert registry.find("jets@previous").ref == "jets/2"


def change_the_digest(registry: Registry, versions: list[Version]) -> None:
    client_of(registry).set_model_version_tag("jets", "1", "digest", versions[2].digest)


def delete_the_promotion(registry: Registry, versions: list[Version]) -> None:
    client_of(registry).delete_model_version_tag("jets", "1", "promotion.production")


def forge_a_promotion(registry: Registry, versions: list[Version]) -> None:
    """@previous is jets/3, whose tag is like that of jets/1; the history does not contain it."""
    forged = versions[0].tags["promotion.production"].replace("every file", "no file")
    client_of(registry).set_registered_model_alias("jets", "previous", "3")
    client_of(registry).set_model_version_tag("jets", "3", "promotion.production", forged)


@pytest.mark.parametrize("damage", [change_the_digest, delete_the_promotion, forge_a_promotion])
def test_no_rollback_to_what_production_would_refuse(
    registry: Registry,
    promoted: list[Version],
    damage: Callable[[Registry, list[Version]], None],
) -> None:
    damage(registry, list(registry.versions("jets")))
    with pytest.raises(NotPromotedError):
        registry.rollback("jets")
    assert registry.find("jets@production").number == 2


def test_a_promotion_to_staging_is_none_to_production(
    registry: Registry, promoted: list[Version]
) -> None:
    """Nor does its record with the other alias written into it."""
    staged = registry.promote(promoted[2], "staging", PASSED)
    text = staged.tags["promotion.staging"].replace('"alias": "staging"', '"alias": "production"')
    client_of(registry).set_model_version_tag("jets", "3", "promotion.production", text)
    forged = registry.find("jets/3")
    assert registry.promotions(forged, "production") == []
    with pytest.raises(NotPromotedError, match="has no such promotion"):
        forged.let_in("production", registry.promotions(forged, "production"))


def test_a_promotion_over_what_no_gate_saw_leaves_no_way_back_to_it(
    registry: Registry, three: list[Version]
) -> None:
    """If no gate ever let a version into production, there is nothing to roll back to."""
    client_of(registry).set_registered_model_alias("jets", "production", "3")
    registry.promote(three[1], "production", PASSED)
    assert registry.list()[0].aliases == {"production": 2}


def test_aliases_older_than_the_history_are_found_and_no_way_back(
    registry: Registry, three: list[Version]
) -> None:
    client = client_of(registry)
    client.set_registered_model_alias("jets", "production", "2")
    client.set_registered_model_alias("jets", "previous", "1")
    with pytest.raises(NotPromotedError):  # a load refuses it too
        registry.rollback("jets")
    registry.promote(three[2], "production", PASSED)
    assert registry.list()[0].aliases == {"production": 3, "previous": 1}
    assert [event.kind for event in registry.history("jets")] == ["found", "promotion"]


def test_an_event_whose_run_somebody_deleted_still_counts(
    registry: Registry, three: list[Version]
) -> None:
    for version in three:
        registry.promote(version, "staging", PASSED)
    client = client_of(registry)
    (run,) = client.search_runs(["1"], "run_name = 'promotion of jets/3 to @staging'")
    client.delete_run(run.info.run_id)
    assert [event.number for event in registry.history("jets")] == [1, 2, 3]
    registry.set_alias(three[0], "golden")
    events = registry.history("jets")
    assert [event.number for event in events] == [1, 2, 3, 4]
    assert missing_numbers(events) == []


def test_gaps_are_the_numbers_that_are_missing(life: Sequence[Event]) -> None:
    assert missing_numbers([life[0], life[3]]) == [2, 3]


def test_an_event_is_later_than_the_one_before_although_the_clock_is_behind(
    registry: Registry, three: list[Version]
) -> None:
    history = HistoryWriter(client_of(registry), "1", "jets")
    approval = Event("approval", "jets", {}, {}, version=1, approver="Ada")
    ahead = replace(history.append(approval, None), time=datetime.now(UTC) + timedelta(hours=1))
    after = history.append(approval, ahead)
    assert timedelta(0) < after.time - ahead.time <= timedelta(milliseconds=1)


def test_a_record_that_somebody_overwrote_is_refused(
    registry: Registry, three: list[Version]
) -> None:
    registry.promote(three[0], "staging", PASSED)
    client = client_of(registry)
    (run,) = client.search_runs(["1"], "tags.`soa.event` = 'promotion'")
    client.set_tag(run.info.run_id, "soa.record.000", "{}")
    with pytest.raises(RegistryError, match="the record of its history in MLflow's run") as caught:
        registry.history("jets")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("measured", "was"), [(1, "jets/1"), (0, "none")])
def test_a_promotion_is_refused_if_production_changed_since_its_gates_measured(
    registry: Registry, three: list[Version], measured: int, was: str
) -> None:
    registry.promote(three[0], "production", PASSED, replacing=0)
    registry.promote(three[1], "production", PASSED, replacing=1)
    message = f"@production was {was} when the gates measured and is jets/2"
    with pytest.raises(PromotionRefused, match=message):
        registry.promote(three[2], "production", PASSED, replacing=measured)
    assert registry.history("jets")[-1].kind == "refusal"
    assert registry.find("jets@production").number == 2


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "n" * 101])
def test_an_approval_under_an_unusable_name_is_refused(
    registry: Registry, three: list[Version], name: str
) -> None:
    with pytest.raises(RegistryError, match="cannot be a name"):
        registry.approve(three[0], name)


def event_at(number: int, kind: Any, alias: str, version: int, aliases: dict[str, int]) -> Event:
    """A completed event at hour `number` of a day, after which the aliases are as given."""
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)
    return Event(kind, "jets", {}, aliases, alias, version, number=number, time=time, state="done")


ONE, TWO = {"staging": 1}, {"staging": 2}
TWICE = (
    event_at(1, "promotion", "staging", 1, ONE),
    event_at(2, "promotion", "staging", 1, ONE),
    event_at(3, "refusal", "production", 1, ONE),
)
REPLACED = (*TWICE, event_at(4, "promotion", "staging", 2, TWO))
MOVED_BACK = (*REPLACED, event_at(5, "alias", "staging", 1, ONE))
PROMOTED_BACK = (*MOVED_BACK, event_at(6, "promotion", "staging", 1, ONE))
VOID = replace(event_at(6, "promotion", "staging", 1, ONE), state="void", before=ONE)
VOID_OF_TWO = replace(event_at(7, "promotion", "staging", 2, TWO), state="void", before=ONE)


@pytest.mark.parametrize(
    ("events", "version", "number"),
    [
        pytest.param(TWICE, 1, 1, id="since the first of two promotions"),
        pytest.param(TWICE, 2, None, id="never there"),
        pytest.param(MOVED_BACK, 2, None, id="replaced"),
        pytest.param(MOVED_BACK, 1, None, id="moved back without a gate"),
        pytest.param((*MOVED_BACK, VOID), 1, None, id="a void promotion does not count"),
        pytest.param(PROMOTED_BACK, 1, 6, id="promoted again after it was replaced"),
        pytest.param((*PROMOTED_BACK, VOID_OF_TWO), 1, 6, id="a void promotion replaces nothing"),
    ],
)
def test_a_version_is_in_staging_since_its_promotion_there(
    events: Sequence[Event], version: int, number: int | None
) -> None:
    """It is the time of the promotion that brought the version there, as long as it stays."""
    since = None if number is None else events[number - 1].time
    assert promoted_since(events, "staging", version) == since
