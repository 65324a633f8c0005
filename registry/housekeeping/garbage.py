"""Garbage: files in a registry and in this host's cache to which nothing refers.

These are the files of registrations that failed or were killed, of removed versions, of annexes
that were never added to a version, and files that a killed process was writing.

A run is ended, and an annex removed, under the model's write lock and after a second check. A
process that registers or builds checks, under the same lock, that all its files still exist before
a tag or a version names them. So the collection never damages a version. The minimum age only
avoids that slow writers must start again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from registry import stamp
from registry.bundle import ANNEXES, SUMS
from registry.history import write_lock
from registry.housekeeping.removal import REMOVED
from registry.mlflow import fetch_all_pages
from registry.ref import NAME_PATTERN
from registry.store import UPLOADING, Registry, bundle_files, cache_root
from registry.version import ANNEX, DIGEST

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Kind = Literal["registration", "removed version", "annex", "temporary"]

_PARTIAL = re.compile(
    r"\..+\.[0-9a-f]{8}\.(partial|old|sig)(-journal|-wal|-shm)?"
    r"|\.artifact\.uploading\..+"  # MLflow's own
)
# MLflow's filter for the runs that hold the files of a version.
_OURS = f"tags.`mlflow.source.name` = 'soa-pipeline' AND tags.{DIGEST} LIKE '%'"
_UNFINISHED = ("RUNNING", "SCHEDULED")


@dataclass(frozen=True)
class Garbage:
    """Files to which nothing refers, in one folder. `bytes`: their size together."""

    kind: Kind
    what: str
    """The model or version that it belonged to, and why nothing refers to it."""
    where: str
    """URI or path."""
    bytes: int


@dataclass(frozen=True)
class _Verdict:
    """What kind of garbage a run is, and why."""

    kind: Kind
    why: str


def collect(
    registry: Registry,
    *,
    older_than: timedelta = timedelta(days=1),
    dry_run: bool = False,
    cache: str | Path | None = None,
) -> list[Garbage]:
    """Remove the garbage and return the list of it; with `dry_run`, only return the list.

    `older_than`: work that may still be running is kept if it is younger. Failed registrations and
    the files of removed versions are collected at once.
    """
    before = datetime.now(UTC) - older_than
    collected: list[Garbage] = []
    folders: list[Path] = []
    if registry.exists:
        with registry.client(write=not dry_run) as client:
            collector = _Collector(registry, client, before, dry_run)
            collected += collector.collect()
            folders = collector.folders
    for path in _find_temporary(registry, folders, cache, before):
        with contextlib.suppress(FileNotFoundError):  # another collector was quicker
            size = _remove_temporary(registry, path, dry_run)
            collected.append(Garbage("temporary", "left by a killed process", str(path), size))
    return collected


def _remove_temporary(registry: Registry, path: Path, dry_run: bool) -> int:
    """Remove a file or folder of this host; return its size in bytes.

    With `dry_run` only return the size. Raises FileNotFoundError if it does not exist.
    """
    size = path.lstat().st_size
    if path.is_dir() and not path.is_symlink():
        size = sum(bundle_files.stored_sizes(registry, str(path)).values())
        if not dry_run:
            bundle_files.remove_tree(path)
    elif not dry_run:
        path.unlink()
    return size


class _Collector:
    """Collects the garbage in a registry.

    `before`: work that began later may still be running, and is left alone. `folders`: the folders
    of this host that hold files of versions; `collect` fills this list.
    """

    def __init__(
        self, registry: Registry, client: MlflowClient, before: datetime, dry_run: bool
    ) -> None:
        self.registry, self.client = registry, client
        self.before, self.dry_run = before, dry_run
        self.folders: list[Path] = []

    def collect(self) -> Iterator[Garbage]:
        """Settle interrupted removals; then remove and yield all garbage in the registry."""
        if not self.dry_run:
            for summary in self.registry.list():
                with self.registry.writing(summary.name):
                    pass  # this settles an interrupted removal
        for model, run in self._find_runs():
            if self._find_versions(run):
                yield from self._collect_annexes(model, run)
            elif (garbage := self._collect_registration(model, run)) is not None:
                yield garbage

    def _find_runs(self) -> Iterator[tuple[str, Any]]:
        """Yield each run that was made for the files of a version, after the model's name."""
        from mlflow.entities import ViewType

        any_stage, search = ViewType.ALL, self.client.search_runs
        for experiment in fetch_all_pages(self.client.search_experiments, view_type=any_stage):
            if re.fullmatch(NAME_PATTERN, experiment.name):
                ids = [experiment.experiment_id]
                for run in fetch_all_pages(search, ids, _OURS, run_view_type=any_stage):
                    yield experiment.name, run

    def _find_versions(self, run: Any) -> Sequence[Any]:
        """Return MLflow's versions that were made of a run; if there are none, of its files."""
        search, info = self.client.search_model_versions, run.info
        versions = fetch_all_pages(search, f"run_id = '{info.run_id}'")
        if versions:
            return versions
        # Somebody may have made a version from the files with MLflow's own tools, without the run.
        source = f"{info.artifact_uri.rstrip('/')}/{bundle_files.FOLDER}"
        return fetch_all_pages(search, f"source_path = '{source}'")

    def _collect_registration(self, model: str, run: Any) -> Garbage | None:
        """Remove a run without a version, and return it; None if it may still become a version.

        The run is first ended under the lock, so that nobody can make a version of it any more.
        """
        verdict = self._judge_run(run)
        if verdict is None:
            return None
        uri = run.info.artifact_uri.rstrip("/")
        if self.dry_run:
            size = sum(bundle_files.stored_sizes(self.registry, uri).values())
        else:
            with write_lock(self.registry, self.client, model) as lock:
                current = self.client.get_run(run.info.run_id)
                if self._find_versions(current) or self._judge_run(current) is None:
                    return None
                if current.info.status in _UNFINISHED:
                    lock.check()
                    self.client.set_terminated(run.info.run_id, "FAILED")
            size = bundle_files.remove_run(self.registry, self.client, run.info.run_id)
        if not size and run.info.lifecycle_stage != "active":
            return None  # an earlier call has collected it
        return Garbage(verdict.kind, f"{model}: {verdict.why}", uri, size)

    def _judge_run(self, run: Any) -> _Verdict | None:
        """Say why a run without a version is garbage; None if it may still become a version."""
        info, tags = run.info, run.data.tags
        if REMOVED in tags:
            return _Verdict("removed version", f"{tags[REMOVED]} was removed")
        if info.status in _UNFINISHED:
            start = stamp.time_of(info.start_time or 0)
            if start > self.before:
                return None
            return _Verdict("registration", f"begun {start:%Y-%m-%d %H:%M} and never ended")
        if info.status != "FINISHED":
            return _Verdict("registration", "failed")
        if stamp.time_of(info.end_time or 0) > self.before:
            return None
        return _Verdict("registration", "no version refers to it")

    def _collect_annexes(self, model: str, run: Any) -> Iterator[Garbage]:
        """Remove and yield the annexes next to a bundle that no tag of a version names."""
        root = run.info.artifact_uri.rstrip("/")
        if (local := bundle_files.local_folder(root)) is not None:
            self.folders.append(local)
        sizes = Counter[str]()
        for name, size in bundle_files.stored_sizes(self.registry, f"{root}/{ANNEXES}").items():
            annex = "/".join(name.split("/")[:2])  # TARGET/DIGEST, see `annex_path`
            sizes[annex] += size
        for annex, size in sizes.items():
            if not self._is_abandoned(run, annex):
                continue
            uri = f"{root}/{ANNEXES}/{annex}"
            if not self.dry_run:
                with write_lock(self.registry, self.client, model) as lock:
                    if not self._is_abandoned(self.client.get_run(run.info.run_id), annex):
                        continue
                    lock.check()
                    bundle_files.remove_files(self.registry, uri)
            yield Garbage(
                "annex", f"{model}: an annex ({annex}) that was never finished", uri, size
            )

    def _is_abandoned(self, run: Any, annex: str) -> bool:
        """Return whether no version has an annex, and no upload of it began after `before`.

        `annex`: its target and digest, as `TARGET/DIGEST`.
        """
        target, _, folder = annex.partition("/")
        versions = self._find_versions(run)
        if any(version.tags.get(ANNEX + target) == folder for version in versions):
            return False
        # While it is being written, the folder's name is `.DIGEST.0123abcd.partial`.
        digest = folder.lstrip(".").partition(".")[0]
        upload_start = run.data.tags.get(f"{UPLOADING}{target}.{digest}")
        return upload_start is None or datetime.fromisoformat(upload_start) <= self.before


