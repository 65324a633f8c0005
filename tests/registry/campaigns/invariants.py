"""What must always hold for a registry and its history, and what holds once they are settled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from registry import Registry
from registry.bundle.digests import SIGNATURE
from registry.history.event_log import Event, gaps
from registry.housekeeping.garbage import collect
from registry.mlflow import ClientStore, aliases_of, all_pages
from registry.store.bundle_files import annex_place

ALWAYS = (
    "every version has its files, with the digest it was registered with, and so has each target "
    "that was built for it",
    "no digest is registered twice",
    "every alias points to a version",
    "the version in production has the tag of a promotion",
    "the numbers of the history have no gap and none is there twice, and times increase",
    "each event begins with the aliases that the one before it left",
    "only the last event is open",
    "what an operation reported as done is in the history, once",
    "no operation is in the history twice",
    "what was registered is there, or its removal is in the history",
    "each target that was built here has one event that says so",
    "no version that was removed is there",
)
SETTLED = (
    "no event is open",
    "the aliases are what the last event left",
    "no alias has moved that no event explains",
)
CLEAN = (
    "nothing is left that could be collected",
    "every file in the store is one of a version, or of a target that was built for it",
    "every run of a registration is a version's",
)


def check(
    registry: Registry,
    name: str,
    cache: Path,
    done: Mapping[str, str],
    settle: Callable[[], object],
    *,
    registered: Sequence[str] = (),
    built: Sequence[str] = (),
    removed: Sequence[str] = (),
) -> None:
    """Checks everything while nobody writes: first, after `settle`, and after collection."""

    def always() -> None:
        check_always(registry, name, done, registered, built, removed)

    always()
    foreseen = {event.number: event.state for event in registry.history(name)}
    settle()
    check_settled(registry, name)
    collect(registry, older_than=timedelta(0), cache=cache)
    check_clean(registry, name, cache)
    always()
    settled = {event.number: event.state for event in _raw(registry, name)}
    assert {number: settled[number] for number in foreseen} == foreseen


def check_always(
    registry: Registry,
    name: str,
    done: Mapping[str, str],
    registered: Sequence[str],
    built: Sequence[str] = (),
    removed: Sequence[str] = (),
) -> None:
    """Checks what holds at any moment.

    `done` maps the label of each operation that returned to the kind of event that it must have
    left. `registered` and `built` are digests of bundles and annexes, `removed` are versions, all
    of operations that returned.
    """
    versions = registry.versions(name)
    for version in versions:
        assert registry.open(version).digest == version.digest, version.ref
    digests = [version.digest for version in versions]
    assert len(set(digests)) == len(digests)
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
    _check_comings_and_goings(registry, name, registered, built, removed)


def _check_comings_and_goings(
    registry: Registry,
    name: str,
    registered: Sequence[str],
    built: Sequence[str],
    removed: Sequence[str],
) -> None:
    versions = {version.ref: version for version in registry.versions(name)}
    events = [event for event in registry.history(name) if event.state == "done"]
    removals = [event for event in events if event.kind == "removal"]
    gone = {digest for event in removals for digest in event.digests.values()}
    assert set(registered) <= gone | {version.digest for version in versions.values()}
    refs = [f"{name}/{event.version}" for event in removals]
    assert len(set(refs)) == len(refs)
    assert set(removed) <= set(refs)
    assert not versions.keys() & set(refs)

    builds = [event for event in events if event.kind == "build"]
    added = [(event.version, *item) for event in builds for item in event.annexes.items()]
    assert len({place[:2] for place in added}) == len(added)
    there = {(v.number, *item) for v in versions.values() for item in v.annexes.items()}
    told = {place for place in added if f"{name}/{place[0]}" in versions}
    assert told <= there
    # A pushed version brings its targets along, which another registry built.
    assert all(versions[f"{name}/{number}"].origin for number, *_ in there - told)
    assert set(built) <= {digest for _, _, digest in added}


def check_settled(registry: Registry, name: str) -> None:
    events = _raw(registry, name)
    assert all(event.state != "open" for event in events)
    assert _aliases(registry, name) == (events[-1].left if events else {})
    assert [event.title for event in events if event.kind == "found"] == []


def check_clean(registry: Registry, name: str, cache: Path) -> None:
    """Checks that nothing is left after a collector that spared nothing, while nobody writes."""
    assert collect(registry, older_than=timedelta(0), cache=cache) == []
    versions = registry.versions(name)
    with registry.client() as client:
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        runs = all_pages(client.search_runs, [experiment.experiment_id], "tags.digest LIKE '%'")
        assert {run.info.run_id for run in runs} == {version.run_id for version in versions}
    for version in versions:
        local = registry.local_path(version)
        if local is None:
            return
        root = local.parent
        there = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        annexes = [annex_place(target, digest) for target, digest in version.annexes.items()]
        opened = registry.open(version)
        listed = {f"bundle/{n}" for n in opened.files if not n.startswith("annexes/")}
        listed |= {f"{place}/{n}" for place, annex in zip(annexes, opened.annexes.values(),
                   strict=True) for n in annex.files}  # fmt: skip
        listed |= {f"{place}/SHA256SUMS" for place in ("bundle", *annexes)}
        listed |= set() if opened.signature() is None else {f"bundle/{SIGNATURE}"}
        assert there - {"report.html"} == listed  # written last, and need not be there
    assert versions
    runs_there = {path.name for path in root.parent.parent.iterdir() if any(path.rglob("*.*"))}
    assert runs_there == {str(version.run_id) for version in versions}


def label_of(event: Event) -> str:
    """The label of the operation that left this event."""
    return event.reason or "".join(event.policies)


def _raw(registry: Registry, name: str) -> list[Event]:
    """The events as they are stored: an open event stays open."""
    from registry.history.event_log import History

    with registry.client() as client:
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        return History(ClientStore(client), experiment.experiment_id, name).events()


def _aliases(registry: Registry, name: str) -> dict[str, int]:
    with registry.client() as client:
        return aliases_of(client.get_registered_model(name))
