"""A bundle's data for MLflow's pages: tags, parameters, metrics and a description."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from registry.bundle import Bundle, Candidate, Manifest, TargetRecord
from registry.version import ANNEX, CHOSEN, DIGEST, TARGET, tag_of
from soa.text import in_markdown, microseconds, number, plain

# MLflow's limits; SQLite does not enforce them, MySQL and PostgreSQL do.
_DESCRIPTION_LIMIT = 5000
_PARAMETER_LIMIT = 6000
_CELL_LIMIT = 200
_CANDIDATES = ("target", "status", "engine", "candidate", "largest deviation", "median of a call")

Targets = Mapping[str, TargetRecord]
Rows = Sequence[tuple[str, ...]]


def tags(bundle: Bundle) -> dict[str, str]:
    """Return the tags of a new version: its digest, targets, engines and annexes' digests."""
    by_name = {DIGEST: bundle.digest}
    for target, record in bundle.manifest.targets.items():
        by_name[TARGET + tag_of(target)] = record.status
        if record.chosen is not None:
            by_name[CHOSEN + tag_of(target)] = record.chosen
    for target, annex in bundle.annexes.items():
        by_name[ANNEX + tag_of(target)] = annex.digest
    return by_name


def parameters(manifest: Manifest) -> dict[str, str]:
    """Return the parameters of a version's MLflow run, as texts within MLflow's limit."""
    provenance = manifest.provenance
    values: dict[str, object] = {
        "config_sha256": provenance.config_sha256,
        "git_commit": provenance.git_commit,
        "git_dirty": provenance.git_dirty,
        "python": provenance.python,
        "torchscript": manifest.capture.torchscript,
        "targets": " ".join(manifest.targets),
    }
    values |= {f"tool.{tool}": version for tool, version in provenance.tools.items()}
    values |= {f"host.{key}": value for key, value in provenance.host.items()}
    for output, tolerance in manifest.tolerances.items():
        values[f"tolerance.{output}"] = f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    return {
        _valid_name(name): plain(value)[:_PARAMETER_LIMIT]
        for name, value in values.items()
        if value is not None
    }


class Plotted(NamedTuple):
    """A number for MLflow's page, under a valid name. `step`: its place in a plot; 0 if alone."""

    name: str
    value: float
    step: int = 0


def metrics(targets: Targets) -> Iterator[Plotted]:
    """Yield the numbers of targets for MLflow's page of a run.

    Their names are `<target>.metric.<name>` of the gates, `<target>.<engine>.n<rows>.median_us`,
    `<target>.<engine>.worst.<output>.max_abs`, ... `<target>.<engine>.median_us` has the row count
    as its step, so that MLflow plots it; of several row dimensions, the largest count is taken.
    """
    for target, record in targets.items():
        for name, value in record.metrics.items():
            yield Plotted(_valid_name(f"{tag_of(target)}.metric.{name}"), value)
        for engine, candidate in record.candidates.items():
            yield from _candidate_metrics(candidate, f"{tag_of(target)}.{engine}")


def _candidate_metrics(candidate: Candidate, prefix: str) -> Iterator[Plotted]:
    """Yield the numbers of one candidate, under names that begin with `prefix`."""
    for case, stats in candidate.benchmark.items():  # a case is `32`, or `nodes=5,edges=20`
        rows = max(int(count.rpartition("=")[2]) for count in case.split(","))
        for name, value in asdict(stats).items():
            yield Plotted(_valid_name(f"{prefix}.n{case}.{name}"), value)
            yield Plotted(_valid_name(f"{prefix}.{name}"), value, rows)
    for output, worst in candidate.worst.items():
        for name, value in asdict(worst).items():
            yield Plotted(_valid_name(f"{prefix}.worst.{output}.{name}"), value)
    if candidate.compile_seconds is not None:
        yield Plotted(_valid_name(f"{prefix}.compile_seconds"), candidate.compile_seconds)


def markdown(bundle: Bundle) -> str:
    """Return the description of a version in Markdown: its origin, and a table of its candidates.

    If MLflow's limit cuts the table, a last line counts the other rows.
    """
    manifest = bundle.manifest
    provenance = manifest.provenance
    origin = f"Bundle {bundle.digest[:12]}, made {provenance.created}"
    if provenance.git_commit:
        origin += f" from commit {provenance.git_commit}"
    if provenance.git_dirty:
        origin += " with uncommitted changes"
    lines = [_cell_text(manifest.description), ""] if manifest.description else []
    rule = f"|{' --- |' * len(_CANDIDATES)}"
    lines += [_cell_text(origin), "", *_table_lines([_CANDIDATES]), rule]
    rows = _table_lines(_candidate_rows(manifest.targets))
    shown = list(rows)
    while shown and len("\n".join(lines + shown)) > _DESCRIPTION_LIMIT - 40:  # room for "… and"
        shown.pop()
    if len(shown) < len(rows):
        shown.append(f"\n… and {len(rows) - len(shown)} more rows")
    return "\n".join(lines + shown)[:_DESCRIPTION_LIMIT]


def append_target(text: str, target: str, record: TargetRecord) -> str:
    """Add the rows of a target that was built later to the table of the description `text`.

    If that would exceed MLflow's limit, `text` is returned unchanged.
    """
    longer = "\n".join([text, *_table_lines(_candidate_rows({target: record}))])
    return longer if len(longer) <= _DESCRIPTION_LIMIT else text


def _candidate_rows(targets: Targets) -> Rows:
    """Return a table's row for each candidate, and one for each target without candidates."""
    rows = []
    for target, record in sorted(targets.items()):
        if not record.candidates:
            rows.append((target, record.status, "", "", "", ""))
        for engine, candidate in record.candidates.items():
            # By length first: then the decimal numbers are in ascending order.
            timed = sorted(candidate.benchmark.items(), key=lambda item: (len(item[0]), item[0]))
            deviations = [
                f"{output} {number(worst.max_abs, digits=2)}"
                for output, worst in candidate.worst.items()
            ]
            medians = [f"{microseconds(stats.median_us)} at n={case}" for case, stats in timed]
            rows.append(
                (
                    target,
                    record.status,
                    f"{engine} (chosen)" if engine == record.chosen else engine,
                    candidate.status + (f": {candidate.reason}" if candidate.reason else ""),
                    ", ".join(deviations),
                    ", ".join(medians),
                )
            )
    return rows


def _table_lines(rows: Rows) -> list[str]:
    """Write the rows of a table in Markdown, a line for each."""
    return [f"| {' | '.join(map(_cell_text, row))} |" for row in rows]


def _cell_text(text: str) -> str:
    """Write a text as a cell in Markdown: in one line, which is cut to `_CELL_LIMIT`."""
    flat = " ".join(text.split())
    return in_markdown(flat if len(flat) <= _CELL_LIMIT else f"{flat[: _CELL_LIMIT - 1]}…")


def _valid_name(text: str) -> str:
    """Turn a text into a valid MLflow name, by writing `_` for characters that may be refused.

    MLflow takes spaces, `:` and `/` too, but refuses names with `/` that are no normal path.
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:250]
