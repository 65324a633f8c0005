"""Garbage: what a registry and this host's cache keep although nothing refers to it.

These are the files of registrations that failed or were killed, of versions that were removed, of
annexes that never came to be known, and files that a killed process was writing.

A run is ended, and an annex removed, under the model's write lock and after a second look. Who
registers or builds checks, under the same lock, that all files are still there before a tag or a
version names them. So nothing is lost that somebody writes; an age only spares slow writers from
starting again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from registry.bundle import ANNEXES, SUMS
from registry.history import write_lock
from registry.housekeeping.removal import REMOVED
from registry.mlflow import models
from registry.ref import NAME_PATTERN
from registry.store import UPLOADING, Registry, artifacts, cache_root
from registry.version import ANNEX, DIGEST

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Kind = Literal["registration", "removed version", "annex", "temporary"]

_PARTIAL = re.compile(
    r"\..+\.[0-9a-f]{8}\.(partial|old|sig)(-journal|-wal|-shm)?"
    r"|\.artifact\.uploading\..+"  # MLflow's own
)
_UNFINISHED = ("RUNNING", "SCHEDULED")


@dataclass(frozen=True)
class Garbage:
    kind: Kind
    what: str
    """Whose it was, and why nothing refers to it."""
    where: str
    """URI or path."""
    bytes: int


def collect(
    registry: Registry,
    *,
    older_than: timedelta = timedelta(days=1),
    dry_run: bool = False,
    cache: str | Path | None = None,
) -> list[Garbage]:
    """Remove it, and return what was removed; `dry_run`: what would be.

    `older_than` is for what may still be at work; what failed or was removed goes at once.
    """
    before = datetime.now(UTC) - older_than
    found: list[Garbage] = []
    folders: list[Path] = []
    if registry.exists:
        with registry.client(write=not dry_run) as client:
            collector = _Collector(registry, client, before, dry_run)
            found += collector.collect()
            folders = collector.folders
    for path in _temporary(registry, folders, cache, before):
        size = path.lstat().st_size
        if path.is_dir():
            size = sum(artifacts.stored(registry, str(path)).values())
        if not dry_run and path.is_dir() and not path.is_symlink():
            artifacts.remove_tree(path)
        elif not dry_run:
            path.unlink(missing_ok=True)
        found.append(Garbage("temporary", "left by a killed process", str(path), size))
    return found


class _Collector:
    """Of what is in the registry. `folders`: where the files of versions are, on this host."""

    def __init__(
        self, registry: Registry, client: MlflowClient, before: datetime, dry_run: bool
    ) -> None:
        self.registry, self.client = registry, client
        self.before, self.dry_run = before, dry_run
        self.folders: list[Path] = []

    def collect(self) -> Iterator[Garbage]:
        if not self.dry_run:
            for summary in self.registry.list():
                with self.registry.writing(summary.name):
                    pass  # settles a removal that was broken off
        for model, run in self._runs():
            if self._versions(run):
                yield from self._annexes(model, run)
            elif (garbage := self._registration(model, run)) is not None:
                yield garbage

    def _runs(self) -> Iterator[tuple[str, Any]]:
        """Every run of ours that holds, or was to hold, a version's files, and its model."""
        from mlflow.entities import ViewType

        for experiment in models.all_pages(self.client.search_experiments, view_type=ViewType.ALL):
            if not re.fullmatch(NAME_PATTERN, experiment.name):
                continue

            def search(page_token: str | None, where: str = experiment.experiment_id) -> Any:
                return self.client.search_runs(
                    [where],
                    f"tags.`mlflow.source.name` = 'soa-pipeline' AND tags.{DIGEST} LIKE '%'",
                    run_view_type=ViewType.ALL,
                    page_token=page_token,
                )

            for run in models.all_pages(search):
                yield experiment.name, run

    def _versions(self, run: Any) -> Sequence[Any]:
        search, info = self.client.search_model_versions, run.info
        # Somebody may have made a version of the files alone, with MLflow's own means.
        source = f"{info.artifact_uri.rstrip('/')}/{artifacts.FOLDER}"
        return models.all_pages(search, f"run_id = '{info.run_id}'") or models.all_pages(
            search, f"source_path = '{source}'"
        )

    def _registration(self, model: str, run: Any) -> Garbage | None:
        """A run without a version: ended while nobody can make one of it, then removed."""
        verdict = self._verdict(run)
        if verdict is None:
            return None
        where, size = run.info.artifact_uri.rstrip("/"), 0
        kind, why = verdict
        if self.dry_run:
            size = sum(artifacts.stored(self.registry, where).values())
        else:
            with write_lock(self.registry, self.client, model) as lock:
                now = self.client.get_run(run.info.run_id)
                if self._versions(now) or self._verdict(now) is None:
                    return None
                if now.info.status in _UNFINISHED:
                    lock.check()
                    self.client.set_terminated(run.info.run_id, "FAILED")
            size = artifacts.remove_run(self.registry, self.client, run.info.run_id)
        if not size and run.info.lifecycle_stage != "active":
            return None  # it was collected before
        return Garbage(kind, f"{model}: {why}", where, size)

    def _verdict(self, run: Any) -> tuple[Kind, str] | None:
        """What a run without a version is; None where it may still become one."""
        info, tags = run.info, run.data.tags
        if REMOVED in tags:
            return "removed version", f"{tags[REMOVED]} was removed"
        if info.status in _UNFINISHED:
            begun = _moment(info.start_time)
            if begun > self.before:
                return None
            return "registration", f"begun {begun:%Y-%m-%d %H:%M} and never ended"
        if info.status != "FINISHED":
            return "registration", "failed"
        if _moment(info.end_time) > self.before:
            return None
        return "registration", "no version refers to it"

    def _annexes(self, model: str, run: Any) -> Iterator[Garbage]:
        """Folders beside a version's bundle that no tag of it names."""
        root = run.info.artifact_uri.rstrip("/")
        if (local := artifacts.local_folder(root)) is not None:
            self.folders.append(local)
        sizes: dict[str, int] = {}
        for name, size in artifacts.stored(self.registry, f"{root}/{ANNEXES}").items():
            place = "/".join(name.split("/")[:2])
            sizes[place] = sizes.get(place, 0) + size
        for place, size in sizes.items():
            if not self._unknown(run, place):
                continue
            where = f"{root}/{ANNEXES}/{place}"
            if not self.dry_run:
                with write_lock(self.registry, self.client, model) as lock:
                    if not self._unknown(self.client.get_run(run.info.run_id), place):
                        continue
                    lock.check()
                    artifacts.remove_files(self.registry, where)
            what = f"{model}: an annex ({place}) that was never finished"
            yield Garbage("annex", what, where, size)

    def _unknown(self, run: Any, place: str) -> bool:
        """Whether no version has this annex, and nobody has begun to write it of late."""
        target, _, digest = place.partition("/")
        versions = self._versions(run)
        if any(version.tags.get(ANNEX + target) == digest for version in versions):
            return False
        # What is on its way there begins with a dot: `.DIGEST.0123abcd.partial`.
        begun = run.data.tags.get(f"{UPLOADING}{target}.{digest.lstrip('.').partition('.')[0]}")
        return begun is None or datetime.fromisoformat(begun) <= self.before


