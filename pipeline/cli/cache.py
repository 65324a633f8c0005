"""The command that shows this host's cache of versions, and makes room in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import json_option, tell, tell_json
from soa.files import as_record, parse_json, read_plain

if TYPE_CHECKING:
    from registry.store import Entry


@click.command()
@click.option("--prune", is_flag=True, help="Remove all that no running process uses.")
@click.option(
    "--max-size", metavar="SIZE",
    help="Remove what was used longest ago until this is left: 500MB, 20GB. What a running process "
    "uses stays.",
)  # fmt: skip
@json_option
def cache(prune: bool, max_size: str | None, as_json: bool) -> None:
    """List the versions that this host keeps, those used longest ago first; or make room.

    The folder is $PIPELINE_CACHE, else $XDG_CACHE_HOME/soa-pipeline, else ~/.cache/soa-pipeline.
    Whatever is fetched keeps it below $PIPELINE_CACHE_SIZE, by default 20GB.
    """
    from registry.store import Cache, cache_root, parse_size, size_bound

    if prune and max_size is not None:
        raise click.UsageError("--prune is --max-size 0kB: give one of the two")
    place = Cache(cache_root())
    most = size_bound()
    removed: list[Entry] = []
    if prune or max_size is not None:
        removed = place.shrink(parse_size(max_size or "0kB", "--max-size"))
    kept = place.entries()
    if as_json:
        described = {"folder": str(place.root), "bound": most}
        lists = {"entries": _plain(place.root, kept), "removed": [e.digest for e in removed]}
        tell_json({**described, **lists})
        return
    for entry in kept:
        used = entry.used.isoformat(sep=" ", timespec="seconds")
        state = "in use" if entry.in_use else ""
        name = _name(place.root / entry.digest)
        tell(f"{entry.digest[:12]}  {_megabytes(entry.size)}  {used}  {state:6}  {name}")
    if removed:
        tell(f"removed {len(removed)}, {_megabytes(sum(e.size for e in removed)).strip()}")
    total = _megabytes(sum(entry.size for entry in kept)).strip()
    tell(f"{len(kept)} in {place.root}, {total} of {_megabytes(most).strip()}")


def _plain(root: Path, entries: Sequence[Entry]) -> list[dict[str, object]]:
    return [
        {
            "digest": entry.digest,
            "name": _name(root / entry.digest),
            "bytes": entry.size,
            "used": entry.used.isoformat(),
            "in_use": entry.in_use,
        }
        for entry in entries
    ]


def _name(folder: Path) -> str:
    """The model's name, and the target of what was built later; unchecked: for people."""
    for file in ("manifest.json", "annex.json"):
        try:
            said = as_record(dict[str, Any], parse_json(read_plain(folder / file)))
        except (OSError, ValueError):
            continue
        return " ".join(str(said[key]) for key in ("name", "target") if key in said)
    return "?"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:8.1f} MB"
