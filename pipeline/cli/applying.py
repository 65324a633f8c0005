"""The command that scores files; and how a scored file was made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import Answer, command, html_option, on_terminal, say, write_page
from pipeline.cli.completion import refs

if TYPE_CHECKING:
    from pipeline.applying import About, Progress, Report
    from pipeline.report import Part

EVERY_S = 30.0
"""Seconds between two lines of progress, if there is no terminal to show a bar."""
MOST_OUTPUTS = 100
"""The largest number of outputs that a page lists."""
_FILE = click.Path(path_type=Path)


@command()
@click.argument("ref", shell_complete=refs)
@click.argument("inputs", metavar="FILE…", nargs=-1, required=True, type=_FILE)
@click.option(
    "--out", required=True, type=_FILE,
    help="A folder, for one output of the same name per FILE; or one file for all outputs.",
)  # fmt: skip
@click.option(
    "--columns", multiple=True, metavar="COLLECTION/COLUMN=NAME",
    help="The name of a column in the files; jets/*=Jet_* for a whole collection. May be repeated.",
)  # fmt: skip
@click.option(
    "--keep", multiple=True, metavar="NAME",
    help="A column of the files, or a pattern, to copy into the outputs. May be repeated.",
)  # fmt: skip
@click.option(
    "--fill", multiple=True, metavar="NAME=VALUE",
    help="The value of nulls in a column of the files. May be repeated.",
)  # fmt: skip
@click.option("--tree", help="The tree of a ROOT file.")
@click.option(
    "--format", "suffix", type=click.Choice(["parquet", "arrow", "root", "h5", "npz"]),
    help="The format of outputs in a folder. Default: that of each FILE.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Scoring threads. Default: one per core.")
@click.option(
    "--dask", metavar="ADDRESS",
    help="Score on the workers of this Dask scheduler; local:4 starts four workers here.",
)  # fmt: skip
@click.option("--mode", type=click.Choice(["production", "test"]), default="production")
@click.option(
    "--lookup", type=click.Choice(["fresh", "prefer-cache", "offline"]), default="fresh",
    help="Where to look up the version of REF: in the registry, or first in this host's record.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace outputs of other jobs.")
@click.option(
    "--counts", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="Count the values of each column into FILE, for `pipeline drift`.",
)  # fmt: skip
@html_option
def apply(
    columns: tuple[str, ...],
    fill: tuple[str, ...],
    suffix: str | None,
    html: Path | None,
    counts: Path | None,
    **given: Any,
) -> Answer:
    """Score FILEs with REF: ROOT (TTree, RNTuple), Parquet, Arrow, HDF5, npz or CSV. A FILE may be
    a folder, or a pattern in quotes.

    If a job was interrupted, the same command continues it. `pipeline show` shows how an output
    was made.
    """
    from pipeline.applying import apply as run
    from soa.files import write_whole

    if html is not None:
        _require_free(html, [*given["inputs"], given["out"]])
    with _bar() as progress:
        done = run(
            columns=dict(map(renaming, columns)),
            fill=dict(map(filling, fill)),
            suffix=suffix and f".{suffix}",
            progress=progress,
            histograms=html is not None,
            watch=counts is not None,
            **given,
        )
    said = write_page(html, lambda: _page_of(done))
    if counts is not None and done.counts is not None:
        write_whole(counts, done.counts.to_json())
        said.append(f"wrote {counts}: pipeline drift compares it with the reference")
    spent = ", ".join(f"{k} {v:.1f} s" for k, v in done.spent.times.items())
    lines = [
        f"{done.rows:,} rows in {done.seconds:.1f} s ({done.found:,} scored before; "
        f"start {done.start:.1f} s, {spent})",
        *(
            f"wrote {path}" if path in done.written else f"{path} is already complete"
            for path in done.outputs
        ),
        *said,
    ]
    data = asdict(done)
    del data["histograms"], data["counts"], data["moved"], data["spent"]["counts"]
    return Answer(data, lines)


def renaming(given: str) -> tuple[str, str]:
    name, _, value = given.partition("=")
    if not name or not value:
        raise click.BadParameter(f"{given!r}: expected COLLECTION/COLUMN=NAME")
    return name, value


def filling(given: str) -> tuple[str, float]:
    name, _, value = given.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(value) if not value.lstrip("+-").isdigit() else int(value)
    raise click.BadParameter(f"{given!r}: expected NAME=VALUE, with a number")


def _require_free(html: Path, taken: list[Path]) -> None:
    """Check before the work that the page replaces no input or output, and can be drawn here."""
    from pipeline.report import require_libraries

    require_libraries()
    if html.absolute() in [path.absolute() for path in taken]:
        raise click.BadParameter(f"--html {html} is a FILE or the output: name another file")


def _page_of(done: Report) -> str:
    from pipeline.applying import read_about
    from pipeline.report import apply_page

    return apply_page(done, [read_about(Path(path)) for path in done.outputs[:MOST_OUTPUTS]])


@contextmanager
def _bar() -> Iterator[Progress | None]:
    """Yields a function that shows the progress on stderr: as a bar on a terminal, else as a line
    from time to time. It is called with the rows that are done, and all rows."""
    if not on_terminal():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, rows: bar.update(task, completed=done, total=rows)


def _lines() -> Progress:
    last = time.monotonic()

    def tell_now_and_then(done: int, rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            say(f"{done:,} of {rows:,} rows")

    return tell_now_and_then


@command(registry=False)
@click.argument("file", type=_FILE)
def explain(file: Path) -> Answer:
    """Show how FILE was made: the version, its gates, the inputs."""
    return explained(file)


def explained(file: Path) -> Answer:
    """How a file of `pipeline apply` was made. Raises ApplyError if it does not say it."""
    from pipeline.applying import read_about
    from soa.records import as_data

    about = read_about(file)
    return Answer(as_data(about), _explained(about))


def _explained(about: About) -> Iterator[Part]:
    from pipeline.report import describe_decisions

    version = f"/{about.version}" if about.version else ""
    yield f"{about.model}{version}, bundle {about.digest}"
    for key in ("registry", "mode", "targets", "engines", "hosts", "software", "created", "by",
                "rows", "keep"):  # fmt: skip
        value = getattr(about, key)
        yield f"  {key:9} {(', '.join(value) or 'none') if isinstance(value, tuple) else value}"
    yield from (f"  from      {each.path}, {each.rows} rows" for each in about.inputs)
    for key, name in about.columns.items():
        yield f"  {key} was {name}"
    passed = about.promotion
    if passed is None:
        yield "no promotion to production is on record in it"
        return
    title = f"promoted by {passed.by} at {passed.at}"
    yield from describe_decisions(title, passed.decisions)