def _moment(milliseconds: int | None) -> datetime:
    return datetime.fromtimestamp((milliseconds or 0) / 1000, UTC)


def _temporary(
    registry: Registry, folders: Sequence[Path], cache: str | Path | None, before: datetime
) -> Iterator[Path]:
    """What was to be moved into place when it was complete, and has not been touched since.

    `folders`: those in which a version's files are.
    """
    ours = (".bundle.*.sig", ".artifact.uploading.*")
    candidates = [path for folder in folders for name in ours for path in folder.glob(name)]
    if (sqlite := registry.sqlite) is not None:
        candidates += sqlite.parent.glob(f".{sqlite.name}.*.partial*")
    for folder, names, files in os.walk(cache_root(cache)):
        found = [name for name in (*names, *files) if _PARTIAL.fullmatch(name)]
        candidates += [Path(folder, name) for name in found]
        # Neither into these, nor into what is sealed.
        names[:] = [] if SUMS in files else [name for name in names if name not in found]
    for path in candidates:
        if _PARTIAL.fullmatch(path.name) and _last_change(path) <= before:
            yield path


def _last_change(path: Path) -> datetime:
    """When anything in the folder last changed. A copy may keep the modification times of its
    original, so the kernel's change time (ctime) is taken."""
    changes = [path.lstat().st_ctime]
    for folder, names, files in os.walk(path):
        for name in (*names, *files):
            try:
                changes.append(Path(folder, name).lstat().st_ctime)
            except FileNotFoundError:
                changes.append(datetime.now(UTC).timestamp())  # somebody is at work
    return datetime.fromtimestamp(max(changes), UTC)
