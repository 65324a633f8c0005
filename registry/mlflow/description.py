"""What of a bundle MLflow shows: tags, parameters, metrics, and a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from registry.bundle import Bundle, Candidate, Manifest, TargetRecord
from registry.mlflow.report_page import rows_of
from registry.mlflow.version import ANNEX, CHOSEN, DIGEST, TARGET, tag_of
from soa.text import in_markdown, plain

# MLflow's limits; SQLite does not enforce them, MySQL and PostgreSQL do.
_DESCRIPTION_LIMIT = 5000
_PARAMETER_LIMIT = 6000


def tags(bundle: Bundle) -> dict[str, str]:
    found = {DIGEST: bundle.digest}
    for target, record in bundle.manifest.targets.items():
        found[TARGET + tag_of(target)] = record.status
        if record.chosen is not None:
            found[CHOSEN + tag_of(target)] = record.chosen
    return found | {ANNEX + tag_of(t): annex.digest for t, annex in bundle.annexes.items()}


def parameters(manifest: Manifest) -> dict[str, str]:
    provenance = manifest.provenance
    found: dict[str, object] = {
        "config_sha256": provenance.config_sha256,
        "git_commit": provenance.git_commit,
        "git_dirty": provenance.git_dirty,
        "python": provenance.python,
        "torchscript": manifest.capture.torchscript,
        "targets": " ".join(manifest.targets),
    }
    found |= {f"tool.{tool}": version for tool, version in provenance.tools.items()}
    found |= {f"host.{key}": value for key, value in provenance.host.items()}
    for output, tolerance in manifest.tolerances.items():
        found[f"tolerance.{output}"] = f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    return {
        _key(name): plain(value)[:_PARAMETER_LIMIT]
        for name, value in found.items()
        if value is not None
    }


def metrics(targets: Mapping[str, TargetRecord]) -> dict[str, float]:
    """`<target>.<engine>.n<rows>.median_us`, `<target>.<engine>.worst.<output>.max_abs`, ..."""
    found: dict[str, float] = {}
    for target, record in targets.items():
        for engine, candidate in record.candidates.items():
            prefix = f"{tag_of(target)}.{engine}"
            for rows, stats in candidate.benchmark.items():
                for name, value in stats.model_dump().items():
                    found[f"{prefix}.n{rows}.{name}"] = value
            for output, worst in candidate.worst.items():
                for name, value in worst.model_dump().items():
                    found[f"{prefix}.worst.{output}.{name}"] = value
            if candidate.compile_seconds is not None:
                found[f"{prefix}.compile_seconds"] = candidate.compile_seconds
    return {_key(name): value for name, value in found.items()}


def curves(targets: Mapping[str, TargetRecord]) -> list[tuple[str, float, int]]:
    """`<target>.<engine>.median_us` and its like, with the rows as MLflow's step: MLflow plots it.

    Of several row dimensions the largest counts.
    """
    return [
        (_key(f"{tag_of(target)}.{engine}.{name}"), value, rows_of(case))
        for target, record in targets.items()
        for engine, candidate in record.candidates.items()
        for case, stats in candidate.benchmark.items()
        for name, value in stats.model_dump().items()
    ]


def markdown(bundle: Bundle) -> str:
    """Targets and candidates as a table. Rows that go beyond MLflow's limit are counted."""
    manifest = bundle.manifest
    provenance = manifest.provenance
    made = f"Bundle {bundle.digest[:12]}, made {provenance.created}"
    if provenance.git_commit:
        made += f" from commit {provenance.git_commit}"
    if provenance.git_dirty:
        made += " with uncommitted changes"
    head = [_cell(manifest.description), ""] if manifest.description else []
    head += [
        _cell(made),
        "",
        "| target | status | engine | candidate | largest deviation | median of a call |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = list(_rows(manifest.targets))
    room = _DESCRIPTION_LIMIT - len("\n".join(head)) - 40
    kept: list[str] = []
    for row in rows:
        room -= len(row) + 1
        if room < 0:
            break
        kept.append(row)
    if len(kept) < len(rows):
        kept.append(f"\n… and {len(rows) - len(kept)} more rows")
    return "\n".join(head + kept)[:_DESCRIPTION_LIMIT]


def with_target(text: str, target: str, record: TargetRecord) -> str:
    """A description with what was built later as further rows of its table, where there is room."""
    longer = "\n".join([text, *_rows({target: record})])
    return longer if len(longer) <= _DESCRIPTION_LIMIT else text


def _rows(targets: Mapping[str, TargetRecord]) -> Iterable[str]:
    for target, record in sorted(targets.items()):
        if not record.candidates:
            yield _row(target, record.status, "", "", "", "")
        for engine, candidate in record.candidates.items():
            chosen = engine == record.chosen
            yield _row(
                target,
                record.status,
                f"{engine} (chosen)" if chosen else engine,
                candidate.status + (f": {candidate.reason}" if candidate.reason else ""),
                _deviation(candidate),
                _times(candidate),
            )


def _deviation(candidate: Candidate) -> str:
    return ", ".join(f"{output} {worst.max_abs:.2g}" for output, worst in candidate.worst.items())


def _times(candidate: Candidate) -> str:
    timed = sorted(candidate.benchmark.items(), key=lambda item: (len(item[0]), item[0]))
    return ", ".join(f"{stats.median_us:.3g} us at n={rows}" for rows, stats in timed)


def _row(*cells: str) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    flat = " ".join(text.split())
    return in_markdown(flat if len(flat) <= 200 else f"{flat[:199]}…")


def _key(text: str) -> str:
    """MLflow takes A-Z a-z 0-9 _ - . space : / in names, and no path that normalizes away."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:250]
