"""What of a bundle MLflow shows: tags, parameters, metrics, a description and a report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from registry.bundle import Bundle, Manifest, TargetRecord
from registry.mlflow import tables
from registry.mlflow.version import ANNEX, CHOSEN, DIGEST, TARGET, tag_of
from soa.text import plain

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
    """The candidates as a table. Rows that go beyond MLflow's limit are counted."""
    manifest = bundle.manifest
    provenance = manifest.provenance
    made = f"Bundle {bundle.digest[:12]}, made {provenance.created}"
    if provenance.git_commit:
        made += f" from commit {provenance.git_commit}"
    if provenance.git_dirty:
        made += " with uncommitted changes"
    table = tables.candidates(manifest.targets)
    head = [tables.markdown_cell(manifest.description), ""] if manifest.description else []
    head += [tables.markdown_cell(made), ""]
    head += [*tables.markdown_rows([table.head]), f"|{' --- |' * len(table.head)}"]
    rows = tables.markdown_rows(table.rows)
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
    rows = tables.markdown_rows(tables.candidates({target: record}).rows)
    longer = "\n".join([text, *rows])
    return longer if len(longer) <= _DESCRIPTION_LIMIT else text


def page(title: str, manifest: Manifest, targets: Mapping[str, TargetRecord], digest: str) -> str:
    """The whole report as HTML, for MLflow's artifact viewer.

    `targets`: of the manifest, or one that was built later; `digest`: of the folder with it.
    """
    return tables.html_page(
        title,
        [
            tables.facts(manifest, digest),
            tables.candidates(targets),
            tables.deviations(targets),
            tables.times(targets),
        ],
    )


def rows_of(case: str) -> int:
    """The largest row count of a benchmark's case: `1000`, or `nodes=5,edges=20`."""
    return max(int(part.rpartition("=")[2]) for part in case.split(","))


def _key(text: str) -> str:
    """MLflow takes A-Z a-z 0-9 _ - . space : / in names, and no path that normalizes away."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:250]
