"""The commands that keep a registry in order: what comes back, goes, or differs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeline.cli_options import json_option, registry_at, registry_option, say


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
    from registry.push import push as push_bundle

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
        click.echo(json.dumps(found, indent=1))
        return
    for target in done.kept:
        say(f"{version.ref} has another build of {target}, which stays")
    if done.signature == "kept":
        say(f"{version.ref} has another signature, which stays: `pipeline sign` replaces it")
    if done.new:
        click.echo(f"{folder} is {version.ref} now")
        return
    more = f", and has {', '.join(done.added)} now" if done.added else ""
    click.echo(f"{folder} is {version.ref} already{more}")
