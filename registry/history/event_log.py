"""The history of a model: its promotions, rollbacks, refusals, approvals and other events.

Each event is one MLflow run, in the experiment with the model's name, next to the runs of its
versions: MLflow's page lists it and shows the decision table as its note. The record is in the
run's tags, written in the one transaction that creates the run. Afterwards only the run's status
changes, once, from RUNNING (open) to FINISHED (done) or KILLED (void). A record is never changed.

Invariants, as long as only this code writes:

- Numbers count 1, 2, 3, … without a gap, and times always increase: an event's time is that of its
  writer's clock, or 1 ms after the previous event if that clock is behind.
- An event lists all aliases of the model before and after it. Its `before` equals the aliases that
  the previous event left: `after` of that event, or `before` if that event is void.
- Only the last event can be open: its writer is still running, or was killed.

A run deleted in MLflow's page is still read. After `mlflow gc` its number is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from registry import stamp
from registry.errors import RegistryError
from registry.mlflow import ClientStore, RunQuery, Store, StoredRun
from registry.promotion import Decision
from soa.records import Within, as_data, as_record, parse_json
from soa.text import in_markdown, plain

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Kind = Literal[
    "promotion", "rollback", "refusal", "approval", "alias", "found", "build", "removal", "import"
]
"""`alias`: an alias was moved without gates. `found`: other programs moved aliases. `build`: a
target was added to a version. `removal`: a version was removed. `import`: an event of another
registry was imported."""
State = Literal["open", "done", "void"]

Number = Annotated[int, Within(0, 10**6)]
"""The number of a version or an event; this code writes no larger ones."""

_EVENT = "soa.event"
_RECORD = "soa.record."
_PIECE = 5000  # characters in a tag; MLflow takes 8000
_MOST_PIECES = 200
_STATES: dict[str, State] = {"RUNNING": "open", "FINISHED": "done", "KILLED": "void"}
_STATUS = {state: status for status, state in _STATES.items()}
_NOT_YET = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Event:
    """One event of a model's history.

    `alias`: the alias that the user named. `version`: the number of the version concerned.
    """

    kind: Kind
    model: str
    before: Mapping[str, Number]
    """Every alias of the model, and the number of its version."""
    after: Mapping[str, Number]
    alias: str | None = None
    version: Number | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digests of the versions concerned, by "name/3"."""
    decisions: tuple[Decision, ...] = ()
    policies: tuple[str, ...] = ()
    """The origins of the policies that the gates applied."""
    reason: str = ""
    approver: str = ""
    annexes: Mapping[str, str] = field(default_factory=dict)
    """The digests, by target, of the annexes that were built, that the gates of a promotion saw, or
    that were removed with their version."""
    engine: str = ""
    """The engine chosen for the target that was built."""
    imported: Mapping[str, Any] = field(default_factory=dict)
    """For `import`: the registry and the model of the original event, and that event unchanged."""
    by: str = field(default_factory=stamp.user_at_host)
    number: Number = 0
    time: datetime = _NOT_YET
    id: str = ""
    """The id of the MLflow run."""
    state: State = "open"
    __closed__ = True

    @property
    def replaced(self) -> int | None:
        """The number of the version that had the alias before; None if there was none."""
        return None if self.alias is None else self.before.get(self.alias)

    @property
    def left(self) -> Mapping[str, int]:
        """The aliases that this event leaves once it is closed: a void event changes none."""
        return self.before if self.state == "void" else self.after

    @property
    def title(self) -> str:
        """The event in one line for people, which names the run on MLflow's page."""
        version = "" if self.version is None else f" {self.model}/{self.version}"
        match self.kind:
            case "approval":
                return f"approval of{version} by {self.approver}"
            case "found":
                return "aliases moved by other means"
            case "build":
                return f"build of {', '.join(self.annexes)} for{version}"
            case "removal":
                return f"removal of{version}"
            case "import":
                return f"import of an event{' of' if version else ''}{version}"
            case _:
                return f"{self.kind} of{version} to @{self.alias}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the record and for `--json`.

        It lacks the model and the id, which the MLflow run itself holds.
        """
        data = as_data(self)
        del data["model"], data["id"]
        if not self.imported:
            del data["imported"]
        time = self.time.isoformat(timespec="milliseconds")
        return data | {"time": time, "replaced": self.replaced}


class History:
    """The events of one model, in the MLflow experiment `experiment`."""

    def __init__(self, store: Store, experiment: str, model: str) -> None:
        self._store, self._experiment, self._model = store, experiment, model

    def events(self) -> list[Event]:
        """Return all events, oldest first."""
        return self._read_events(RunQuery(self._experiment, _EVENT))

    def promotions(self, second: datetime | None = None) -> list[Event]:
        """Return the promotions, oldest first.

        `second`: return only those in the second that begins at this time. The store selects them,
        which is faster if the history is long.
        """
        started = None
        if second is not None:
            since = int(second.timestamp()) * 1000
            started = (since, since + 1000)
        return self._read_events(RunQuery(self._experiment, _EVENT, "promotion", started=started))

    def last(self) -> Event | None:
        """Return the event that was written last, or None."""
        query = RunQuery(self._experiment, _EVENT, order="start_time DESC", limit=1)
        return next(iter(self._read_events(query)), None)

    def _read_events(self, query: RunQuery) -> list[Event]:
        """Read the events in the runs that `query` finds, in the order of their numbers."""
        events = [_read_event(run, self._model) for run in self._store.runs(query)]
        return sorted(events, key=lambda event: event.number)


class HistoryWriter(History):
    """A `History` that can also add events."""

    def __init__(self, client: MlflowClient, experiment: str, model: str) -> None:
        super().__init__(ClientStore(client), experiment, model)
        self._client = client

    def append(self, event: Event, after: Event | None) -> Event:
        """Write an event as an open one; return it with its number, time and id.

        `after`: the last event so far, or None. The caller holds the write lock.
        """
        now = datetime.now(UTC)
        if after is not None:
            now = max(now, after.time + timedelta(milliseconds=1))
        start = stamp.milliseconds(now)
        number = 1 if after is None else after.number + 1
        event = replace(event, number=number, time=stamp.time_of(start))
        tags = {
            _EVENT: event.kind,
            **_record_tags(event),
            "mlflow.user": plain(event.by),
            "mlflow.source.name": "soa-pipeline",
            "mlflow.note.content": markdown(event)[:_PIECE],
        }
        run = self._client.create_run(
            self._experiment, start_time=start, run_name=plain(event.title), tags=tags
        )
        return replace(event, id=run.info.run_id)

    def close(self, event: Event, state: Literal["done", "void"]) -> Event:
        """Give an open event its final state. The caller holds the write lock."""
        self._client.set_terminated(event.id, _STATUS[state])
        return replace(event, state=state)


def _record_tags(event: Event) -> dict[str, str]:
    """Return the tags that hold an event's record, in pieces that `_read_event` joins by name.

    Raises RegistryError if the record is too long, or has text that is not UTF-8.
    """
    text = json.dumps(event.to_json(), sort_keys=True, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, from a command line that is not UTF-8
        raise RegistryError(f"{event.title}: its record would hold text not in UTF-8") from None
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    if len(pieces) > _MOST_PIECES:
        raise RegistryError(
            f"{event.title}: its record has {len(text)} characters, at most "
            f"{_PIECE * _MOST_PIECES} are kept: give a shorter reason"
        )
    return {f"{_RECORD}{i:03}": piece for i, piece in enumerate(pieces)}


def _read_event(run: StoredRun, model: str) -> Event:
    """Read the event that an MLflow run holds. Raises RegistryError if it is not one of ours."""
    tags = run.tags
    try:
        text = "".join(tags[key] for key in sorted(tags) if key.startswith(_RECORD))
        data = as_record(dict[str, Any], parse_json(text))
        for derived in ("replaced", "state", "time"):
            data.pop(derived, None)
        from_run = {
            "by": data["by"],  # the record must contain it, and the number: no defaults here
            "number": data["number"],
            "model": model,
            "time": stamp.time_of(run.start or 0),
            "id": run.id,
            "state": _STATES[run.status],
        }
        return as_record(Event, data | from_run)
    except (ValueError, KeyError, OverflowError) as error:
        raise RegistryError(
            f"{model}: the record of its history in MLflow's run {run.id} is not one that "
            f"we wrote: {error}"
        ) from error


def markdown(event: Event) -> str:
    """Return the text about an event on MLflow's page."""
    lines = [f"{event.title}, by {event.by}"]
    lines += [
        f"@{alias}: {event.before.get(alias, 'none')} → {event.after.get(alias, 'none')}"
        for alias in sorted(event.before.keys() | event.after.keys())
        if event.before.get(alias) != event.after.get(alias)
    ]
    if event.reason:
        lines.append(f"reason: {event.reason}")
    lines += [f"{target} is annex {digest[:12]}" for target, digest in event.annexes.items()]
    lines += [f"{ref} is bundle {digest[:12]}" for ref, digest in event.digests.items()]
    text = "\n\n".join(map(in_markdown, lines))
    return f"{text}\n\n{_decision_table(event.decisions)}" if event.decisions else text


