"""Moving aliases so that the registry and its history agree, also when killed at any moment.

MLflow moves one alias at a time, and `production` and `previous` belong together. A move is:

  1. the event is written, open, with every alias before and after;
  2. the version's tag `promotion.ALIAS`, so that it may be loaded as soon as the alias is there;
  3. the alias that was asked for: this is the moment from which the move has happened;
  4. `previous`, and for a rollback the tag of the version that left;
  5. the event is closed: done.

A target that was built is added in the same way: the event; the tag `annex.TARGET`, from which
moment the version has it; the tags `target.` and `chosen.`, which people read; the event closed.
And a version is removed so: the event; the version, which is the moment; the event closed. Its
files go last, and what is left of them is `registry.housekeeping.garbage`.

Each step is a single transaction in the store. Whoever writes next first settles what a killed
writer left open: if step 3 was done it does the rest and closes the event as done, else it takes
back step 2 and closes it as void. So a move of which nobody has seen anything never happens later,
and one that somebody may have seen is never taken back.

After it is settled, for every model: the aliases are what the last event left; each points to a
version; the version in production has the tag of a promotion. Between a kill and the next writer,
`production` is right and `previous` may still be the version before the one it should be; readers
of the history take an open event for what it will be settled to.

Aliases that others moved (MLflow's page, its client) are not hidden: the next writer adds an event
"found" with what it found.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from registry.errors import RegistryError
from registry.history.events import Event, History
from registry.mlflow import (
    ANNEX,
    CHOSEN,
    PROMOTION,
    ROLLED_BACK,
    TARGET,
    Promotion,
    aliases_of,
    has_code,
    tag_of,
)
from registry.promotion import Decision
from registry.reference import checked_alias

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.history.lock import Turn

PRODUCTION = "production"
PREVIOUS = "previous"
STAGING = "staging"

_MOVES = ("promotion", "rollback", "alias")  # the other kinds of event move nothing


def check_promotable(alias: str) -> None:
    """Raise RegistryError for an alias that no promotion may move."""
    checked_alias(alias)
    if alias == PREVIOUS:
        raise RegistryError(f"'{PREVIOUS}' follows from promotions, not by one")


def happened(client: MlflowClient, event: Event, aliases: Mapping[str, int]) -> bool:
    """Whether an open event is to be completed, by the registry as it is; else it is void."""
    if event.kind in _MOVES:
        return event.alias is not None and aliases.get(event.alias) == event.after[event.alias]
    if event.kind == "build":
        tags = _tags(client, event.model, event.version)
        return all(tags.get(ANNEX + tag_of(t)) == digest for t, digest in event.annexes.items())
    if event.kind == "removal":
        return not exists(client, event.model, event.version)
    return True  # it moves nothing


def exists(client: MlflowClient, model: str, number: int | None) -> bool:
    try:
        client.get_model_version(model, str(number))
    except Exception as error:
        if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
            return False
        raise
    return True


def as_settled(
    client: MlflowClient, events: Sequence[Event], aliases: Mapping[str, int]
) -> list[Event]:
    """The events with an open one taken for what the next writer will make of it."""
    return [
        event
        if event.state != "open"
        else replace(event, state="done" if happened(client, event, aliases) else "void")
        for event in events
    ]


def _tags(client: MlflowClient, model: str, number: int | None) -> Mapping[str, str]:
    """Of a version; none where it was deleted."""
    try:
        found: Mapping[str, str] = client.get_model_version(model, str(number)).tags
    except Exception as error:
        if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
            return {}
        raise
    return found


class Mover:
    """Writes what belongs to one model, for whoever has the turn. `settle` comes first."""

    def __init__(self, client: MlflowClient, model: str, history: History, turn: Turn) -> None:
        self.client, self.model, self.history, self.turn = client, model, history, turn
        self.last = history.last()
        self.aliases = self._aliases()

    def settle(self) -> None:
        """Complete or void what a killed writer left open, and record what others moved."""
        if self.last is not None and self.last.state == "open":
            self._settle(self.last)
        left = {} if self.last is None else dict(self.last.left)
        if left != self.aliases:
            self.note(Event("found", self.model, left, dict(self.aliases)))

    def event(
        self,
        kind: Literal["promotion", "rollback", "refusal", "alias"],
        alias: str,
        number: int,
        digests: Mapping[str, str],
        decisions: tuple[Decision, ...] = (),
        policies: Sequence[str] = (),
        reason: str = "",
        annexes: Mapping[str, str] | None = None,
    ) -> Event:
        """What is to become of the aliases when `alias` goes to a version."""
        after = dict(self.aliases)
        if kind != "refusal" and after.get(alias) != number:
            if alias == PRODUCTION and alias in after:
                after[PREVIOUS] = after[alias]
            after[alias] = number
        return Event(
            kind,
            self.model,
            dict(self.aliases),
            after,
            alias=alias,
            version=number,
            digests=digests,
            decisions=decisions,
            policies=tuple(policies),
            reason=reason,
            annexes=annexes or {},
        )

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

    def note(self, event: Event) -> Event:
        """Record what moves nothing."""
        self.turn.require()
        self.last = self.history.append(event, self.last)
        self.turn.require()
        self.last = self.history.close(self.last, "done")
        return self.last

    def move(self, event: Event) -> Event:
        """Record and make the move that an event describes, or add the target, or remove."""
        self.turn.require()
        self.last = opened = self.history.append(event, self.last)
        try:
            self._prepare(opened)
            if opened.kind == "build":
                self._tag_targets(opened, ANNEX, opened.annexes)
            elif opened.kind == "removal":
                self.turn.require()
                self.client.delete_model_version(self.model, str(opened.version))
            else:
                self._point(opened, str(opened.alias))
            self._finish(opened)
        except BaseException:
            # What the next writer would do, while we can; the error that brought us here is the
            # news.
            with contextlib.suppress(Exception):
                self._settle(opened)
            raise
        return self.last

    def _settle(self, opened: Event) -> None:
        self.aliases = self._aliases()
        if happened(self.client, opened, self.aliases):
            self._finish(opened)
            return
        self._unprepare(opened)
        self.turn.require()
        self.last = self.history.close(opened, "void")

    def _prepare(self, event: Event) -> None:
        if event.kind == "promotion":
            self._tag(event.version, f"{PROMOTION}{event.alias}", promotion_of(event).to_json())

    def _unprepare(self, event: Event) -> None:
        """The tag of the promotion becomes again what the history says of it."""
        if event.kind != "promotion" or not exists(self.client, self.model, event.version):
            return
        key = f"{PROMOTION}{event.alias}"
        found = self.client.get_model_version(self.model, str(event.version)).tags.get(key)
        if found is None or not _written_by(event, found):
            return
        before = self.promotion(event.version, event.alias)
        if before is not None:
            self._tag(event.version, key, before.to_json())
        else:
            self.turn.require()
            self.client.delete_model_version_tag(self.model, str(event.version), key)

    def _finish(self, event: Event) -> None:
        self._prepare(event)
        for alias in event.after if event.kind in _MOVES else ():
            moves = event.before.get(alias) != event.after[alias]
            # It may have been deleted, by other means, since the event was written.
            if moves and exists(self.client, self.model, event.after[alias]):
                self._point(event, alias)
        if event.kind == "rollback" and exists(self.client, self.model, event.replaced):
            text = {"by": event.by, "at": _seconds(event), "to": f"{self.model}/{event.version}"}
            self._tag(event.replaced, ROLLED_BACK, json.dumps(text, sort_keys=True))
        if event.kind == "build":
            self._tag_targets(event, TARGET, dict.fromkeys(event.annexes, "verified"))
            self._tag_targets(event, CHOSEN, dict.fromkeys(event.annexes, event.engine))
        self.turn.require()
        self.last = self.history.close(event, "done")

    def _point(self, event: Event, alias: str) -> None:
        number = event.after[alias]
        if self.aliases.get(alias) == number:
            return
        self.turn.require()
        self.client.set_registered_model_alias(self.model, alias, str(number))
        self.aliases[alias] = number

    def _tag(self, number: int | None, key: str, value: str) -> None:
        self.turn.require()
        self.client.set_model_version_tag(self.model, str(number), key, value)

    def _tag_targets(self, event: Event, kind: str, values: Mapping[str, str]) -> None:
        for target, value in values.items():
            self._tag(event.version, kind + tag_of(target), value)

    def _aliases(self) -> dict[str, int]:
        return aliases_of(self.client.get_registered_model(self.model))


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


def _written_by(event: Event, tag: str) -> bool:
    """Whether a tag is the event's, also in the words of a writer that named no version."""
    meant = promotion_of(event)
    return tag in (meant.to_json(), replace(meant, model=None, number=None, digest=None).to_json())


def _seconds(event: Event) -> str:
    return event.time.isoformat(timespec="seconds")
