"""Package what was built for one more target of a version: a sealed folder beside its bundle."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from registry import stamp
from registry.bundle import ANNEX, Annex, AnnexRecord, Bundle, prefix_of, seal, write_atomically
from soa.signature import Signature
from stages.benchmark import EAGER
from stages.errors import StageError
from stages.packaging.bundle import (
    TargetResult,
    target_record,
    why_not,
    write_artifacts,
    write_reports,
)

NO_BASELINE = (
    "timed without the eager model, whose source is not in the bundle: the candidates are compared "
    "with each other only"
)


def package_annex(
    dest: Path,
    bundle: Bundle,
    result: TargetResult,
    tools: Mapping[str, str],
    host: Mapping[str, str],
    *,
    replace: bool = False,
) -> Annex:
    """Write and seal the annex at `dest`, whole or not at all. Raises StageError, BundleError.

    A target without a valid artifact is refused, and so is one that no device here has run.
    """
    if result.status != "verified" or result.benchmark is None:
        raise StageError(
            f"no artifact of {bundle.manifest.name!r} for {result.target} is valid: "
            f"{why_not(result)}"
        )
    timed = {name for rows in result.benchmark.timings.values() for name in rows}
    record = AnnexRecord(
        name=bundle.manifest.name,
        base=bundle.digest,
        target=result.target,
        record=target_record(result, prefix_of(result.target).rstrip("/")),
        created=stamp.now(),
        by=stamp.user_at_host(),
        tools=dict(tools),
        host=dict(host),
        python=platform.python_version(),
        notes=[] if EAGER in timed else [NO_BASELINE],
    )
    with write_atomically(dest, replace=replace) as folder:
        write_artifacts(folder, result, Signature.from_dict(bundle.manifest.signature))
        write_reports(folder, {result.target: result})
        (folder / ANNEX).write_text(record.to_json())
        seal(folder)
    return Annex.open(dest)
