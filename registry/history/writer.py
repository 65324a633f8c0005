"""The writer of a model: aliases, tags and history agree, also when it is killed at any moment.

MLflow moves one alias at a time, and `production` and `previous` belong together. A move is:

  1. the event is written, open, with every alias before and after;
  2. the version's tag `promotion.ALIAS`, so that it may be loaded as soon as the alias is there;
  3. the alias that was asked for: from this moment the move has happened;
  4. `previous`, and for a rollback the tag of the version that left;
  5. the event is closed: done.

A target is added in the same way: the event is written; the tag `annex.TARGET` is set, and from
then on the version has the target; then the tags `target.` and `chosen.`, for people; the event is
closed. A version is removed so: the event is written; the version is removed; the event is closed.
The files go last; `registry.housekeeping.garbage` removes what is left of them.

Each step is a single transaction in the store. The next writer first settles what a killed one left
open: if step 3 was done it does the rest and closes the event as done, else it takes back step 2
and closes it as void. So a move that nobody has seen never happens later, and one that somebody may
have seen is never taken back.

Once settled, for every model: the aliases are what the last event left; each points to a version;
the version in production has the tag of a promotion. Between a kill and the next writer,
`production` is right, but `previous` may still be one version too old; readers of the history see
an open event as the next writer will close it.

Aliases that others moved (with MLflow's page or its client) are shown: the next writer adds an
event "found" with what it found.
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
from registry.mlflow import ClientStore, Store, models
from registry.promotion import Decision
from registry.ref import checked_alias
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
    checked_alias(alias)
    if alias == PREVIOUS:
        raise RegistryError(
            f"'{PREVIOUS}' cannot be promoted to: it is what '{PRODUCTION}' was before"
        )


def as_settled(store: Store, events: Sequence[Event], aliases: Mapping[str, int]) -> list[Event]:
    """The events, an open one as the next writer will close it."""
    return [
        event
        if event.state != "open"
        else replace(event, state="done" if _happened(store, event, aliases) else "void")
        for event in events
    ]


def promotions_of(store: Store, history: History, version: Version, alias: str) -> list[Promotion]:
    """What `Reader.promotions` gives."""
    said = version.promotion(alias)
    if said is None:
        return []
    aliases = dict.fromkeys(version.aliases, version.number)

    def happened(second: datetime | None) -> list[Promotion]:
        return [
            promotion_of(event)
            for event in as_settled(store, history.promotions(second), aliases)
            if (event.alias, event.version, event.state) == (alias, version.number, "done")
        ]

    # A promotion that was cut short has left its tag, and the one before still counts.
    return happened(said.time) or happened(None)


def _happened(store: Store, event: Event, aliases: Mapping[str, int]) -> bool:
    """Whether an open event is to be completed, by the registry as it is; else it is void."""
    if event.kind in _MOVES:
        return event.alias is not None and aliases.get(event.alias) == event.after[event.alias]
    if event.kind == "build":
        tags = _tags(store, event.model, event.version) or {}
        return all(tags.get(ANNEX + tag_of(t)) == digest for t, digest in event.annexes.items())
    if event.kind == "removal":
        return _tags(store, event.model, event.version) is None
    return True


def _tags(store: Store, model: str, number: int | None) -> Mapping[str, str] | None:
    """Of a version; None where there is no such."""
    found = None if number is None else store.version(model, number)
    return None if found is None else found.tags


class ModelWriter:
    """Writes what belongs to one model, under its write lock. `settle` comes first."""

    def __init__(
        self, client: MlflowClient, model: str, history: HistoryWriter, lock: WriteLock
    ) -> None:
        self.client, self.model, self.history, self.lock = client, model, history, lock
        self._store = ClientStore(client)
        self.last = history.last()
        self.aliases = self._aliases()

    def settle(self) -> None:
        """Complete or void what a killed writer left open, and record what others moved."""
        if self.last is not None and self.last.state == "open":
            self._settle(self.last)
        left = {} if self.last is None else dict(self.last.left)
        if left != self.aliases:
            self.record(Event("found", self.model, left, dict(self.aliases)))

    def event(self, kind: Kind, version: Version, alias: str | None = None, **fields: Any) -> Event:
        """What happens to a version; `alias`: the one that goes to it, unless it is refused.

        `fields`: more of `Event`.
        """
        before, after = dict(self.aliases), dict(self.aliases)
        digests = {version.ref: version.digest}
        if alias is not None:
            holder = before.get(alias)
            if holder is not None:
                tags = _tags(self._store, self.model, holder) or {}
                if DIGEST in tags:  # else not a version of ours
                    digests[f"{self.model}/{holder}"] = tags[DIGEST]
            if kind in _MOVES and holder != version.number:
                back = self.way_back(version.number) if alias == PRODUCTION else None
                if holder is not None and back is not None:
                    after[PREVIOUS] = back
                after[alias] = version.number
        return Event(
            kind, self.model, before, after, alias, version.number, digests=digests, **fields
        )

    def way_back(self, than: int) -> int | None:
        """The last version, other than `than`, that a gate let into production.

        It is the one that is there now, unless others moved the alias there.
        """
        holder = self.aliases.get(PRODUCTION)
        if holder != than and self._was_let_in(holder):
            return holder
        held = [
            event.version
            for event in self.history.events()
            if event.alias == PRODUCTION
            and event.kind in ("promotion", "rollback")
            and event.state == "done"
        ]
        return next((n for n in reversed(held) if n != than and self._was_let_in(n)), None)

    def _was_let_in(self, number: int | None) -> bool:
        """Whether a gate let a version into production, as it is now."""
        found = None if number is None else self._store.version(self.model, number)
        if found is None:
            return False
        try:
            version = Version.of(found, self.aliases)
            history = promotions_of(self._store, self.history, version, PRODUCTION)
            version.let_in(PRODUCTION, history)
        except RegistryError:
            return False
        return True

    def still_in_place(self, alias: str, replacing: int | None) -> list[Decision]:
        """A refusal if the gates compared with a version that holds the alias no longer."""
        holder = self.aliases.get(alias, 0)
        if replacing is None or holder == replacing:
            return []
        found = f"{self.model}/{holder}" if holder else "none"
        limit = f"{self.model}/{replacing}" if replacing else "none"
        detail = (
            f"@{alias} was {limit} when the gates measured and is {found} now: somebody else was "
            "quicker, run the command again"
        )
        return [Decision("in place", False, found, limit, detail)]

    def promotion(self, number: int | None, alias: str | None) -> Promotion | None:
        """The last one of a version to an alias that has happened."""
        past = [
            event
            for event in self.history.events()
            if (event.kind, event.state) == ("promotion", "done")
            and (event.version, event.alias) == (number, alias)
        ]
        return promotion_of(past[-1]) if past else None

    def record(self, event: Event) -> Event:
        """Write an event that changes nothing else."""
        self.lock.check()
        return self._close(self.history.append(event, self.last), "done")

    def apply(self, event: Event) -> Event:
        """Write an event and do what it says: move the alias, add the target, or remove."""
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
                self._point(opened, str(opened.alias))
            return self._finish(opened)
        except BaseException:
            with contextlib.suppress(Exception):  # else the next writer does it
                self._settle(opened)
            raise

    def _settle(self, opened: Event) -> None:
        self.aliases = self._aliases()
        if _happened(self._store, opened, self.aliases):
            self._finish(opened)
        else:
            self._unprepare(opened)
            self._close(opened, "void")

    def _prepare(self, event: Event) -> None:
        if event.kind == "promotion":
            self.tag(event.version, f"{PROMOTION}{event.alias}", promotion_of(event).to_json())

    def _unprepare(self, event: Event) -> None:
        """The tag of the promotion becomes again what the history says of it."""
        if event.kind != "promotion":
            return
        key, meant = f"{PROMOTION}{event.alias}", promotion_of(event)
        # Older writers named no version in the tag.
        older = replace(meant, model=None, number=None, digest=None)
        tags = _tags(self._store, self.model, event.version) or {}
        if tags.get(key) not in (meant.to_json(), older.to_json()):
            return
        before = self.promotion(event.version, event.alias)
        if before is not None:
            self.tag(event.version, key, before.to_json())
        else:
            self.lock.check()
            self.client.delete_model_version_tag(self.model, str(event.version), key)

    def _finish(self, event: Event) -> Event:
        self._prepare(event)
        for alias in event.after if event.kind in _MOVES else ():
            moves = event.before.get(alias) != event.after[alias]
            # It may have been deleted, by other means, since the event was written.
            if moves and _tags(self._store, self.model, event.after[alias]) is not None:
                self._point(event, alias)
        left = _tags(self._store, self.model, event.replaced) if event.kind == "rollback" else None
        if left is not None:
            text = {"by": event.by, "at": _seconds(event), "to": f"{self.model}/{event.version}"}
            self.tag(event.replaced, ROLLED_BACK, json.dumps(text, sort_keys=True))
        if event.kind == "build":
            self._tag_targets(event, TARGET, dict.fromkeys(event.annexes, "verified"))
            self._tag_targets(event, CHOSEN, dict.fromkeys(event.annexes, event.engine))
        return self._close(event, "done")

    def _close(self, event: Event, state: Literal["done", "void"]) -> Event:
        self.lock.check()
        self.last = self.history.close(event, state)
        return self.last

    def _point(self, event: Event, alias: str) -> None:
        number = event.after[alias]
        if self.aliases.get(alias) == number:
            return
        self.lock.check()
        self.client.set_registered_model_alias(self.model, alias, str(number))
        self.aliases[alias] = number

    def tag(self, number: int | None, key: str, value: str) -> None:
        self.lock.check()
        self.client.set_model_version_tag(self.model, str(number), key, value)

    def _tag_targets(self, event: Event, kind: str, values: Mapping[str, str]) -> None:
        for target, value in values.items():
            self.tag(event.version, kind + tag_of(target), value)

    def _aliases(self) -> dict[str, int]:
        return models.aliases_of(self.client.get_registered_model(self.model))


def promotion_of(event: Event) -> Promotion:
    """What the version's tag says of the event."""
    return Promotion(
        str(event.alias),
        event.by,
        _seconds(event),
        event.decisions,
        event.annexes,
        event.model,
        event.version,
        event.digests.get(f"{event.model}/{event.version}"),
    )


def _seconds(event: Event) -> str:
    return event.time.isoformat(timespec="seconds")