def _find_temporary(
    registry: Registry, folders: Sequence[Path], cache: str | Path | None, before: datetime
) -> Iterator[Path]:
    """Yield temporary files and folders that have not been changed since `before`.

    They would have been renamed when complete. `folders`: the local folders of versions' files.
    `cache`: the cache's folder, or None for that of this host.
    """
    candidates: list[Path] = []
    for folder in folders:
        candidates += [*folder.glob(".bundle.*.sig"), *folder.glob(".artifact.uploading.*")]
    if (sqlite := registry.sqlite) is not None:
        for name in (sqlite.name, "import"):
            candidates += sqlite.parent.glob(f".{name}.*.partial*")
    for parent, subfolders, files in os.walk(cache_root(cache)):
        partial = [name for name in (*subfolders, *files) if _PARTIAL.fullmatch(name)]
        candidates += [Path(parent, name) for name in partial]
        # `os.walk` goes into what stays in this list: not into temporary folders or sealed ones.
        sealed = SUMS in files
        subfolders[:] = [name for name in subfolders if not sealed and name not in partial]
    for path in candidates:
        if _PARTIAL.fullmatch(path.name) and _last_change(path) <= before:
            yield path


def _last_change(path: Path) -> datetime:
    """Return the time of the last change of a file, or of anything in a folder.

    It is the change time (ctime), as a copy may keep the modification times of its original. The
    result is the present if a path disappears meanwhile, since another process is at work there.
    """
    paths = [path]
    for parent, subfolders, files in os.walk(path):
        paths += [Path(parent, name) for name in (*subfolders, *files)]
    try:
        last = max(changed.lstat().st_ctime for changed in paths)
    except FileNotFoundError:
        return datetime.now(UTC)  # another process is writing, or has just renamed it
    return datetime.fromtimestamp(last, UTC)
