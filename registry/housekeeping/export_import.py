"""Export and import: the versions of a model and its history, between registries.

An export is a folder, or a plain tar file of it. It contains `export.json`, and folders such as
`versions/3/`, each as `pull` makes it, with annexes and signature. The import pushes these folders
(`registry.housekeeping.pushing`) as new versions without aliases. Events become records of kind
"import", each with the whole original event and its registry. They document what happened there,
and have no effect here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any, cast

from registry import stamp
from registry.bundle import (
    ModelName,
    Sha256,
    open_folder,
    record_from_json,
    record_to_json,
    safe_relative,
    write_atomically,
)
from registry.errors import BundleError, NotFoundError, RegistryError
from registry.history import Event, Number
from registry.housekeeping.pushing import Pushed, push
from registry.ref import Ref
from registry.store import Registry, cache_root
from registry.version import Version
from soa.files import open_plain, read_plain
from soa.records import Before, Record, Within, as_data, as_record

EXPORT = "export.json"
EXPORT_SCHEMA = 1
"""The newest export.json that this code writes and reads."""


@dataclass(frozen=True, kw_only=True)
class ExportedVersion(Record):
    """A version, as the exporting registry described it."""

    digest: Sha256
    created: str
    aliases: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Happened:
    """The fields of `Event.to_json` that an import reads."""

    number: Number
    time: str
    kind: str
    by: str
    version: Number | None = None


def _checked_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event if it has the fields of `Happened`; else raise ValueError."""
    as_record(Happened, event)
    return event


@dataclass(frozen=True, kw_only=True)
class ForeignEvent(Record):
    """An event of another registry, and the name of its model there."""

    registry: str
    model: str
    event: Annotated[dict[str, Any], _checked_event]
    """All that `Event.to_json` wrote."""

    @property
    def happened(self) -> Happened:
        """The fields of the event that an import reads."""
        return as_record(Happened, self.event)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The values that identify the event, so that no import adds it twice."""
        return self.registry, self.model, self.happened.number, self.happened.time


def _number_from_key(key: object) -> object:
    """Convert a key of JSON, which is text, to a version's number; return others unchanged."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


