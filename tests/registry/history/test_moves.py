"""A move that is broken off after each of its steps, and what the next writer makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from registry import Bundle, Decision, Registry, Version

MakeBundle = Callable[..., Path]


class Killed(BaseException):
    """As SIGKILL does: nothing after it gets through to the store."""


@pytest.fixture
def three(registry: Registry, make_bundle: MakeBundle, passed: list[Decision]) -> list[Version]:
    """jets/2 in production, jets/1 before it, jets/3 new."""
    made = [registry.register(Bundle.open(make_bundle(seed))) for seed in range(3)]
    registry.promote(made[0], "production", passed)
    registry.promote(made[1], "production", passed)
    return made


WRITES = (
    "create_run",
    "set_model_version_tag",
    "set_registered_model_alias",
    "delete_model_version_tag",
    "set_terminated",
)


def kill_after(patch: pytest.MonkeyPatch, writes: int) -> None:
    """Let this many writes through, and no other."""
    left = [writes]
    for name in WRITES:
        plain = getattr(MlflowClient, name)

        def write(*arguments: Any, _plain: Callable[..., Any] = plain, **more: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return _plain(*arguments, **more)

        patch.setattr(MlflowClient, name, write)


def aliases(registry: Registry) -> dict[str, int]:
    return dict(registry.list()[0].aliases)


# open, tag of promotion, @production, tag again, @previous, closed
@pytest.mark.parametrize("writes", range(7))
def test_promotion(
    registry: Registry, three: list[Version], passed: list[Decision], writes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, writes)
        if writes < 6:
            with pytest.raises(Killed):
                registry.promote(three[2], "production", passed)
        else:
            registry.promote(three[2], "production", passed)
    happened = writes >= 3
    foreseen = [event.state for event in registry.history("jets")[2:]]
    assert foreseen == ([] if writes == 0 else ["done" if happened else "void"])
    assert aliases(registry)["production"] == (3 if happened else 2)

    registry.approve(three[0], "Ada")  # any writer settles
    after = {"production": 3, "previous": 2} if happened else {"production": 2, "previous": 1}
    assert aliases(registry) == after
    states = [event.state for event in registry.history("jets")]
    assert states == ["done", "done", *foreseen, "done"]
    assert (registry.find("jets/3").promotion("production") is not None) is happened
    assert "found" not in [event.kind for event in registry.history("jets")]


# open, @production, @previous, tag of the version that left, closed
@pytest.mark.parametrize("writes", range(6))
def test_rollback(registry: Registry, three: list[Version], writes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, writes)
        if writes < 5:
            with pytest.raises(Killed):
                registry.rollback("jets")
        else:
            registry.rollback("jets")
    happened = writes >= 2
    assert aliases(registry)["production"] == (1 if happened else 2)
    registry.approve(three[0], "Ada")
    after = {"production": 1, "previous": 2} if happened else {"production": 2, "previous": 1}
    assert aliases(registry) == after
    assert ("rolled_back" in registry.find("jets/2").tags) is happened


def test_a_promotion_that_never_was_leaves_the_one_before(
    registry: Registry, three: list[Version], passed: list[Decision]
) -> None:
    """jets/1 was promoted long ago; that its second promotion is void takes nothing from it."""
    before = registry.find("jets/1").promotion("production")
    other = [Decision("digests", True, "all match", "all match", "another day")]
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            registry.promote(three[0], "production", other)
    between = registry.find("jets/1").promotion("production")
    assert between is not None
    assert between.decisions == tuple(other)
    registry.approve(three[0], "Ada")
    assert registry.find("jets/1").promotion("production") == before


def test_one_cut_short_by_a_writer_that_named_no_version(
    registry: Registry, three: list[Version], passed: list[Decision]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            registry.promote(three[2], "production", passed)
    record = json.loads(registry.find("jets/3").tags["promotion.production"])
    old = {key: record[key] for key in ("alias", "annexes", "at", "by", "decisions")}
    text = json.dumps(old, sort_keys=True)
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    client.set_model_version_tag("jets", "3", "promotion.production", text)
    registry.approve(three[0], "Ada")
    assert registry.find("jets/3").promotion("production") is None


def test_what_was_found_is_not_put_back(registry: Registry, three: list[Version]) -> None:
    """Killed while it records that others moved an alias; then they move it again."""
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    client.set_registered_model_alias("jets", "production", "1")
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            registry.approve(three[0], "Ada")
    client.set_registered_model_alias("jets", "production", "3")
    registry.approve(three[0], "Ada")
    assert aliases(registry) == {"production": 3, "previous": 1}
    found = [event.after["production"] for event in registry.history("jets")[2:]]
    assert found == [1, 3, 3]


def test_version_deleted_before_its_alias_was_settled(
    registry: Registry, three: list[Version], passed: list[Decision]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(Killed):
            registry.promote(three[2], "production", passed)
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    client.delete_model_version("jets", "2")  # was to become `previous`
    registry.approve(three[0], "Ada")
    assert aliases(registry) == {"production": 3, "previous": 1}
    kinds = [event.kind for event in registry.history("jets")]
    assert kinds == ["promotion", "promotion", "promotion", "found", "approval"]


def test_new_version_deleted_before_it_was_promoted(
    registry: Registry, three: list[Version], passed: list[Decision]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            registry.promote(three[2], "production", passed)
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    client.delete_model_version("jets", "3")
    registry.approve(three[0], "Ada")
    assert aliases(registry) == {"production": 2, "previous": 1}
    assert [event.state for event in registry.history("jets")] == ["done", "done", "void", "done"]


def test_failed_write_is_settled_at_once(
    registry: Registry, three: list[Version], passed: list[Decision]
) -> None:
    """An error is not a kill: the process is still there to take back what it began."""
    plain = MlflowClient.set_registered_model_alias

    def failing(client: MlflowClient, name: str, alias: str, version: str) -> None:
        if alias == "production":
            raise KeyboardInterrupt
        plain(client, name, alias, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", failing)
        with pytest.raises(KeyboardInterrupt):
            registry.promote(three[2], "production", passed)
    assert aliases(registry) == {"production": 2, "previous": 1}
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    (run,) = client.search_runs(["1"], "run_name = 'promotion of jets/3 to @production'")
    assert run.info.status == "KILLED"
    assert registry.find("jets/3").promotion("production") is None
