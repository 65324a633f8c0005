"""The commands that keep a registry in order: what comes back, goes, or differs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

from pipeline.cli.options import (
    Number,
    json_option,
    registry_at,
    registry_option,
    say,
    tell,
    tell_json,
)
from soa.text import plain


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="NAME", help="The model that gets the version. Default: as its manifest says."
)
@registry_option
@json_option
def push(folder: Path, name: str | None, registry_uri: str | None, as_json: bool) -> None:
    """Bring FOLDER, which `pull` made, into a registry as a new version, digests checked.

    With what was built for it later, and its signature. It starts without an alias: promotions do
    not travel. A bundle that is there already is named, and gets what it lacks.
    """
    from registry.housekeeping import push as push_bundle

    done = push_bundle(registry_at(registry_uri), folder, name)
    version = done.version
    if as_json:
        found = {
            "version": version.ref,
            "digest": version.digest,
            "new": done.new,
            "added": list(done.added),
            "kept": list(done.kept),
            "signature": done.signature,
            "origin": dict(version.origin),
        }
        tell_json(found)
        return
    for target in done.kept:
        say(f"{version.ref} has another build of {target}, which stays")
    if done.signature == "kept":
        say(f"{version.ref} has another signature, which stays: `pipeline sign` replaces it")
    if done.new:
        tell(f"{folder} is {version.ref} now")
        return
    more = f", and has {', '.join(done.added)} now" if done.added else ""
    tell(f"{folder} is {version.ref} already{more}")


@click.command()
@click.argument("ref", metavar="NAME/3")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
@registry_option
@json_option
def rm(ref: str, yes: bool, reason: str, registry_uri: str | None, as_json: bool) -> None:
    """Remove the version NAME/3 and its files, for good; the history keeps a record of it.

    A version that holds an alias is refused.
    """
    from registry.errors import RegistryError
    from registry.housekeeping import remove
    from registry.reference import Ref, parse_ref

    registry = registry_at(registry_uri)
    wanted = parse_ref(ref)
    if not isinstance(wanted, Ref):
        raise RegistryError(f"{ref}: the path of a folder, a version of the registry is needed")
    if not yes:
        version = registry.find(wanted)
        click.confirm(
            plain(
                f"remove {version.ref} ({version.digest[:12]}, made {version.created:%Y-%m-%d}) "
                f"from {registry!r}?"
            ),
            abort=True,
            err=True,
        )
    done = remove(registry, wanted, reason)
    if as_json:
        tell_json({"event": done.event.to_json(), "bytes": done.bytes})
        return
    tell(f"{done.version.ref} is removed ({in_bytes(done.bytes)})")


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what there is, and remove nothing.")
@click.option(
    "--older-than", "days", type=Number(0, 36_500), default=1.0, show_default=True,
    metavar="DAYS", help="Keep unfinished work that is younger than this many days.",
)  # fmt: skip
@registry_option
@json_option
def gc(dry_run: bool, days: float, registry_uri: str | None, as_json: bool) -> None:
    """Remove what nothing refers to, from the registry and from this host's cache.

    Files of registrations that failed or were killed, of versions that were removed, of targets
    whose build never ended; and what killed processes left of files they were writing. A `run` or
    `build` that is at work is never harmed: taken for abandoned, it is refused in one line.
    """
    from dataclasses import asdict
    from datetime import timedelta

    from registry.housekeeping import collect

    found = collect(registry_at(registry_uri), older_than=timedelta(days=days), dry_run=dry_run)
    total = sum(each.bytes for each in found)
    if as_json:
        shown = {"dry_run": dry_run, "bytes": total, "found": [asdict(each) for each in found]}
        tell_json(shown)
        return
    for each in found:
        tell(f"{in_bytes(each.bytes):>10}  {each.what}: {each.where}")
    verb = "would be removed" if dry_run else "removed"
    tell(f"{in_bytes(total)} {verb}" if found else "nothing to remove")


@click.command()
@click.argument("a")
@click.argument("b")
@registry_option
@json_option
def diff(a: str, b: str, registry_uri: str | None, as_json: bool) -> None:
    """Show what changed from A to B: weights, config, blocks, targets, deviations, times, tools.

    Each is a REF: a version, or ./FOLDER of a bundle. Nothing is measured anew: deviations and
    times are those recorded when each was built.
    """
    from pipeline.report import console, print_difference
    from pipeline.report import diff as compare

    found = compare(registry_at(registry_uri), a, b)
    if as_json:
        tell_json(found.to_json())
        return
    print_difference(console(), found)


@click.command("export")
@click.argument("ref", metavar="NAME[/3]")
@click.argument("path", type=click.Path(path_type=Path))
@registry_option
@json_option
def export_command(ref: str, path: Path, registry_uri: str | None, as_json: bool) -> None:
    """Write all versions of NAME, or one, with their history to PATH: a folder, or a *.tar file.

    For `pipeline import` in another registry. With what was built later and with signatures.
    Policies stay: they are the registry's own.
    """
    from registry.errors import RegistryError
    from registry.housekeeping import export_to
    from registry.reference import Ref, parse_ref

    wanted = parse_ref(ref)
    if not isinstance(wanted, Ref):
        raise RegistryError(f"{ref}: the path of a folder, a model of the registry is needed")
    made = export_to(registry_at(registry_uri), wanted, path)
    refs = [f"{made.name}/{number}" for number in made.versions]
    if as_json:
        shown = {"path": str(path), "versions": refs, "events": len(made.history)}
        tell_json(shown)
        return
    tell(f"{', '.join(refs)} and {len(made.history)} events are in {path}")


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="The model that gets them. Default: as it was called.")
@click.option(
    "--with-aliases", is_flag=True,
    help="Promote each version to the aliases that it had: every gate is asked, here.",
)  # fmt: skip
@registry_option
@json_option
def import_command(
    path: Path, name: str | None, with_aliases: bool, registry_uri: str | None, as_json: bool
) -> None:
    """Bring what `pipeline export` wrote to PATH into a registry, digests checked.

    New versions without aliases, and a record of each event in the history. May be run again. Exits
    with 1 where a gate refuses an alias.
    """
    registry = registry_at(registry_uri)
    promoted: Mapping[str, str] = {}
    refused: Mapping[str, Exception] = {}
    if with_aliases:
        from pipeline.promotion import import_with_aliases

        found, promoted, refused = import_with_aliases(registry, path, name, say)
    else:
        from registry.housekeeping import import_from

        found = import_from(registry, path, name)
    export = found.export
    versions = {f"{export.name}/{n}": each.version.ref for n, each in found.versions.items()}
    if as_json:
        shown = {
            "from": export.registry,
            "versions": versions,
            "events": found.events,
            "promoted": promoted,
            "refused": {alias: str(error) for alias, error in refused.items()},
        }
        tell_json(shown)
    else:
        for was, ref in versions.items():
            tell(f"{was} of {export.registry} is {ref}")
        tell(f"{found.events} events are recorded")
        for alias, ref in promoted.items():
            tell(f"{ref} is now @{alias}")
    for error in refused.values():
        say(f"pipeline: {error}")
    if refused:
        sys.exit(1)


def in_bytes(count: int) -> str:
    """Three significant digits."""
    value, units = float(count), ["B", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.4g} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"
