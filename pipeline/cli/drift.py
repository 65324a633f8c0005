"""The command that compares what a version reads and answers with its reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.answers import Answer, Number, command, html_option, opened_at, write_page
from pipeline.cli.applying import filling, renaming
from pipeline.cli.completion import refs

if TYPE_CHECKING:
    from pipeline.report import Part
    from registry.store import Registry
    from runtime.opening import Mode
    from runtime.watch import Counts, Moved, Profile

_SHOWN = 20
_FILE = click.Path(path_type=Path)


@command()
@click.argument("ref", shell_complete=refs)
@click.argument("inputs", metavar="[FILE…]", nargs=-1, type=_FILE)
@click.option(
    "--limit", type=Number(0), metavar="INDEX",
    help="The index (population stability) from which a column has moved. Default: 0.005.",
)  # fmt: skip
@click.option(
    "--columns", multiple=True, metavar="COLLECTION/COLUMN=NAME",
    help="The name of a column in files of data, as for `pipeline apply`. May be repeated.",
)  # fmt: skip
@click.option(
    "--fill", multiple=True, metavar="NAME=VALUE",
    help="The value of nulls in a column of files of data. May be repeated.",
)  # fmt: skip
@click.option("--tree", help="The tree of a ROOT file.")
@click.option("--mode", type=click.Choice(["production", "test"]), default="production")
@html_option
def drift(
    ref: str,
    inputs: tuple[Path, ...],
    limit: float | None,
    columns: tuple[str, ...],
    fill: tuple[str, ...],
    tree: str | None,
    mode: Mode,
    html: Path | None,
    registry: Registry,
) -> Answer:
    """Show which columns of REF moved away from its reference; exit with 1 if one did.

    A FILE is data, as for `pipeline apply`; or counts (.json) that a session (PIPELINE_WATCH) or
    `pipeline apply --counts` kept, or a folder of them. Default: the folder $PIPELINE_COUNTS, else
    ./pipeline-counts.
    """
    from runtime.errors import LoadError
    from runtime.watch import LIMIT
    from runtime.watch import drift as distances

    data = [each for each in inputs if each.suffix != ".json" and not each.is_dir()]
    if data and len(data) < len(inputs):
        raise click.UsageError("FILEs are either data or counts: give them in two commands")
    if data:
        from pipeline.applying import count_files

        profile, counts = count_files(
            ref, data, columns=dict(map(renaming, columns)), fill=dict(map(filling, fill)),
            tree=tree, mode=mode, registry=registry,
        )  # fmt: skip
    else:
        profile, counts = _kept(ref, inputs, registry)
    moved = distances(profile, counts)
    if not moved:
        raise LoadError(
            f"no value of {counts.label} was counted: give files with rows, or counts of calls"
        )
    most = LIMIT if limit is None else limit
    said = write_page(html, lambda: _page(profile, counts, moved, most))
    beyond = [each.column for each in moved if each.beyond(most)]
    answer = {
        "version": counts.label,
        "digest": counts.digest,
        "calls": counts.calls,
        "limit": most,
        "beyond": beyond,
        "columns": [asdict(each) for each in moved],
    }
    return Answer(answer, _shown(counts, moved, beyond, most, said), not beyond)


def _kept(ref: str, inputs: Sequence[Path], registry: Registry) -> tuple[Profile, Counts]:
    """The profile of a version, and its counts in files and folders. A folder may have counts of
    other versions too; they are left out."""
    from runtime.watch import profile_of, read_counts

    bundle = opened_at(ref, registry).bundle
    files = inputs or [Path(os.environ.get("PIPELINE_COUNTS", "pipeline-counts"))]
    return profile_of(bundle), read_counts(files, bundle.digest)


def _page(profile: Profile, counts: Counts, moved: Sequence[Moved], limit: float) -> str:
    from pipeline.report import drift_page

    return drift_page(profile, counts, moved, limit)


def _shown(
    counts: Counts, moved: Sequence[Moved], beyond: Sequence[str], limit: float, said: list[str]
) -> Iterator[Part]:
    from pipeline.report import describe_drift

    yield from describe_drift(moved, _SHOWN)
    yield f"{len(beyond)} of {len(moved)} columns of {counts.label} moved by more than {limit:g}"
    yield from said
