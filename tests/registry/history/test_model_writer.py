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


class Killer:
    """Lets through a number of writes, counting those in `counted`, and then none of any kind."""

    def __init__(
        self, patch: pytest.MonkeyPatch, let_through: int, counted: tuple[str, ...] = WRITES
    ) -> None:
        self._left, self._dead = let_through, False
        for name in WRITES:
            write = self._guarded(getattr(MlflowClient, name), name in counted)
            patch.setattr(MlflowClient, name, write)

    def _guarded(self, plain: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            self._dead = self._dead or (counts and self._left == 0)
            if self._dead:
                raise Killed
            if counts:
                self._left -= 1
            return plain(*arguments, **options)

        return write


def kill_before(operation: Callable[[], object], write: str, let_through: int = 0) -> None:
    """Kills the operation at its first call of `write`, or after so many calls of it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        Killer(patch, let_through, (write,))
        operation()


def at_each_write(
    registry: Registry, operation: Callable[[Registry], object]
) -> Iterator[Registry]:
    """Copies of the registry: the operation was killed before its first write, before its second,
    and so on. In the last copy it is complete."""
    database = file_of(registry)
    for writes in itertools.count():
        path = database.with_name(f"{writes}.db")
        shutil.copy(database, path)
        copy, complete = Registry(f"sqlite:///{path}"), True
        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, writes)
            try:
                operation(copy)
            except Killed:
                complete = False
        yield copy
        if complete:
            assert writes > 3  # a run, a tag, an alias and the end of the run, at least
            return


def aliases(registry: Registry) -> dict[str, int]:
    return dict(registry.list()[0].aliases)


@pytest.mark.parametrize("kind", ["promotion", "rollback"])
def test_a_move_happens_or_does_not(registry: Registry, promoted: list[Version], kind: str) -> None:
    """A move is completed if, and only if, production has been seen to move."""
    promotes = kind == "promotion"
    new = 3 if promotes else 1

    def move(copy: Registry) -> None:
        if promotes:
            copy.promote(promoted[2], "production", PASSED)
        else:
            copy.rollback("jets")

    outcomes = []
    for copy in at_each_write(registry, move):
        happened = aliases(copy)["production"] == new
        outcomes.append(happened)
        foreseen = [event.state for event in copy.history("jets")[2:]]
        assert foreseen in ([], ["done" if happened else "void"])
        assert foreseen or not happened
        if promotes and happened:  # a load finds the record of its promotion
            assert copy.find("jets/3").promotion("production") is not None

        copy.approve(promoted[0], "Ada")  # any writer settles
        after = {"production": new, "previous": 2} if happened else {"production": 2, "previous": 1}
        assert aliases(copy) == after
        events = copy.history("jets")
        assert [event.state for event in events] == ["done", "done", *foreseen, "done"]
        assert "found" not in [event.kind for event in events]
        if promotes:
            assert (copy.find("jets/3").promotion("production") is not None) is happened
        else:
            assert ("rolled_back" in copy.find("jets/2").tags) is happened
    assert outcomes == sorted(outcomes)  # killed later, it has happened; killed earlier, it has not
    assert set(outcomes) == {False, True}


def test_a_void_promotion_leaves_the_one_before(
    registry: Registry, promoted: list[Version]
) -> None:
    """jets/1 was promoted before; its second promotion is void, and the first one still counts."""
    before = registry.find("jets/1").promotion("production")
    other = [Decision("digests", True, "all match", "all match", "another day")]
    kill_before(lambda: registry.promote(promoted[0], "production", other), MOVE)
    unsettled = registry.find("jets/1").promotion("production")
    assert unsettled is not None
    assert unsettled.decisions == tuple(other)
    registry.approve(promoted[0], "Ada")
    assert registry.find("jets/1").promotion("production") == before


def test_a_void_promotion_in_an_old_form_of_the_record_is_removed(
    registry: Registry, promoted: list[Version]
) -> None:
    """Writers of earlier versions did not name the promoted version in the record."""
    kill_before(lambda: registry.promote(promoted[2], "production", PASSED), MOVE)
    record = json.loads(registry.find("jets/3").tags["promotion.production"])
    old_record = {key: record[key] for key in ("alias", "annexes", "at", "by", "decisions")}
    text = json.dumps(old_record, sort_keys=True)
    client_of(registry).set_model_version_tag("jets", "3", "promotion.production", text)
    registry.approve(promoted[0], "Ada")
    assert registry.find("jets/3").promotion("production") is None


def test_an_alias_that_others_moved_is_not_put_back(
    registry: Registry, promoted: list[Version]
) -> None:
    """Killed while it records that others moved an alias; then others move it again."""
    client = client_of(registry)
    client.set_registered_model_alias("jets", "production", "1")
    kill_before(lambda: registry.approve(promoted[0], "Ada"), "set_terminated")
    client.set_registered_model_alias("jets", "production", "3")
    registry.approve(promoted[0], "Ada")
    assert aliases(registry) == {"production": 3, "previous": 1}
    production = [event.after["production"] for event in registry.history("jets")[2:]]
    assert production == [1, 3, 3]  # found at 1, found at 3, and the approval


@pytest.mark.parametrize(
    ("moved", "deleted", "after", "last"),
    [
        (1, "2", {"production": 3, "previous": 1}, [("promotion", "done"), ("found", "done")]),
        (0, "3", {"production": 2, "previous": 1}, [("promotion", "void")]),
    ],
    ids=["the one to become previous", "the new one"],
)
def test_a_version_is_deleted_before_its_move_is_settled(
    registry: Registry, promoted: list[Version],
    moved: int, deleted: str, after: dict[str, int], last: list[tuple[str, str]],
) -> None:  # fmt: skip
    """The promotion of jets/3 was killed after `moved` of its two aliases had moved."""
    kill_before(lambda: registry.promote(promoted[2], "production", PASSED), MOVE, moved)
    client_of(registry).delete_model_version("jets", deleted)
    registry.approve(promoted[0], "Ada")
    assert aliases(registry) == after
    events = [(event.kind, event.state) for event in registry.history("jets")[2:]]
    assert events == [*last, ("approval", "done")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_move_is_taken_back_at_once(
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
