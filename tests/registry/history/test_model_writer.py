"""A move that is interrupted before each of its writes, and what the next writer does with it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from registry import Decision, Registry, RegistryError, Version
from tests.models.bundles import PASSED
from tests.models.mlflow_server import client_of
from tests.models.registries import file_of


class Killed(BaseException):
    """Stands for SIGKILL: nothing is written to the store after it."""


WRITES = (
    "create_run",
    "set_model_version_tag",
    "set_registered_model_alias",
    "delete_model_version",
    "delete_model_version_tag",
    "set_terminated",
    "delete_run",
)


MOVE = "set_registered_model_alias"


def kill_before(patch: pytest.MonkeyPatch, wanted: str = "", let_through: int = 0) -> None:
    """Lets through a number of writes, counting those of the `wanted` kind, and then none."""
    left, dead = let_through, False
    for name in WRITES:
        plain = getattr(MlflowClient, name)

        def write(
            *arguments: Any, _plain: Any = plain, _counts: bool = wanted in name, **more: Any
        ) -> Any:
            nonlocal left, dead
            if dead or (_counts and left == 0):
                dead = True
                raise Killed
            left -= _counts
            return _plain(*arguments, **more)

        patch.setattr(MlflowClient, name, write)


def killed(operation: Callable[[], object], wanted: str, let_through: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_before(patch, wanted, let_through)
        operation()


def at_each_write(
    registry: Registry, operation: Callable[[Registry], object]
) -> Iterator[Registry]:
    """The registry with the operation killed before each of its writes, and at last completed."""
    database = file_of(registry)
    for writes in itertools.count():
        copy = database.with_name(f"{writes}.db")
        shutil.copy(database, copy)
        made, done = Registry(f"sqlite:///{copy}"), True
        with pytest.MonkeyPatch.context() as patch:
            kill_before(patch, let_through=writes)
            try:
                operation(made)
            except Killed:
                done = False
        yield made
        if done:
            assert writes > 3
            return


def aliases(registry: Registry) -> dict[str, int]:
    return dict(registry.list()[0].aliases)


@pytest.mark.parametrize("kind", ["promotion", "rollback"])
def test_a_move_happens_or_does_not(registry: Registry, promoted: list[Version], kind: str) -> None:
    """A move is completed if, and only if, production has been seen to move."""
    promotes = kind == "promotion"
    new = 3 if promotes else 1

    def operation(made: Registry) -> None:
        if promotes:
            made.promote(promoted[2], "production", PASSED)
        else:
            made.rollback("jets")

    seen = []
    for made in at_each_write(registry, operation):
        happened = aliases(made)["production"] == new
        seen.append(happened)
        foreseen = [event.state for event in made.history("jets")[2:]]
        assert foreseen in ([], ["done" if happened else "void"])
        assert foreseen or not happened
        if promotes and happened:  # a load finds the record of its promotion
            assert made.find("jets/3").promotion("production") is not None

        made.approve(promoted[0], "Ada")  # any writer settles
        after = {"production": new, "previous": 2} if happened else {"production": 2, "previous": 1}
        assert aliases(made) == after
        events = made.history("jets")
        assert [event.state for event in events] == ["done", "done", *foreseen, "done"]
        assert "found" not in [event.kind for event in events]
        if promotes:
            assert (made.find("jets/3").promotion("production") is not None) is happened
        else:
            assert ("rolled_back" in made.find("jets/2").tags) is happened
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_a_promotion_that_never_was_leaves_the_one_before(
    registry: Registry, promoted: list[Version]
) -> None:
    """jets/1 was promoted before; its second promotion is void, and the first one still counts."""
    before = registry.find("jets/1").promotion("production")
    other = [Decision("digests", True, "all match", "all match", "another day")]
    killed(lambda: registry.promote(promoted[0], "production", other), MOVE)
    between = registry.find("jets/1").promotion("production")
    assert between is not None
    assert between.decisions == tuple(other)
    registry.approve(promoted[0], "Ada")
    assert registry.find("jets/1").promotion("production") == before


def test_one_cut_short_by_a_writer_that_named_no_version(
    registry: Registry, promoted: list[Version]
) -> None:
    killed(
        lambda: registry.promote(promoted[2], "production", PASSED), "set_registered_model_alias"
    )
    record = json.loads(registry.find("jets/3").tags["promotion.production"])
    old = {key: record[key] for key in ("alias", "annexes", "at", "by", "decisions")}
    text = json.dumps(old, sort_keys=True)
    client_of(registry).set_model_version_tag("jets", "3", "promotion.production", text)
    registry.approve(promoted[0], "Ada")
    assert registry.find("jets/3").promotion("production") is None


def test_what_was_found_is_not_put_back(registry: Registry, promoted: list[Version]) -> None:
    """Killed while it records that others moved an alias; then others move it again."""
    client = client_of(registry)
    client.set_registered_model_alias("jets", "production", "1")
    killed(lambda: registry.approve(promoted[0], "Ada"), "set_terminated")
    client.set_registered_model_alias("jets", "production", "3")
    registry.approve(promoted[0], "Ada")
    assert aliases(registry) == {"production": 3, "previous": 1}
    found = [event.after["production"] for event in registry.history("jets")[2:]]
    assert found == [1, 3, 3]


@pytest.mark.parametrize(
    ("moved", "deleted", "after", "last"),
    [
        (1, "2", {"production": 3, "previous": 1}, [("promotion", "done"), ("found", "done")]),
        (0, "3", {"production": 2, "previous": 1}, [("promotion", "void")]),
    ],
    ids=["the one to become previous", "the new one"],
)
def test_version_deleted_before_its_move_was_settled(
    registry: Registry, promoted: list[Version],
    moved: int, deleted: str, after: dict[str, int], last: list[tuple[str, str]],
) -> None:  # fmt: skip
    """Killed after some of the aliases had moved."""
    operation = lambda: registry.promote(promoted[2], "production", PASSED)  # noqa: E731
    killed(operation, MOVE, moved)
    client_of(registry).delete_model_version("jets", deleted)
    registry.approve(promoted[0], "Ada")
    assert aliases(registry) == after
    events = [(event.kind, event.state) for event in registry.history("jets")[2:]]
    assert events == [*last, ("approval", "done")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failed_write_is_settled_at_once(
    registry: Registry,
    promoted: list[Version],
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an error, unlike after a kill, the process takes its own move back."""

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", failing)
    with pytest.raises((KeyboardInterrupt, RegistryError)):
        registry.promote(promoted[2], "production", PASSED)
    assert aliases(registry) == {"production": 2, "previous": 1}
    client = client_of(registry)
    (run,) = client.search_runs(["1"], "run_name = 'promotion of jets/3 to @production'")
    assert run.info.status == "KILLED"
    assert registry.find("jets/3").promotion("production") is None
