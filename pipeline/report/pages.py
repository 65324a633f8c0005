"""Reports as pages: HTML that needs no other file, no network and no script.

A page has the same lines and tables as the terminal, and plots. Text from others is escaped, so it
can never act as HTML. jinja2 and matplotlib are imported only here and in `figures.py`, when a page
is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ReportError
from pipeline.report.difference import describe_difference
from pipeline.report.drift import describe_drift
from pipeline.report.figures import (
    Figure,
    deviation_figure,
    deviations_to_draw,
    drift_figure,
    error_figure,
    histogram_figure,
    operators_figure,
    roc_figure,
    speed_figure,
    ulp_figure,
    why_not_drawn,
)
from pipeline.report.tables import Part, Table, new_table
from pipeline.report.versions import (
    SPREAD,
    blocks_table,
    collect_facts,
    describe_annex,
    describe_artifact_facts,
    describe_benchmark,
    describe_decisions,
    describe_history,
    describe_metrics,
    describe_reference,
    describe_validation,
    describe_versions,
    ranges_text,
    read_benchmark,
    read_curves,
    read_validation,
)
from registry.bundle import Bundle
from registry.history import Event
from registry.version import Version
from runtime.checked import Deviation
from runtime.watch import shares_of
from soa.files import write_whole
from soa.signature import BoundBlock, Signature
from soa.text import microseconds, number, plain
from stages.reference import Arrays, Reference, inputs_at
from stages.reports import BenchmarkReport, Curve, NotDrawn, Residual, Roc, ValidationReport

if TYPE_CHECKING:
    from pipeline.applying import About, Report
    from registry.store import Registry
    from runtime.watch import Counts, Moved, Profile
    from stages.timing import OperatorTime

REPORT = "report.html"  # the name of the page in MLflow
_MOST_VALUES = 8  # of a row
_MOST_PLOTS = 24  # of a section
_MOST_OPERATORS = 8  # of a plot
_NOT_KEPT = NotDrawn("the release that built it kept nothing to draw")


@dataclass(frozen=True)
class Step:
    """A box of a `Flow`. Each line is a name and the text behind it."""

    title: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Flow:
    """The steps from input columns to output columns, drawn as boxes."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Section:
    """A part of a page, with a heading. Its own parts that are None are left out."""

    title: str
    parts: list[Part | Figure | Flow | None] = field(default_factory=list)