def _decision_table(decisions: Sequence[Decision]) -> str:
    """Write the gates' decisions as a table in Markdown, with cells cut to 300 characters."""
    lines = ["| gate | answer | found | limit | |", "| --- | --- | --- | --- | --- |"]
    for decision in decisions:
        cells = (decision.gate, decision.answer, decision.found, decision.limit, decision.detail)
        lines.append(f"| {' | '.join(in_markdown(cell[:300]) for cell in cells)} |")
    return "\n".join(lines)


def aliases_at(events: Sequence[Event], when: datetime) -> Mapping[str, int] | None:
    """Return all aliases at a time; None before the first event. `events`: oldest first."""
    past = [event for event in events if event.time <= when]
    return past[-1].left if past else None


def missing_numbers(events: Sequence[Event]) -> list[int]:
    """Return the numbers of missing events, which somebody removed with MLflow's own tools."""
    present = {event.number for event in events}
    return [n for n in range(1, max(present, default=0) + 1) if n not in present]


def promoted_since(events: Sequence[Event], alias: str, number: int) -> datetime | None:
    """Return the time since which a version has held an alias without a break.

    Returns None if it does not hold the alias, or if no promotion gave it. `events`: oldest first.
    """
    since = None
    for event in events:
        if event.left.get(alias) != number:
            since = None
        elif since is None and event.kind == "promotion" and event.state != "void":
            since = event.time if event.alias == alias and event.version == number else None
    return since


def approvers(events: Sequence[Event], number: int, digest: str) -> dict[str, str]:
    """Return who approved a version with this digest: by approver, the user who recorded it."""
    return {
        event.approver: event.by
        for event in events
        if event.kind == "approval"
        and event.version == number
        and event.digests.get(f"{event.model}/{number}") == digest
    }
