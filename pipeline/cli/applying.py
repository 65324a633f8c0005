"""The commands that score files, say how a scored file was made, and compare with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import (
    Answer,
    Number,
    command,
    has_live_progress,
    html_option,
    open_ref,
    say,
    write_page,
)
from pipeline.cli.completion import complete_refs

if TYPE_CHECKING:
    from pipeline.applying import About, Progress, Report
    from pipeline.report import Part
    from registry.store import Registry
    from runtime.opening import Mode
    from runtime.watch import Counts, Moved, Profile

EVERY_S = 30.0
"""Seconds between two lines of progress, if there is no terminal to show a bar."""
MOST_OUTPUTS = 100
"""The largest number of outputs that a page lists."""
MOST_COLUMNS = 20
"""The largest number of columns that `drift` lists."""
_FILE = click.Path(path_type=Path)
_Option = Callable[[Any], Any]
_columns_option: _Option = click.option(
    "--columns", multiple=True, metavar="COLLECTION/COLUMN=NAME",
    help="The name of a column in the files; jets/*=Jet_* for a whole collection. May be repeated.",
)  # fmt: skip
_fill_option: _Option = click.option(
    "--fill", multiple=True, metavar="NAME=VALUE",
    help="The value of nulls in a column of the files. May be repeated.",
)  # fmt: skip
_tree_option: _Option = click.option("--tree", help="The tree of a ROOT file.")
_mode_option: _Option = click.option(
    "--mode", type=click.Choice(["production", "test"]), default="production"
)


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.argument("inputs", metavar="FILE…", nargs=-1, required=True, type=_FILE)
@click.option(
    "--out", required=True, type=_FILE,
    help="A folder, for one output of the same name per FILE; or one file for all outputs.",
)  # fmt: skip
@_columns_option
@click.option(
    "--keep", multiple=True, metavar="NAME",
    help="A column of the files, or a pattern, to copy into the outputs. May be repeated.",
)  # fmt: skip
@_fill_option
@_tree_option
@click.option(
    "--format", "suffix", type=click.Choice(["parquet", "arrow", "root", "h5", "npz"]),
    help="The format of outputs in a folder. Default: that of each FILE.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Scoring threads. Default: one per core.")
@click.option(
    "--dask", metavar="ADDRESS",
    help="Score on the workers of this Dask scheduler; local:4 starts four workers here.",
)  # fmt: skip
@_mode_option
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
    **options: Any,
) -> Answer:
    """Score FILEs with REF: ROOT (TTree, RNTuple), Parquet, Arrow, HDF5, npz or CSV. A FILE may be
    a folder, or a pattern in quotes.

    If a job was interrupted, the same command continues it. `pipeline show` shows how an output
    was made.
    """
    from pipeline.applying import apply as run
    from soa.files import write_whole

    if html is not None:
        _check_page(html, [*options["inputs"], options["out"]])
    with _show_progress() as progress:
        report = run(
            columns=dict(map(_parse_renaming, columns)),
            fill=dict(map(_parse_filling, fill)),
            suffix=suffix and f".{suffix}",
            progress=progress,
            histograms=html is not None,
            watch=counts is not None,
            **options,
        )
    page_lines = write_page(html, lambda: _make_page(report))
    if counts is not None and report.counts is not None:
        write_whole(counts, report.counts.to_json())
        page_lines.append(f"wrote {counts}: pipeline drift compares it with the reference")
    spent = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in report.spent.times.items())
    lines = [
        f"{report.rows:,} rows in {report.seconds:.1f} s ({report.found:,} scored before; "
        f"start {report.start:.1f} s, {spent})",
        *(
            f"wrote {path}" if path in report.written else f"{path} is already complete"
            for path in report.outputs
        ),
        *page_lines,
    ]
    data = asdict(report)
    del data["histograms"], data["counts"], data["moved"], data["spent"]["counts"]
    return Answer(data, lines)


def _parse_renaming(text: str) -> tuple[str, str]:
    """Split a value of `--columns`, COLLECTION/COLUMN=NAME, into the model's column and its name in
    the files. Raises BadParameter."""
    column, _, name = text.partition("=")
    if not column or not name:
        raise click.BadParameter(f"{text!r}: expected COLLECTION/COLUMN=NAME")
    return column, name


def _parse_filling(text: str) -> tuple[str, float]:
    """Split a value of `--fill`, NAME=VALUE, into a column of the files and the number in place of
    its nulls: an int if it is written in digits only, since a float would round large ones. Raises
    BadParameter."""
    name, _, value = text.rpartition("=")
    refusal = click.BadParameter(f"{text!r}: expected NAME=VALUE, with a number")
    if not name:
        raise refusal
    is_whole = value.lstrip("+-").isdigit()
    try:
        return name, int(value) if is_whole else float(value)
    except ValueError:
        raise refusal from None


def _check_page(html: Path, taken: list[Path]) -> None:
    """Check before the work that the libraries for pages are installed, and that the page `html` is
    none of the files in `taken`, which it would replace. Raises ReportError, BadParameter."""
    from pipeline.report import require_libraries

    require_libraries()
    if html.absolute() in [path.absolute() for path in taken]:
        raise click.BadParameter(f"--html {html} is a FILE or the output: name another file")


def _make_page(report: Report) -> str:
    """Make the page of a job, with what its first `MOST_OUTPUTS` outputs say about themselves."""
    from pipeline.applying import read_about
    from pipeline.report import apply_page

    return apply_page(report, [read_about(Path(path)) for path in report.outputs[:MOST_OUTPUTS]])


@contextmanager
def _show_progress() -> Iterator[Progress | None]:
    """Yields a function that shows the progress on stderr: as a bar on a terminal, else as a line
    from time to time. It is called with the number of rows that are done and of all rows."""
    if not has_live_progress():
        yield _make_line_progress()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, rows: bar.update(task, completed=done, total=rows)


def _make_line_progress() -> Progress:
    """Returns a progress function that prints a line, but at most one in `EVERY_S` seconds."""
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
    return explain_file(file)


def explain_file(file: Path) -> Answer:
    """Returns an answer that says how a file of `pipeline apply` was made. Raises ApplyError if the
    file does not say it."""
    from pipeline.applying import read_about
    from soa.records import as_data

    about = read_about(file)
    return Answer(as_data(about), _describe_origin(about))


def _describe_origin(about: About) -> Iterator[Part]:
    """Yields the lines and tables that say where the answers of a scored file are from."""
    from pipeline.report import describe_decisions

    version = f"/{about.version}" if about.version else ""
    yield f"{about.model}{version}, bundle {about.digest}"
    for key in ("registry", "mode", "targets", "engines", "hosts", "software", "created", "by",
                "rows", "keep"):  # fmt: skip
        value = getattr(about, key)
        text = (", ".join(value) or "none") if isinstance(value, tuple) else value
        yield f"  {key:9} {text}"
    yield from (f"  from      {each.path}, {each.rows} rows" for each in about.inputs)
    for key, name in about.columns.items():
        yield f"  {key} was {name}"
    promotion = about.promotion
    if promotion is None:
        yield "no promotion to production is on record in it"
        return
    title = f"promoted by {promotion.by} at {promotion.at}"
    yield from describe_decisions(title, promotion.decisions)


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.argument("inputs", metavar="[FILE…]", nargs=-1, type=_FILE)
@click.option(
    "--limit", type=Number(0), metavar="INDEX",
    help="The index (population stability) from which a column has moved. Default: 0.005.",
)  # fmt: skip
@_columns_option
@_fill_option
@_tree_option
@_mode_option
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
    from runtime.watch import LIMIT, measure_drift

    profile, counts = _read_profile_and_counts(
        ref, inputs, registry, columns=columns, fill=fill, tree=tree, mode=mode
    )
    moved = measure_drift(profile, counts)
    if not moved:
        raise LoadError(
            f"no value of {counts.label} was counted: give files with rows, or counts of calls"
        )
    largest = LIMIT if limit is None else limit
    page_lines = write_page(html, lambda: _make_drift_page(profile, counts, moved, largest))
    beyond = [each.column for each in moved if each.beyond(largest)]
    data = {
        "version": counts.label,
        "digest": counts.digest,
        "calls": counts.calls,
        "limit": largest,
        "beyond": beyond,
        "columns": [asdict(each) for each in moved],
    }
    shown = _list_drift(counts, moved, beyond, largest, page_lines)
    return Answer(data, shown, passed=not beyond)


def _read_profile_and_counts(
    ref: str,
    inputs: Sequence[Path],
    registry: Registry,
    *,
    columns: Sequence[str],
    fill: Sequence[str],
    tree: str | None,
    mode: Mode,
) -> tuple[Profile, Counts]:
    """Returns the profile of a version, which describes the values of its reference, and the counts
    of other values to compare with it.

    `inputs`: data files, whose values are counted now; or files and folders of counts, by default
    the host's folder. A folder may have counts of other versions too; they are left out. The other
    arguments say how data files are read. Raises UsageError for data and counts together.
    """
    data_files = [path for path in inputs if path.suffix != ".json" and not path.is_dir()]
    if data_files and len(data_files) < len(inputs):
        raise click.UsageError("FILEs are either data or counts: give them in two commands")
    if data_files:
        from pipeline.applying import count_files

        return count_files(
            ref, data_files, columns=dict(map(_parse_renaming, columns)),
            fill=dict(map(_parse_filling, fill)), tree=tree, mode=mode, registry=registry,
        )  # fmt: skip
    from runtime.watch import counts_folder, read_counts, read_profile

    bundle = open_ref(ref, registry).bundle
    return read_profile(bundle), read_counts(inputs or [counts_folder()], bundle.digest)


def _make_drift_page(profile: Profile, counts: Counts, moved: Sequence[Moved], limit: float) -> str:
    """Make the page of `drift`. The libraries for pages are imported only here."""
    from pipeline.report import drift_page

    return drift_page(profile, counts, moved, limit)


def _list_drift(
    counts: Counts, moved: Sequence[Moved], beyond: Sequence[str], limit: float, page: list[str]
) -> Iterator[Part]:
    """Yields the lines and tables of `drift`. `beyond`: the names of the columns that moved by more
    than `limit`. `page`: the lines about the page; [] if none was written."""
    from pipeline.report import describe_drift

    yield from describe_drift(moved, MOST_COLUMNS)
    yield f"{len(beyond)} of {len(moved)} columns of {counts.label} moved by more than {limit:g}"
    yield from page