def render_page(
    title: str,
    sections: Sequence[Section],
    lead: Iterable[str] = (),
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page as HTML. Empty sections, tables' empty columns and empty lines are left out.

    `lead`: the lines below the title. `links`: pairs of text and address, shown above it. Raises
    ReportError if a library is missing.
    """
    with _explain_missing_library():
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def without_controls(value: object) -> object:
        return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True, finalize=without_controls, undefined=StrictUndefined,
    )  # fmt: skip
    filled = [
        Section(section.title, [_trim_table(part) for part in section.parts if part is not None])
        for section in sections
    ]
    return templates.get_template("page.html").render(
        title=title, lead=[line for line in lead if line], links=links,
        sections=[section for section in filled if section.parts],
    )  # fmt: skip


def _trim_table(part: Part | Figure | Flow) -> Part | Figure | Flow:
    """Return a part of a page; a table loses its empty columns."""
    return part.without_empty_columns() if isinstance(part, Table) else part


@contextmanager
def _explain_missing_library() -> Iterator[None]:
    """Turn an ImportError in the block into a ReportError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ReportError(
            f"a page needs {error.name}: pip install 'soa-pipeline[report]'"
        ) from error


def require_libraries() -> None:
    """Import the libraries that pages need; raise ReportError if one is not installed."""
    with _explain_missing_library():
        import jinja2  # noqa: F401
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401


def version_page(
    bundle: Bundle,
    version: Version | None = None,
    events: Sequence[Event] = (),
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the page about a version, or about a bundle in a folder if `version` is None.

    `events`: those of the version's model. `links`: see `render_page`.
    """
    manifest = bundle.manifest
    title = version.ref if version else f"{manifest.name}, bundle {bundle.digest[:12]}"
    targets = (
        f"{target}: {record.status}" + (f", {record.choice()}" if record.chosen else "")
        for target, record in manifest.targets.items()
    )
    aliases = " ".join(f"@{alias}" for alias in (version.aliases if version else ()))
    require_libraries()
    sections = [
        Section("What it is", [make_flow(manifest.name, Signature.from_dict(manifest.signature)),
                               blocks_table(manifest)]),
        Section("Agreement with the model", list(_agreement_parts(bundle))),
        Section("Speed", [part for target in manifest.targets
                          for part in speed_parts(target, read_benchmark(bundle, target))]),
        Section("Reference and metrics",
                [*describe_reference(bundle), *describe_metrics(bundle), *_curve_parts(bundle)]),
        Section("History", list(_history_parts(version, events))),
        Section("Provenance", list(_provenance_parts(bundle, version))),
    ]  # fmt: skip
    return render_page(title, sections, [manifest.description, aliases, *targets], links)


def make_flow(name: str, signature: Signature) -> Flow:
    """Return the boxes of the model `name`: input columns, blocks, the model, output columns."""

    def columns(bound_blocks: Sequence[BoundBlock]) -> tuple[tuple[str, str], ...]:
        """Return a line for each collection, with its columns."""
        by_collection: dict[str, dict[str, None]] = {}
        for bound in bound_blocks:
            names = by_collection.setdefault(bound.block.collection, {})
            names |= dict.fromkeys(bound.block.columns)
        return tuple((collection, ", ".join(names)) for collection, names in by_collection.items())

    def blocks(bound_blocks: Sequence[BoundBlock]) -> tuple[tuple[str, str], ...]:
        """Return a line for each block, with its dtype and the shape of a row."""
        return tuple(
            (bound.name, f"{bound.plan.dtype} {' by '.join(map(str, bound.plan.feature_shape))}")
            for bound in bound_blocks
        )

    return Flow(
        (
            Step("Columns in", columns(signature.inputs)),
            Step("Blocks", blocks(signature.inputs)),
            Step("Model", ((name, f"rows {ranges_text(signature)}"), *blocks(signature.outputs))),
            Step("Columns out", columns(signature.outputs)),
        )
    )


def _agreement_parts(bundle: Bundle) -> Iterator[Part | Figure | None]:
    """Yield tables and figures that show how each target's artifacts agree with the reference."""
    for target, record in bundle.manifest.targets.items():
        reports = read_validation(bundle, target)
        yield from describe_validation(f"{target} ({record.status})", reports)
        for output in dict.fromkeys(name for report in reports for name in report.worst):
            tolerance = bundle.manifest.tolerances.get(output)
            caption = f"{target}: largest deviation of {output} by rows"
            yield deviation_figure(caption, output, reports, tolerance.atol if tolerance else 0.0)
            series = deviations_to_draw(output, reports, record.chosen)
            yield error_figure(f"{target}: how far {output} is off", series)
            yield ulp_figure(f"{target}: how far {output} is off, in ULP", series)
        if chosen := next((report for report in reports if report.engine == record.chosen), None):
            yield from _describe_equality(bundle, chosen)
        with suppress(ValueError, KeyError, IndexError):  # a report from others may not fit
            yield _worst_rows_table(bundle, reports, record.chosen)
        yield from describe_artifact_facts(record)


def _describe_equality(bundle: Bundle, chosen: ValidationReport) -> Iterator[Part]:
    """Say for each output of the chosen artifact whether all its values equal the model's.

    If they do not, and the output is a classifier's, say which rows change their class.
    """
    signature = Signature.from_dict(bundle.manifest.signature)
    for bound in signature.outputs:
        deviation = chosen.worst.get(bound.name)
        if deviation is None or not deviation.elements:
            continue
        if not deviation.max_abs and not deviation.nonfinite_mismatches:
            values = f"all {deviation.elements:,} values of {chosen.engine}"
            yield f"{bound.name}: {values} are equal to the model's"
        elif deviation.argmax == 1:
            yield f"{bound.name}: no row changes its class with {chosen.engine}"
        elif deviation.reclassified:
            yield _confusion_table(bound, chosen.engine, deviation)


def _confusion_table(bound: BoundBlock, engine: str, deviation: Deviation) -> Table:
    """Return a table that counts rows by the model's class and the artifact's, if these differ."""
    classes = [bound.plan.components[i] for i in bound.plan.order]

    def name_of(index: int) -> str:
        """Name a class by its column, and by its element if the column is a vector: `scores[2]`."""
        if index >= len(classes):  # a report from others may not fit
            return f"{index}"
        column, element = classes[index]
        is_vector = (column, 1) in classes  # it has a second element
        return f"{column}[{element}]" if is_vector else column

    rows_of_pair = {(of_model, now): rows for of_model, now, rows in deviation.reclassified}
    classes_now = sorted({now for _, now in rows_of_pair})
    title = f"{bound.name}: rows of another class with {engine}, over all sizes"
    table = new_table(title, "the model's class", *(f"now {name_of(now)}" for now in classes_now))
    for of_model in sorted({of_model for of_model, _ in rows_of_pair}):
        counts = (rows_of_pair.get((of_model, now), 0) for now in classes_now)
        table.add_row(name_of(of_model), *(f"{n:,}" if n else "" for n in counts))
    return table


def _worst_rows_table(
    bundle: Bundle, reports: Sequence[ValidationReport], chosen: str | None
) -> Table | None:
    """Return a table with the row of each output that deviates most, and the inputs of that row.

    `chosen`: the engine of the artifact. Returns None if no value of it deviates, or it has no
    report.
    """
    signature = Signature.from_dict(bundle.manifest.signature)
    with_cases = (report for report in reports if report.engine == chosen and report.cases)
    report = next(with_cases, None)
    if report is None:
        return None
    inputs = Reference.load(bundle.file(bundle.manifest.reference), signature).inputs
    table = new_table(f"{chosen}: rows that are farthest off", "output", "size", "row", "deviation",
                      "inputs")  # fmt: skip
    for bound in signature.outputs:
        cases = [case for case in report.cases if case.outputs[bound.name].max_abs > 0]
        if not cases:
            continue
        case = max(cases, key=lambda case: case.outputs[bound.name].max_abs)
        worst = case.outputs[bound.name]
        arrays = inputs_at(signature, inputs, case.rows)
        size = ", ".join(f"{dim}={n:,}" for dim, n in case.rows.items())
        values = _row_text(signature, arrays, bound.rows, worst.worst_row)
        table.add_row(bound.name, size, f"{worst.worst_row}", number(worst.max_abs), values)
    return table if table.rows else None


def _row_text(signature: Signature, arrays: Arrays, dim: str, row: int | None) -> str:
    """Write the names and values of the first columns in a row of the row dimension `dim`.

    `arrays`: the input columns by collection. The text is empty if `row` is None.
    """
    if row is None:
        return ""
    values = [
        f"{name} {number(float(array[row]), digits=4)}"
        for collection, columns in arrays.items()
        if signature.rows_of.get(collection) == dim
        for name, array in columns.items()
        if array.ndim == 1
    ]
    ellipsis = ", …" if len(values) > _MOST_VALUES else ""
    return ", ".join(values[:_MOST_VALUES]) + ellipsis


def _curve_parts(bundle: Bundle) -> Iterator[Part | Figure | None]:
    """Yield the curves of each target's metrics, or a note that an older release kept none."""
    recorded = dict(read_curves(bundle))
    for target, record in bundle.manifest.targets.items():
        curves = dict.fromkeys(record.metrics, _NOT_KEPT) | recorded.get(target, {})
        yield from _target_curves(target, curves)


def _target_curves(target: str, curves: Mapping[str, Curve]) -> Iterator[Part | Figure | None]:
    """Yield the plots of a target's metrics, and the reason for each curve that is not drawn.

    All ROC curves are in one plot, and equal ones are one line with the names of all its metrics.
    The residuals of each regression are a plot of their own. `curves`: by metric.
    """
    scores: dict[Roc, list[str]] = {}
    for name, curve in curves.items():
        if why := why_not_drawn(curve):
            yield f"{target}: {name} is not drawn: {why}."
        elif isinstance(curve, Roc):
            scores.setdefault(curve, []).append(name)
        elif isinstance(curve, Residual):
            label = "(output - label) / label" if curve.relative else "output - label"
            caption = "; ".join([f"{target}: residuals of {name}", *curve.found.notes()])
            yield histogram_figure(caption, label, curve.found)
    curve_of = {", ".join(names): curve for curve, names in scores.items()}
    yield roc_figure(f"{target}: background that passes with the signal", curve_of)


def speed_parts(target: str, timed: BenchmarkReport) -> Iterator[Part | Figure | None]:
    """Yield the times of a target as a plot and a table; nothing if none was measured."""
    if timed.timings:
        yield speed_figure(f"{target}: time of a call by rows, median with 5 … 95 %", timed)
        yield describe_benchmark(f"{target}: one call from SoA to SoA, {SPREAD}", timed)


def _provenance_parts(bundle: Bundle, version: Version | None) -> Iterator[Part]:
    """Yield where a version is from, and where its targets that were built later are from."""
    yield new_table("", "", "", rows=collect_facts(bundle, version).items())
    for target in bundle.manifest.targets:
        yield from describe_annex(bundle, target)


def _history_parts(version: Version | None, events: Sequence[Event]) -> Iterator[Part]:
    """Yield the events that concern a version, and the decisions that let it have its aliases.

    `events`: those of its model. Nothing is yielded if `version` is None.
    """
    if version is None:
        return
    number = version.number
    own = [event for event in events if number in (event.version, *event.after.values())]
    if own:
        yield describe_history(version.name, own)
    for alias in version.aliases:
        promotion = version.promotion(alias)
        if promotion is not None:
            title = f"to @{alias} by {promotion.by} at {promotion.at}"
            yield from describe_decisions(title, promotion.decisions)


def bench_page(ref: str, reports: Mapping[str, BenchmarkReport]) -> str:
    """Return the page of `pipeline check --times` about a version. `reports`: by target."""
    sections = [
        Section(target, list(speed_parts(target, timed))) for target, timed in reports.items()
    ]
    return render_page(f"Speed of {ref}", sections, ["Measured on this host, side by side."])


def operators_page(ref: str, table: Table, times: Sequence[OperatorTime]) -> str:
    """Return the page of `pipeline check --operators`. `table`: all `times`, the longest first."""
    figure = operators_figure("The operators that take most", times[:_MOST_OPERATORS])
    sections = [Section("Shares of a call of lanes", [table, figure])]
    return render_page(f"Operators of {ref}", sections, ["Measured on this host, in one thread."])


def apply_page(report: Report, about: Sequence[About]) -> str:
    """Return the page about a job of `pipeline apply`.

    `about`: the records of its first outputs, at least one, in the order of `report.outputs`.
    """
    scored = report.spent.rows
    count = f"{scored:,}" if scored else "none"
    now = "" if scored == report.rows else f", {count} of them now"
    facts_table = new_table("", "", "", rows=_nonempty_facts(_facts_of_job(report, about)))
    more = len(report.outputs) - len(about)
    more_line = f"and {more:,} more outputs" if more else None
    return render_page(
        f"{report.rows:,} rows scored by {_scorer_name(about[0])}{now}",
        [
            Section("The run", [facts_table, _outputs_table(report, about), more_line]),
            Section("Against the reference", list(describe_drift(report.moved))),
            Section("Answers", list(_answer_parts(report))),
        ],
    )


def _scorer_name(about: About) -> str:
    """Name the version that made an output, or its model if that was a bundle in a folder."""
    return f"{about.model}/{about.version}" if about.version else about.model


def _facts_of_job(report: Report, about: Sequence[About]) -> dict[str, str]:
    """Return facts about a job as texts, by name; a text may be empty.

    Facts that are the same for all outputs are taken from the first one.
    """
    first, scored = about[0], report.spent.rows
    targets = dict.fromkeys(target for output in about for target in output.targets)
    engines = dict.fromkeys(engine for output in about for engine in output.engines)
    took = report.seconds - report.start
    times = {name: seconds for name, seconds in report.spent.times.items() if seconds}
    return {
        "version": f"{_scorer_name(first)}, bundle {first.digest[:12]}",
        "mode": first.mode,
        "targets": ", ".join(targets),
        "engines": ", ".join(engines),
        "rows": f"{report.rows:,}",
        "scored now": f"{scored:,}" + (f", {number(scored / took)} a second" if scored else ""),
        "scored before": f"{report.found:,}" if report.found else "",
        "time": f"{microseconds(1e6 * report.seconds)}, {microseconds(1e6 * report.start)} of it "
        "to open the version and inspect the files",
        "time of all threads": ", ".join(f"{n} {microseconds(1e6 * s)}" for n, s in times.items()),
        "columns kept": ", ".join(first.keep),
        "by": f"{first.by} at {first.created}, {first.software}",
    }


def _outputs_table(report: Report, about: Sequence[About]) -> Table:
    """Return a table of the first outputs of a job, those to which `about` has records."""
    table = new_table("", "output", "rows", "state", "input")
    for path, output in zip(report.outputs, about, strict=False):
        state = "written now" if path in report.written else "already complete"
        inputs = ", ".join(Path(scored.path).name for scored in output.inputs)
        table.add_row(Path(path).name, f"{output.rows:,}", state, inputs)
    return table


def drift_page(profile: Profile, counts: Counts, moved: Sequence[Moved], limit: float) -> str:
    """Return the page of `pipeline drift`.

    `profile`: the distributions of the reference. `moved`: the columns, farthest first. `limit`:
    the index beyond which a column counts as moved.
    """
    beyond = [distance.column for distance in moved if distance.beyond(limit)]
    facts = {
        "version": f"{counts.label}, bundle {counts.digest[:12]}",
        "calls counted": f"{counts.calls:,}",
        "limit": number(limit),
        "beyond it": ", ".join(beyond) or "none",
    }
    return render_page(
        f"{len(beyond)} of {len(moved)} columns of {counts.label} moved",
        [
            Section("The counts", [new_table("", "", "", rows=_nonempty_facts(facts))]),
            Section("Against the reference", list(describe_drift(moved, len(moved)))),
            Section("The columns that moved most", [
                drift_figure(
                    f"{distance.column}: index {number(distance.psi)}",
                    shares_of(profile.columns[distance.column], counts.columns[distance.column]),
                )
                for distance in moved[:_MOST_PLOTS] if distance.significant
            ]),
        ],
    )  # fmt: skip


def _nonempty_facts(facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the facts whose text is not empty."""
    return ((name, text) for name, text in facts.items() if text)


def _answer_parts(report: Report) -> Iterator[Part | Figure | None]:
    """Yield a table and histograms of the values that a run wrote, by output column."""
    if not report.histograms:
        yield "This run wrote no row, so there is nothing to count."
        return
    table = new_table("over the outputs that this run wrote", "column", "values", "smallest",
                      "mean", "largest", "NaN or infinite")  # fmt: skip
    for name, histogram in report.histograms.items():
        numbers = (histogram.least, histogram.mean, histogram.largest)
        texts = [number(value) if histogram.finite else "" for value in numbers]
        nonfinite = f"{histogram.nonfinite:,}" if histogram.nonfinite else "none"
        table.add_row(name, f"{histogram.finite + histogram.nonfinite:,}", *texts, nonfinite)
    yield table
    for name, histogram in list(report.histograms.items())[:_MOST_PLOTS]:
        caption = "; ".join([name, *histogram.notes()])
        yield histogram_figure(caption, name, histogram)
    if len(report.histograms) > _MOST_PLOTS:
        yield f"The first {_MOST_PLOTS} columns are drawn."


def difference_page(difference: Mapping[str, Any], links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page about a result of `diff`. `links`: see `render_page`."""
    sides = {side: difference[side] | {"ref": _shareable_name(difference[side])} for side in "ab"}
    title = f"{sides['a']['ref']} and {sides['b']['ref']}"
    changes = describe_difference({**difference, **sides})
    return render_page(title, [Section("What changed", [*changes])], links=links)


def _shareable_name(side: Mapping[str, Any]) -> str:
    """Name a side of a comparison on a page for others, without paths of this host."""
    ref = str(side["ref"])
    return f"bundle {side['digest'][:12]}" if ref.startswith("/") else ref


def models_page(models: Mapping[str, Sequence[Version]], registry: str) -> str:
    """Return the page of all models. `models`: their versions by name. `registry`: its URI."""
    table = new_table("", "model", "versions", "aliases", "targets of the latest")
    for name, versions in models.items():
        newest = max(versions, key=lambda version: version.number, default=None)
        aliases = (f"@{alias} {v.number}" for v in versions for alias in v.aliases)
        targets = newest.targets if newest else {}
        statuses = (f"{target} {status}" for target, status in targets.items())
        table.add_row(name, f"{len(versions):,}", ", ".join(aliases), ", ".join(statuses))
        table.links[name] = f"/models/{name}"
    return render_page("Models", [Section(registry, [table])])


def model_page(name: str, versions: Sequence[Version], events: Sequence[Event]) -> str:
    """Return the page of a model: its versions and its events, both with the newest first."""
    table = describe_versions(sorted(versions, key=lambda v: -v.number))
    table.links.update({v.ref: f"/models/{name}/{v.number}" for v in versions})
    history = [describe_history(name, list(reversed(events)))] if events else []
    links = [("all models", "/")]
    if len(versions) > 1:
        older, newer = sorted(v.number for v in versions)[-2:]
        address = f"/models/{name}/{newer}/beside/{older}"
        links.append((f"{name}/{older} and {name}/{newer} side by side", address))
    sections = [Section("Versions", [table]), Section("History", [*history])]
    return render_page(name, sections, links=links)


def publish(
    registry: Registry, version: Version, bundle: Bundle, folder: Path | None = None
) -> Path | None:
    """Write the page of a version into its MLflow run, and into `folder` unless that is None.

    Returns the file in `folder`, or None. A failure of MLflow is ignored. Raises ReportError if a
    library is missing.
    """
    text = version_page(bundle, version)
    registry.keep_report(version, REPORT, text)
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = page_file(folder, version)
    write_whole(file, text)
    return file


def page_file(folder: Path, version: Version) -> Path:
    """Return the file that `publish` writes for a version."""
    return folder / f"{version.name}-{version.number}.html"
