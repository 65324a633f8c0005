"""What must always hold for a registry and its history, and what holds once they are settled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from registry import Bundle, Registry, Version
from registry.bundle.digests import SIGNATURE, SUMS
from registry.history.event_log import Event, History, missing_numbers
from registry.housekeeping.garbage import collect
from registry.mlflow import ClientStore, aliases_of, fetch_all_pages
from registry.store.bundle_files import annex_path

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
    _check_versions(registry, name)
    _check_history(_raw(registry, name), done)
    _check_comings_and_goings(registry, name, registered, built, removed)


def _check_versions(registry: Registry, name: str) -> None:
    """Files, digests and aliases of the versions that are there."""
    versions = registry.versions(name)
    for version in versions:
        assert registry.open(version).digest == version.digest, version.ref
    digests = [version.digest for version in versions]
    assert len(set(digests)) == len(digests)
    aliases = aliases_of_model(registry, name)
    assert set(aliases.values()) <= {version.number for version in versions}
    for version in versions:
        if version.number == aliases.get("production"):
            assert version.promotion("production") is not None, version.ref


def _check_history(events: Sequence[Event], done: Mapping[str, str]) -> None:
    """The order of the events, and that there is one for each operation that is `done`."""
    assert missing_numbers(events) == []
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    for before, event in itertools.pairwise(events):
        assert before.time < event.time, event.title
        assert before.state != "open", before.title
        assert event.before == before.left, event.title
    labelled: dict[str, Event] = {}
    for event in events:
        if label := label_of(event):
            assert label not in labelled, label
            labelled[label] = event
    for label, kind in done.items():
        assert (labelled[label].kind, labelled[label].state) == (kind, "done"), label


class _Addition(NamedTuple):
    """A target that was added to a version."""

    version: int | None
    target: str


def _check_comings_and_goings(
    registry: Registry,
    name: str,
    registered: Sequence[str],
    built: Sequence[str],
    removed: Sequence[str],
) -> None:
    """Registrations, builds and removals: their events agree with the versions that are there."""
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
    digests_built: dict[_Addition, str] = {}
    for event in builds:
        for target, digest in event.annexes.items():
            addition = _Addition(event.version, target)
            assert addition not in digests_built, addition
            digests_built[addition] = digest
    digests_there = {
        _Addition(version.number, target): digest
        for version in versions.values()
        for target, digest in version.annexes.items()
    }
    for addition, digest in digests_built.items():
        if f"{name}/{addition.version}" in versions:
            assert digests_there[addition] == digest, addition
    # A pushed version brings its targets along, which another registry built.
    for addition in digests_there.keys() - digests_built.keys():
        assert versions[f"{name}/{addition.version}"].origin, addition
    assert set(built) <= set(digests_built.values())


def check_settled(registry: Registry, name: str) -> None:
    """Checks `SETTLED`, after a writer has completed or undone what another one left open."""
    events = _raw(registry, name)
    assert all(event.state != "open" for event in events)
    assert aliases_of_model(registry, name) == (events[-1].left if events else {})
    assert [event.title for event in events if event.kind == "found"] == []


def check_clean(registry: Registry, name: str, cache: Path) -> None:
    """Checks that nothing is left after a collector that spared nothing, while nobody writes."""
    assert collect(registry, older_than=timedelta(0), cache=cache) == []
    versions = registry.versions(name)
    with registry.client() as client:
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        runs = fetch_all_pages(
            client.search_runs, [experiment.experiment_id], "tags.digest LIKE '%'"
        )
        assert {run.info.run_id for run in runs} == {version.run_id for version in versions}
    for version in versions:
        local = registry.local_path(version)
        if local is None:
            return  # a server keeps the files
        root = local.parent
        files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        # The page is written last, and need not be there.
        assert files - {"report.html"} == _files_of(version, registry.open(version))
    assert versions
    runs_there = {path.name for path in root.parent.parent.iterdir() if any(path.rglob("*.*"))}
    assert runs_there == {str(version.run_id) for version in versions}


def _files_of(version: Version, bundle: Bundle) -> set[str]:
    """The files that a version needs in its folder of the store."""
    files = {f"bundle/{name}" for name in bundle.files if not name.startswith("annexes/")}
    files.add(f"bundle/{SUMS}")
    if bundle.signature() is not None:
        files.add(f"bundle/{SIGNATURE}")
    for (target, digest), annex in zip(
        version.annexes.items(), bundle.annexes.values(), strict=True
    ):
        folder = annex_path(target, digest)
        files |= {f"{folder}/{name}" for name in (*annex.files, SUMS)}
    return files


def label_of(event: Event) -> str:
    """The label of the operation that left this event."""
    return event.reason or "".join(event.policies)


def _raw(registry: Registry, name: str) -> list[Event]:
    """The events as they are stored: an open event stays open."""
    with registry.client() as client:
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        return History(ClientStore(client), experiment.experiment_id, name).events()


def aliases_of_model(registry: Registry, name: str) -> dict[str, int]:
    with registry.client() as client:
        return aliases_of(client.get_registered_model(name))
