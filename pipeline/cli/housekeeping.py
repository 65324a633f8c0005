"""The commands that move bundles between hosts and registries, and that remove them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeline.cli.answers import Answer, Number, command, complain, say, show_steps
from pipeline.cli.completion import complete_refs
from soa.files import read_plain
from soa.records import as_record, parse_json
from soa.text import plain

if TYPE_CHECKING:
    from registry.promotion import PromotionRefused
    from registry.ref import Ref
    from registry.store import Entry, Registry
    from registry.version import Version


@command()
@click.argument("ref", metavar="REF|oci://HOST/NAME:TAG", shell_complete=complete_refs)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--runtime", is_flag=True,
    help="Refuse unless soa-runtime alone can run it: in production mode, without torch.",
)  # fmt: skip
def pull(ref: str, folder: Path, runtime: bool, registry: Registry) -> Answer:
    """Copy the bundle of REF to the new FOLDER and check its digests.

    If the version was promoted to production, the copy can be loaded in production mode without a
    registry. From an OCI registry, what `pipeline push` stored there is copied; after a break, the
    same command goes on where it stopped.
    """
    from pipeline.promotion import pull as pull_bundle
    from runtime.opening import find_torchless_engine

    with show_steps() as show, show(f"pulling {ref}", None):
        name, bundle = pull_bundle(registry, ref, folder, runtime=runtime)
    targets = bundle.manifest.targets.items()
    engines = {target: find_torchless_engine(record) for target, record in targets}
    without_torch = {target: engine for target, engine in engines.items() if engine}
    data = {
        "version": name,
        "digest": bundle.digest,
        "folder": str(bundle.path),
        "without_torch": without_torch,
    }
    lines = [f"{name} is in {folder}"]
    if runtime:
        lines += [f"{engine} runs on {t} without torch" for t, engine in without_torch.items()]
    return Answer(data, lines)


@command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("to", metavar="[oci://HOST/NAME:TAG]", required=False)
@click.option(
    "--name", metavar="NAME", help="The model that gets the version. Default: as its manifest says."
)
def push(folder: Path, to: str | None, name: str | None, registry: Registry) -> Answer:
    """Add FOLDER, which `pull` made, to a registry as a new version, or to an OCI registry.

    The digests are checked. Targets that were built later and the signature are copied too. The new
    version has no alias: promotions are not copied. If the registry has this bundle already, its
    version gets only the missing targets and signature. An OCI registry gets the files that it
    lacks; `docker login` stores its password.
    """
    from registry.housekeeping import oci
    from registry.housekeeping import push as push_bundle

    if to is not None:
        if name is not None:
            raise click.UsageError("--name is for a registry of MLflow: an OCI address has its own")
        with show_steps() as show, show(f"pushing {folder}", None):
            address, bundle = oci.push(folder, to)
        address_data = {"version": address, "digest": bundle.digest, "folder": str(bundle.path)}
        return Answer(address_data, [f"{folder} is {address} now"])
    with show_steps() as show, show(f"pushing {folder}", None):
        pushed = push_bundle(registry, folder, name)
    version = pushed.version
    _write_report_page(registry, version)
    for target in pushed.kept:
        say(f"{version.ref} has another build of {target}, which stays")
    if pushed.signature == "kept":
        say(f"{version.ref} has another signature, which stays: `pipeline sign` replaces it")
    data = {
        "version": version.ref,
        "digest": version.digest,
        "new": pushed.new,
        "added": list(pushed.added),
        "kept": list(pushed.kept),
        "signature": pushed.signature,
        "origin": dict(version.origin),
    }
    added = f", and has {', '.join(pushed.added)} now" if pushed.added else ""
    state = "now" if pushed.new else f"already{added}"
    return Answer(data, [f"{folder} is {version.ref} {state}"])


@command()
@click.argument("ref", metavar="NAME/3", shell_complete=complete_refs)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
def rm(ref: str, yes: bool, reason: str, registry: Registry) -> Answer:
    """Remove the version NAME/3 and its files for good; the history keeps a record.

    A version that has an alias cannot be removed.
    """
    from registry.housekeeping import find_removable, remove

    wanted = _parse_registry_ref(ref, "version")
    if not yes:
        version = find_removable(registry, wanted)
        click.confirm(
            plain(
                f"remove {version.ref} ({version.digest[:12]}, made {version.created:%Y-%m-%d}) "
                f"from {registry.shown}?"
            ),
            abort=True,
            err=True,
        )
    removed = remove(registry, wanted, reason)
    data = {"event": removed.event.to_json(), "bytes": removed.bytes}
    return Answer(data, [f"{removed.version.ref} is removed ({_format_size(removed.bytes)})"])


def _parse_registry_ref(ref: str, kind: Literal["model", "version"]) -> Ref:
    """Parse a REF that must name a model or version of the registry. Raises RegistryError for the
    path of a folder. `kind`: what the error asks for."""
    from registry.errors import RegistryError
    from registry.ref import Ref, parse_ref

    parsed = parse_ref(ref)
    if not isinstance(parsed, Ref):
        raise RegistryError(f"{ref} is the path of a folder: name a {kind} of the registry")
    return parsed


@command()
@click.option("--dry-run", is_flag=True, help="List what would be removed; remove nothing.")
@click.option(
    "--older-than", "days", type=Number(0, 36_500), default=1.0, show_default=True,
    metavar="DAYS", help="Keep unfinished work that is younger than this many days.",
)  # fmt: skip
def gc(dry_run: bool, days: float, registry: Registry) -> Answer:
    """Remove unused files from the registry and from this host's cache.

    These are files of registrations that failed or were killed, of removed versions, of builds of
    targets that never finished, and partial files of killed processes. If gc takes the files of a
    slow `run` or `build` for abandoned, that command ends with an error and registers nothing.
    """
    from dataclasses import asdict
    from datetime import timedelta

    from registry.housekeeping import collect

    garbage = collect(registry, older_than=timedelta(days=days), dry_run=dry_run)
    total = sum(each.bytes for each in garbage)
    verb = "would be removed" if dry_run else "removed"
    where = "" if registry.exists else f"; there is no registry at {registry.shown}"
    return Answer(
        {"dry_run": dry_run, "bytes": total, "found": [asdict(each) for each in garbage]},
        [
            *(f"{_format_size(each.bytes):>10}  {each.what}: {each.where}" for each in garbage),
            (f"{_format_size(total)} {verb}" if garbage else "nothing to remove") + where,
        ],
    )


@command(registry=False)
@click.option("--prune", is_flag=True, help="Remove all that no running process uses.")
@click.option(
    "--max-size", metavar="SIZE",
    help="Remove the least recently used until the cache is below 500MB, 20GB, … Nothing that a "
    "running process uses is removed.",
)  # fmt: skip
def cache(prune: bool, max_size: str | None) -> Answer:
    """List the versions in this host's cache, least recently used first; or free space in it.

    The folder is $PIPELINE_CACHE, else $XDG_CACHE_HOME/soa-pipeline, else ~/.cache/soa-pipeline.
    Each download keeps the cache below $PIPELINE_CACHE_SIZE, by default 20GB.
    """
    from registry.store import Cache, cache_root, cache_size_limit, parse_size

    if prune and max_size is not None:
        raise click.UsageError("--prune is --max-size 0kB: give one of the two")
    host_cache = Cache(cache_root())
    bound = cache_size_limit()
    removed: list[Entry] = []
    if prune or max_size is not None:
        removed = host_cache.shrink(parse_size(max_size or "0kB", "--max-size"))
    entries = host_cache.entries()
    models = {entry.digest: read_cached_name(host_cache.root / entry.digest) for entry in entries}
    total = _format_size(sum(entry.size for entry in entries))
    lines = [
        *(_format_cache_line(entry, models[entry.digest]) for entry in entries),
        f"{len(entries)} in {host_cache.root}, {total} of {_format_size(bound)}",
    ]
    if removed:
        freed = _format_size(sum(entry.size for entry in removed))
        lines.insert(-1, f"removed {len(removed)}, {freed}")
    data = {
        "folder": str(host_cache.root),
        "bound": bound,
        "entries": [
            {
                "digest": entry.digest,
                "name": models[entry.digest],
                "bytes": entry.size,
                "used": entry.used.isoformat(),
                "in_use": entry.in_use,
            }
            for entry in entries
        ],
        "removed": [entry.digest for entry in removed],
    }
    return Answer(data, lines)


def _format_cache_line(entry: Entry, model: str) -> str:
    """Returns a line of `cache`: the digest, the size, the time of the last use, whether the entry
    is in use, and its name, `model`."""
    state = "in use" if entry.in_use else ""
    used = f"{entry.used:%Y-%m-%d %H:%M:%S}"
    return f"{entry.digest[:12]}  {_format_size(entry.size):>10}  {used}  {state:6}  {model}"


def read_cached_name(folder: Path) -> str:
    """Read the name of the model from a folder of the cache, and the target if the folder holds one
    that was built later. Returns "?" if neither can be read. Only for display: the files are not
    verified."""
    for file in ("manifest.json", "annex.json"):
        try:
            manifest = as_record(dict[str, Any], parse_json(read_plain(folder / file)))
        except (OSError, ValueError):
            continue
        return " ".join(str(manifest[key]) for key in ("name", "target") if key in manifest)
    return "?"


@command("export")
@click.argument("ref", metavar="NAME[/3]", shell_complete=complete_refs)
@click.argument("path", type=click.Path(path_type=Path))
def export_command(ref: str, path: Path, registry: Registry) -> Answer:
    """Write all versions of NAME, or one, with their history to PATH: a folder, or a *.tar file.

    `pipeline registry import` reads it into another registry. Targets that were built later and
    signatures are included. Policies are not: they belong to the registry.
    """
    from registry.housekeeping import export_to

    export = export_to(registry, _parse_registry_ref(ref, "model"), path)
    exported = [f"{export.name}/{number}" for number in export.versions]
    events = len(export.history)
    data = {"path": str(path), "versions": exported, "events": events}
    return Answer(data, [f"{', '.join(exported)} and {events} events are in {path}"])


@command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="The model to import into. Default: its old name.")
@click.option(
    "--with-aliases", is_flag=True,
    help="Promote each version to the aliases that it had; every gate is asked on this host.",
)  # fmt: skip
def import_command(path: Path, name: str | None, with_aliases: bool, registry: Registry) -> Answer:
    """Bring what `pipeline registry export` wrote to PATH into a registry.

    The digests are checked. The new versions have no aliases; the history gets a record of each
    event. The command may be run again. Exits with 1 if a gate refuses an alias.
    """
    promoted: Mapping[str, str] = {}
    errors: Mapping[str, PromotionRefused] = {}
    if with_aliases:
        from pipeline.promotion import import_with_aliases

        outcome = import_with_aliases(registry, path, name, say)
        imported, promoted, errors = outcome.imported, outcome.promoted, outcome.refused
    else:
        from registry.housekeeping import import_from

        imported = import_from(registry, path, name)
    export = imported.export
    versions: dict[str, str] = {}
    for number, pushed in imported.versions.items():
        _write_report_page(registry, pushed.version)
        versions[f"{export.name}/{number}"] = pushed.version.ref
    data = {
        "from": export.registry,
        "versions": versions,
        "events": imported.events,
        "promoted": promoted,
        "refused": {alias: str(error) for alias, error in errors.items()},
        "codes": {alias: error.code for alias, error in errors.items()},
    }
    shown = [
        *(f"{was} of {export.registry} is {ref}" for was, ref in versions.items()),
        f"{imported.events} events are recorded",
        *(f"{ref} is now @{alias}" for alias, ref in promoted.items()),
    ]
    for error in errors.values():
        complain(f"pipeline: {error} [{error.code}]")
    return Answer(data, shown, passed=not errors)


def _write_report_page(registry: Registry, version: Version) -> None:
    """Write the version's report page next to MLflow's tags. Do nothing if the libraries for pages
    are not installed."""
    from pipeline.errors import ReportError
    from pipeline.report import publish

    with suppress(ReportError):
        publish(registry, version, registry.open(version, verify=False))


def _format_size(count: int) -> str:
    """Returns a number of bytes as text, such as 1.5MB."""
    from pydantic import ByteSize  # imported here, so that `pipeline --help` stays fast

    return ByteSize(count).human_readable(decimal=True)
