"""What must hold of a registry and its history at any moment, and what once it is settled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from registry import Registry
from registry.history import Event, gaps
from registry.lookup import aliases_of

ALWAYS = (
    "every version has its files, with the digest it was registered with",
    "no digest is registered twice",
    "every alias points to a version",
    "the version in production has the tag of a promotion",
    "the numbers of the history have no gap and none is there twice, and times increase",
    "each event begins with the aliases that the one before it left",
    "only the last event is open",
    "what an operation reported as done is in the history, once",
    "no operation is in the history twice",
)
SETTLED = (
    "no event is open",
    "the aliases are what the last event left",
    "no alias has moved that no event explains",
)


def check_always(
    registry: Registry, name: str, done: Mapping[str, str], registered: Sequence[str]
) -> None:
    """`done`: label of each operation that returned, and the kind of event it had to leave.
    `registered`: the digests that `register` returned."""
    versions = registry.versions(name)
    for version in versions:
        assert registry.open(version).digest == version.digest, version.ref
    digests = [version.digest for version in versions]
    assert len(set(digests)) == len(digests)
    assert set(registered) <= set(digests)
    aliases = _aliases(registry, name)
    assert set(aliases.values()) <= {version.number for version in versions}
    for version in versions:
        if version.number == aliases.get("production"):
            assert version.promotion("production") is not None, version.ref

    events = _raw(registry, name)
    assert gaps(events) == []
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert all(a.time < b.time for a, b in itertools.pairwise(events))
    for before, event in itertools.pairwise(events):
        assert before.state != "open", before.title
        assert event.before == before.left, event.title
    found: dict[str, Event] = {}
    for event in events:
        if label := label_of(event):
            assert label not in found, label
            found[label] = event
    for label, kind in done.items():
        assert (found[label].kind, found[label].state) == (kind, "done"), label


def check_settled(registry: Registry, name: str) -> None:
    events = _raw(registry, name)
    assert all(event.state != "open" for event in events)
    assert _aliases(registry, name) == (events[-1].left if events else {})
    assert [event.title for event in events if event.kind == "found"] == []


def label_of(event: Event) -> str:
    """The operation of a campaign that an event came from."""
    return event.reason or "".join(event.policies)


def _raw(registry: Registry, name: str) -> list[Event]:
    """As stored: an open event is given as open."""
    from registry.history import History

    with registry._access.client() as client:
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        return History(client, experiment.experiment_id, name).events()


def _aliases(registry: Registry, name: str) -> dict[str, int]:
    with registry._access.client() as client:
        return aliases_of(client.get_registered_model(name))