@dataclass(frozen=True, kw_only=True)
class Export(Record):
    """The content of `export.json`: the versions and events of an export, and where it is from."""

    schema_version: Annotated[int, Within(1)] = EXPORT_SCHEMA
    name: ModelName
    registry: str
    """The URI of the exporting registry, without a password."""
    by: str
    at: str
    """UTC, ISO 8601."""
    versions: dict[Annotated[Number, Before(_number_from_key, also=str)], ExportedVersion]
    history: list[ForeignEvent]


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    `versions`: the version here, by its number in the export. `events`: how many were added.
    """

    export: Export
    versions: Mapping[int, Pushed]
    events: int


def export_to(registry: Registry, ref: Ref, dest: Path) -> Export:
    """Export a version, or all versions of a model, with its history to `dest`.

    `ref`: a model's name alone means all its versions. `dest`: a new folder, or file if its name
    ends in `.tar`. It is complete and verified, or not created.
    """
    whole_model = ref == Ref(ref.name)
    versions = registry.versions(ref.name) if whole_model else [registry.find(ref)]
    if not versions:
        raise NotFoundError(f"{ref}: the model has no versions")
    events = registry.history(ref.name)
    if not whole_model:
        events = [event for event in events if event.version == versions[0].number]
    export = Export(
        name=ref.name,
        registry=registry.shown,
        by=stamp.user_at_host(),
        at=stamp.now(),
        versions={version.number: _describe_version(version) for version in versions},
        history=[_export_event(event, registry) for event in events],
    )
    with write_atomically(dest) as partial:
        for version in versions:
            registry.fetch(version, partial / "versions" / str(version.number))
        (partial / EXPORT).write_text(record_to_json(export))
        if dest.suffix == ".tar":
            _replace_by_tar(partial)
    return export


def _describe_version(version: Version) -> ExportedVersion:
    """Return what an export says about a version beside its files."""
    return ExportedVersion(
        digest=version.digest,
        created=version.created.isoformat(),
        aliases=list(version.aliases),
        origin=dict(version.origin),
    )


def import_from(registry: Registry, source: Path, name: str | None = None) -> Imported:
    """Import what `export_to` wrote, as model `name`, by default under its original name.

    Every digest of every version is checked before the first version is pushed. A version that
    already exists gets only what it lacks, see `push`; an event that exists is not added again. So
    an interrupted import can be repeated.
    """
    scratch = registry.sqlite.parent if registry.sqlite is not None else cache_root()
    with open_as_folder(source, scratch) as folder:
        export = _read_export(folder, source)
        model = Ref(name or export.name).name
        origin = {"registry": export.registry, "exported_by": export.by, "exported_at": export.at}
        pushed: dict[int, Pushed] = {}
        for number in export.versions:
            original = {"version": f"{export.name}/{number}"}
            version_folder = folder / "versions" / str(number)
            pushed[number] = push(registry, version_folder, model, origin=origin | original)
    numbers = {number: result.version.number for number, result in pushed.items()}
    return Imported(export, pushed, _add_events(registry, model, export, numbers))


def _read_export(folder: Path, source: Path) -> Export:
    """Read the `export.json` in a folder, and check every digest of each version.

    Raises BundleError if a version is not what the file says. `source`: the folder or archive that
    the user named, for errors.
    """
    try:
        text = read_plain(folder / EXPORT)
    except OSError as error:
        raise BundleError(
            f"{source}: not an export: {EXPORT} cannot be read: {error.strerror}"
        ) from error
    export = record_from_json(Export, text, str(source / EXPORT), EXPORT_SCHEMA)
    for number, version in export.versions.items():
        if open_folder(folder / "versions" / str(number)).digest != version.digest:
            raise BundleError(f"{source}: versions/{number} is not what {EXPORT} says")
    return export


def _export_event(event: Event, registry: Registry) -> ForeignEvent:
    """Return an event for the export. An imported one keeps its original registry and content."""
    if event.kind == "import":
        return _read_original_event(event)
    data = {"registry": registry.shown, "model": event.model, "event": event.to_json()}
    return as_record(ForeignEvent, data)


def _read_original_event(event: Event) -> ForeignEvent:
    """Read the event of another registry from one of kind "import". Raises RegistryError."""
    try:
        return as_record(ForeignEvent, event.imported)
    except ValueError as error:
        raise RegistryError(f"{event.title}: not a record that we wrote: {error}") from error


def _imported_keys(events: Iterable[Event]) -> set[tuple[str, str, int, str]]:
    """Return the keys of the foreign events that are imported in `events`."""
    return {_read_original_event(event).key for event in events if event.kind == "import"}


def _add_events(registry: Registry, model: str, export: Export, numbers: Mapping[int, int]) -> int:
    """Record the events of an export that are not in the registry; return how many these are.

    `numbers`: the numbers of versions here, by those in the export.
    """
    events = registry.history(model)
    known, newest = _imported_keys(events), len(events)
    added = 0
    for foreign in export.history:
        if foreign.key in known:
            continue
        happened = foreign.happened
        title = f"{happened.time} {happened.kind} by {happened.by} in {foreign.registry}"
        number = None if happened.version is None else numbers.get(happened.version)
        # Each event takes the lock anew: for all of them, the lock might be held too long.
        with registry.writing(model) as writer:
            if writer.last is not None and writer.last.number != newest:  # others wrote meanwhile
                known = _imported_keys(writer.history.events())
            if foreign.key not in known:
                aliases, original = dict(writer.aliases), as_data(foreign)
                event = Event("import", model, before=aliases, after=aliases, version=number)
                writer.record(replace(event, reason=title, imported=original))
                added += 1
            newest = 0 if writer.last is None else writer.last.number
        known.add(foreign.key)
    return added


def _replace_by_tar(folder: Path) -> None:
    """Replace a folder by a tar file of its content, under the same name."""
    archive = folder.with_suffix(".old")
    try:
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(folder.rglob("*")):
                tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
        shutil.rmtree(folder)
        archive.rename(folder)
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def open_as_folder(source: Path, scratch: Path) -> Iterator[Path]:
    """Yield the folder of an export; a tar is unpacked, and the unpacked folder removed at the end.

    It is unpacked in a new folder in `scratch`: not in /tmp, which may be small, but where
    `pipeline registry gc` finds it if this process is killed. Raises BundleError if `source` is
    neither a folder nor a tar.
    """
    if source.is_dir():
        yield source
        return
    try:
        archive = os.fdopen(open_plain(source, links=True), "rb")
    except OSError as error:
        raise BundleError(f"{source}: cannot be read: {error.strerror}") from error
    folder, is_new = scratch / f".import.{os.urandom(4).hex()}.partial", not scratch.exists()
    with archive, contextlib.ExitStack() as cleanup:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            if is_new:
                cleanup.callback(_remove_if_empty, scratch)
            folder.mkdir()
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            with tarfile.open(fileobj=archive, mode="r:") as tar:
                _extract(tar, os.fstat(archive.fileno()).st_size, folder)
        except (OSError, tarfile.TarError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise BundleError(f"{source}: neither folder nor tar of an export: {why}") from error
        yield folder


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless somebody has put a file into it meanwhile."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _extract(tar: tarfile.TarFile, size: int, folder: Path) -> None:
    """Extract an archive of `size` bytes into `folder`, after a check of all its members.

    Raises ValueError unless these are plain files and folders with safe names that are together no
    larger than the archive.
    """
    members = tar.getmembers()
    bytes_left = size
    for member in members:
        safe_relative(member.name)
        plain_file = member.isreg() and not member.issparse()  # a sparse file may become huge
        if not plain_file and not member.isdir():
            raise ValueError(f"{member.name} is not a plain file")
        bytes_left -= member.size
        if member.size < 0 or bytes_left < 0:
            raise ValueError(f"{member.name} is larger than the archive")
    for member in members:  # by hand: Python 3.11.3 and older have no filter for `extractall`
        path = folder / member.name
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with cast("IO[bytes]", tar.extractfile(member)) as content, path.open("xb") as out:
            shutil.copyfileobj(content, out)
