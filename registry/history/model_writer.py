"""The writer of a model: aliases, tags and history stay consistent even if it is killed.

MLflow moves one alias at a time, but `production` and `previous` belong together. The steps of a
move are:

  1. write the event, open, with every alias before and after;
  2. set the version's tag `promotion.ALIAS`, so that it can be loaded once it has the alias;
  3. move the alias that the user named: from this moment the move has happened;
  4. move `previous`, and for a rollback tag the version that was replaced;
  5. close the event as done.

Adding a target: write the event; set the tag `annex.TARGET`, from then on the version has the
target; set the tags `target.` and `chosen.`, which are for people; close the event.
Removing a version: write the event; remove the version; close the event. The files are removed
last; if that fails, `registry.housekeeping.garbage` removes them.

Each step is a single transaction in the store. If a killed writer left an event open, the next
writer first settles it. If step 3 was done, it does the remaining steps and closes the event as
done. Otherwise it undoes step 2 and closes the event as void. So a move that nobody could see never
happens later, and a move that somebody may have seen is never undone.

When all events are settled, the aliases of every model are those that the last event left, each
alias points to a version, and the version in production has the tag of a promotion. Between a kill
and the next writer `production` is right, but `previous` may still be one version too old. Readers
of the history see an open event in the state in which the next writer will close it.

If other programs moved aliases (MLflow's page or its client), the next writer adds an event "found"
with the aliases before and after.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from registry.errors import RegistryError
from registry.history.event_log import Event, History, HistoryWriter, Kind
from registry.mlflow import ClientStore, Store, aliases_of
from registry.promotion import Decision
from registry.ref import check_alias
from registry.version import (
    ANNEX,
    CHOSEN,
    DIGEST,
    PROMOTION,
    ROLLED_BACK,
    TARGET,
    Promotion,
    Version,
    tag_of,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.history.lock import WriteLock

PRODUCTION = "production"
PREVIOUS = "previous"
STAGING = "staging"

_MOVES = ("promotion", "rollback", "alias")  # the other kinds of event move no alias


def check_promotable(alias: str) -> None:
    """Raise RegistryError for an alias that no promotion may move."""
    check_alias(alias)
    if alias == PREVIOUS:
        raise RegistryError(
            f"'{PREVIOUS}' cannot be promoted to: it is what '{PRODUCTION}' was before"
        )


def as_settled(store: Store, events: Sequence[Event], aliases: Mapping[str, int]) -> list[Event]:
    """Return the events, an open one in the state in which the next writer will close it.

    `aliases`: all aliases of the model now.
    """
    settled = list(events)
    for i, event in enumerate(events):
        if event.state == "open":
            settled[i] = replace(
                event, state="done" if _has_taken_effect(store, event, aliases) else "void"
            )
    return settled


def promotions_of(store: Store, history: History, version: Version, alias: str) -> list[Promotion]:
    """Return the promotions of a version to `alias`, see `Reader.promotions`."""
    tagged = version.promotion(alias)
    if tagged is None:
        return []
    aliases = dict.fromkeys(version.aliases, version.number)

    def completed(second: datetime | None) -> list[Promotion]:
        """Return those that have happened; `second`: only those in this second, None: all."""
        return [
            promotion_of(event)
            for event in as_settled(store, history.promotions(second), aliases)
            if (event.alias, event.version, event.state) == (alias, version.number, "done")
        ]

    # If a promotion was interrupted after it set the tag, earlier promotions still count.
    return completed(second=tagged.time) or completed(second=None)


def _has_taken_effect(store: Store, event: Event, aliases: Mapping[str, int]) -> bool:
    """Return whether an open event has taken effect in the registry, and must be completed.

    Otherwise it is void. `aliases`: all aliases of the model now.
    """
    if event.kind in _MOVES:
        return event.alias is not None and aliases.get(event.alias) == event.after[event.alias]
    if event.kind == "build":
        tags = _read_tags(store, event.model, event.version) or {}
        return all(
            tags.get(ANNEX + tag_of(target)) == digest for target, digest in event.annexes.items()
        )
    if event.kind == "removal":
        return _read_tags(store, event.model, event.version) is None
    return True


def _read_tags(store: Store, model: str, number: int | None) -> Mapping[str, str] | None:
    """Read the tags of a version; None if there is no such version."""
    stored = None if number is None else store.version(model, number)
    return None if stored is None else stored.tags


class ModelWriter:
    """Writes the data of one model, under its write lock. Call `settle` first."""

    def __init__(
        self, client: MlflowClient, model: str, history: HistoryWriter, lock: WriteLock
    ) -> None:
        self.client, self.model, self.history, self.lock = client, model, history, lock
        self._store = ClientStore(client)
        self.last = history.last()
        self.aliases = self._read_aliases()

    def settle(self) -> None:
        """Complete or undo an event that a killed writer left open.

        Then record an event "found" if other programs have moved aliases.
        """
        if self.last is not None and self.last.state == "open":
            self._settle_event(self.last)
        expected = {} if self.last is None else dict(self.last.left)
        if expected != self.aliases:
            self.record(Event("found", self.model, before=expected, after=dict(self.aliases)))

    def new_event(
        self, kind: Kind, version: Version, alias: str | None = None, **fields: Any
    ) -> Event:
        """Make an event about a version, without writing it.

        `alias` moves to the version if `kind` is one that moves aliases. `fields`: further fields
        of `Event`.
        """
        before, after = dict(self.aliases), dict(self.aliases)
        digests = {version.ref: version.digest}
        holder = None if alias is None else before.get(alias)
        if holder is not None:
            tags = _read_tags(self._store, self.model, holder) or {}
            if DIGEST in tags:  # else not a version of ours
                digests[f"{self.model}/{holder}"] = tags[DIGEST]
        if alias is not None and kind in _MOVES:
            after = self._aliases_after(version.number, alias)
        return Event(
            kind, self.model, before, after, alias, version.number, digests=digests, **fields
        )

    def _aliases_after(self, number: int, alias: str) -> dict[str, int]:
        """Return all aliases as they will be after `alias` has moved to a version.

        If `alias` is `production`, `previous` moves to the version that a rollback brings back.
        """
        after = dict(self.aliases)
        holder = after.get(alias)
        if holder == number:
            return after
        if alias == PRODUCTION:
            previous = self.find_way_back(number)
            if holder is not None and previous is not None:
                after[PREVIOUS] = previous
        after[alias] = number
        return after

    def find_way_back(self, other_than: int) -> int | None:
        """Return the number of the version to which production can go back from `other_than`.

        It is the version in production now, if that is another one and a gate let it in. Else it is
        the last such version that was there by a promotion or a rollback. Returns None if there is
        no such version.
        """
        holder = self.aliases.get(PRODUCTION)
        if holder != other_than and self._was_let_in(holder):
            return holder
        past_holders = [
            event.version
            for event in self.history.events()
            if event.alias == PRODUCTION
            and event.kind in ("promotion", "rollback")
            and event.state == "done"
        ]
        for number in reversed(past_holders):
            if number != other_than and self._was_let_in(number):
                return number
        return None

    def _was_let_in(self, number: int | None) -> bool:
        """Return whether the version, with its present files, was promoted to production."""
        stored = None if number is None else self._store.version(self.model, number)
        if stored is None:
            return False
        try:
            version = Version.of(stored, self.aliases)
            history = promotions_of(self._store, self.history, version, PRODUCTION)
            version.let_in(PRODUCTION, history)
        except RegistryError:
            return False
        return True

    def refuse_if_moved(self, alias: str, replacing: int | None) -> list[Decision]:
        """Return a refusal if the version that the gates compared with has lost the alias.

        `replacing`: the number of that version, 0 for none; None: this is not checked. The list is
        empty if nothing moved.
        """
        holder = self.aliases.get(alias, 0)
        if replacing is None or holder == replacing:
            return []
        now = f"{self.model}/{holder}" if holder else "none"
        measured = f"{self.model}/{replacing}" if replacing else "none"
        detail = (
            f"@{alias} was {measured} when the gates measured and is {now} now: somebody else was "
            "quicker, run the command again"
        )
        return [Decision("in place", False, found=now, limit=measured, detail=detail)]

    def last_promotion(self, number: int | None, alias: str | None) -> Promotion | None:
        """Return the last completed promotion of a version to an alias, or None."""
        past = [
            event
            for event in self.history.events()
            if (event.kind, event.state) == ("promotion", "done")
            and (event.version, event.alias) == (number, alias)
        ]
        return promotion_of(past[-1]) if past else None

    def record(self, event: Event) -> Event:
        """Write and close an event that changes nothing else in the registry."""
        self.lock.check()
        return self._close(self.history.append(event, self.last), "done")

    def apply(self, event: Event) -> Event:
        """Write an event and carry it out: move the alias, add the target or remove the version.

        If a step fails, the event is completed or undone, as by the next writer, and the error is
        raised.
        """
        self.lock.check()
        self.last = opened = self.history.append(event, self.last)
        try:
            self._prepare(opened)
            if opened.kind == "build":
                self._tag_targets(opened, ANNEX, opened.annexes)
            elif opened.kind == "removal":
                self.lock.check()
                self.client.delete_model_version(self.model, str(opened.version))
            else:
                self._move_alias(opened, str(opened.alias))
            return self._finish(opened)
        except BaseException:
            with contextlib.suppress(Exception):  # else the next writer does it
                self._settle_event(opened)
            raise

    def _settle_event(self, opened: Event) -> None:
        """Complete an event that has taken effect; undo and void one that has not."""
        self.aliases = self._read_aliases()
        if _has_taken_effect(self._store, opened, self.aliases):
            self._finish(opened)
        else:
            self._undo_prepare(opened)
            self._close(opened, "void")

    def _prepare(self, event: Event) -> None:
        """Set the tag of a promotion, without which the version could not be loaded."""
        if event.kind == "promotion":
            self.tag(event.version, f"{PROMOTION}{event.alias}", promotion_of(event).to_json())

    def _undo_prepare(self, event: Event) -> None:
        """Undo `_prepare`: set the tag to the last completed promotion, or delete it.

        A tag that another program has changed since is left as it is.
        """
        if event.kind != "promotion":
            return
        key, prepared = f"{PROMOTION}{event.alias}", promotion_of(event)
        # Older releases wrote no model, number and digest into the tag.
        of_older_release = replace(prepared, model=None, number=None, digest=None)
        tags = _read_tags(self._store, self.model, event.version) or {}
        if tags.get(key) not in (prepared.to_json(), of_older_release.to_json()):
            return
        earlier = self.last_promotion(event.version, event.alias)
        if earlier is not None:
            self.tag(event.version, key, earlier.to_json())
        else:
            self.lock.check()
            self.client.delete_model_version_tag(self.model, str(event.version), key)

    def _finish(self, event: Event) -> Event:
        """Do the steps of an event that are not done yet, and close it as done."""
        self._prepare(event)
        if event.kind in _MOVES:
            self._move_aliases(event)
        replaced = event.replaced
        if event.kind == "rollback" and _read_tags(self._store, self.model, replaced) is not None:
            successor = f"{self.model}/{event.version}"
            record = {"by": event.by, "at": _time_text(event), "to": successor}
            self.tag(replaced, ROLLED_BACK, json.dumps(record, sort_keys=True))
        if event.kind == "build":
            self._tag_targets(event, TARGET, dict.fromkeys(event.annexes, "verified"))
            self._tag_targets(event, CHOSEN, dict.fromkeys(event.annexes, event.engine))
        return self._close(event, "done")

    def _close(self, event: Event, state: Literal["done", "void"]) -> Event:
        """Give an event its final state and return it; `last` is this event from then on."""
        self.lock.check()
        self.last = self.history.close(event, state)
        return self.last

    def _move_aliases(self, event: Event) -> None:
        """Move every alias that the event moves and that has not been moved yet."""
        for alias, number in event.after.items():
            moves = event.before.get(alias) != number
            # Another program may have deleted the version since the event was written.
            if moves and _read_tags(self._store, self.model, number) is not None:
                self._move_alias(event, alias)

    def _move_alias(self, event: Event, alias: str) -> None:
        """Move one alias to the version that it has after the event, unless it is there already."""
        number = event.after[alias]
        if self.aliases.get(alias) == number:
            return
        self.lock.check()
        self.client.set_registered_model_alias(self.model, alias, str(number))
        self.aliases[alias] = number

    def tag(self, number: int | None, key: str, value: str) -> None:
        """Set a tag of the model's version `number`."""
        self.lock.check()
        self.client.set_model_version_tag(self.model, str(number), key, value)

    def _tag_targets(self, event: Event, prefix: str, values: Mapping[str, str]) -> None:
        """Set a tag for each target: its name is `prefix` and the target. `values`: by target."""
        for target, value in values.items():
            self.tag(event.version, prefix + tag_of(target), value)

    def _read_aliases(self) -> dict[str, int]:
        """Read all aliases of the model, and the numbers of their versions."""
        return aliases_of(self.client.get_registered_model(self.model))


def promotion_of(event: Event) -> Promotion:
    """Return the record that a version's tag holds about an event of kind "promotion"."""
    return Promotion(
        str(event.alias),
        event.by,
        at=_time_text(event),
        decisions=event.decisions,
        annexes=event.annexes,
        model=event.model,
        number=event.version,
        digest=event.digests.get(f"{event.model}/{event.version}"),
    )


def _time_text(event: Event) -> str:
    """Write the time of an event as a promotion's record has it: ISO 8601 in whole seconds."""
    return event.time.isoformat(timespec="seconds")
