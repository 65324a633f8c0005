"""An artifact against the portable program, on more inputs than the reference in the bundle has.

The file is safetensors with one tensor `input/<collection>/<column>` for each input column: `(N,)`,
Eigen `(N, r)` or `(N, r, c)`, scalars `()`; N is the same for all columns of a row dimension. A
stored reference has this form too; its outputs are not read, they belong to one model.

What is compared: for each window of rows (the largest size the version is compiled for, at a time),
the artifact's answers, from SoA memory, poisoned as in validation, with those of `program.pt2` run
by the `exported` engine on the same rows, within the version's tolerances. So it shows that the
compiled code is the captured program on these inputs. That the program is the eager model was shown
at capture, on the bundle's own reference, and is not shown again here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engines.processes import run_isolated
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from soa.memory import read_block
from soa.signature import Signature
from stages.errors import ReferenceDataError
from stages.model import Precision, tf32_switches
from stages.reference import (
    Arrays,
    Case,
    Nonfinite,
    Reference,
    check_inputs,
    count_nonfinite,
    filled_collections,
)
from stages.validation.validate import CaseReport, ValidationReport, judged, run_cases


def validate_on_set(
    name: str,
    file: Path,
    program: Path,
    inputs: Path,
    signature: Signature,
    tolerances: Mapping[str, Tolerance],
    folder: Path,
    timeout_s: float,
    device: str = "cpu",
    precision: Precision = "fp32",
    nonfinite: float = 0.0,
) -> ValidationReport:
    """In a child process, as `validate_candidate`; a file that does not fit raises here.

    The report has no case where more than the fraction `nonfinite` of an output's answers is NaN or
    infinite: that shows nothing.
    """
    read_set(signature, inputs)
    outcome = run_isolated(
        "stages.validation.larger:validate_here",
        {
            "name": name,
            "file": str(file.absolute()),  # not where a link leads: that may be held for us
            "program": str(program.absolute()),
            "inputs": str(inputs.resolve()),
            "signature": signature.to_dict(),
            "tolerances": {key: asdict(t) for key, t in tolerances.items()},
            "device": device,
            "precision": precision,
            "nonfinite": nonfinite,
        },
        folder,
        timeout_s,
    )
    if not outcome.ok:
        return ValidationReport.failed(name, f"{outcome.error} (log: {outcome.log})")
    return ValidationReport.from_dict(outcome.value)


def validate_here(
    name: str,
    file: str,
    program: str,
    inputs: str,
    signature: dict[str, Any],
    tolerances: dict[str, dict[str, float]],
    device: str,
    precision: Precision = "fp32",
    nonfinite: float = 0.0,
) -> dict[str, Any]:
    """What the child does."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    kept, cpu = Signature.from_dict(signature), torch.device("cpu")
    limits = {key: Tolerance(**t) for key, t in tolerances.items()}
    cases: list[CaseReport] = []
    counts: list[Nonfinite] = []
    with tf32_switches(precision):
        portable = Session(kept, open_candidate("exported", Path(program), cpu))
        session = Session(kept, open_candidate(name, Path(file), torch.device(device)), device)
        for rows, case in windows(kept, read_set(kept, Path(inputs))):
            given, written = filled_collections(kept, rows, case, cpu)
            portable.run(given, written)
            answers = {b.name: read_block(b, written[b.block.collection]) for b in kept.outputs}
            expected = Reference(rows, (case,), (answers,))
            cases += run_cases(session, expected, limits)
            counts += count_nonfinite(kept, expected)
    for output in kept.outputs:
        mine = [one for one in counts if one.output == output.name]
        share = sum(one.count for one in mine) / max(1, sum(one.values for one in mine))
        if share > nonfinite:
            why = (
                f"output {output.name!r}: {share:.2%} of the portable program's answers are NaN or "
                f"infinite and prove nothing, {nonfinite:.2%} may be"
            )
            return ValidationReport.failed(name, why).to_dict()
    return judged(name, cases, limits, time.monotonic() - begun).to_dict()


def read_set(signature: Signature, path: Path) -> Arrays:
    """All rows of the file, checked against the layouts. ReferenceDataError says what is off."""
    given: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for key in list(stored.keys()):
                kind, _, rest = key.partition("/")
                collection, _, column = rest.partition("/")
                if kind == "input":
                    given.setdefault(collection, {})[column] = stored.get_tensor(key)
    except (OSError, SafetensorError, ValueError) as error:
        raise ReferenceDataError(f"{path} is not a reference set: {error}") from error
    rows: Case = {}
    for name in signature.input_collections:
        dim = signature.rows_of[name]
        for column in signature.layouts[name].columns:
            value = given.get(name, {}).get(column.name)
            if value is not None and column.kind != "scalar" and value.ndim:
                rows[dim] = max(rows.get(dim, 0), value.shape[0])
    for dim in signature.dims:
        if rows.get(dim, 0) < max(signature.ranges[dim].min, 1):
            raise ReferenceDataError(
                f"{path}: {rows.get(dim, 0)} rows of {dim}, at least "
                f"{max(signature.ranges[dim].min, 1)} are needed"
            )
    try:
        return check_inputs(signature, given, rows)
    except ReferenceDataError as error:
        raise ReferenceDataError(f"{path}: {error}") from error


def windows(signature: Signature, arrays: Arrays) -> Iterator[tuple[Arrays, Case]]:
    """Pieces that the version can run, which together are all rows.

    With several row dimensions the rows belong together, and are one piece or refused.
    """
    total = {
        signature.rows_of[name]: next(
            arrays[name][c.name].shape[0]
            for c in signature.layouts[name].columns
            if c.kind != "scalar"
        )
        for name in signature.input_collections
        if any(c.kind != "scalar" for c in signature.layouts[name].columns)
    }
    if len(total) > 1:
        for dim, n in total.items():
            if n > signature.ranges[dim].max:
                raise ReferenceDataError(
                    f"{n} rows of {dim}, the version takes up to {signature.ranges[dim].max}; with "
                    "several row dimensions a reference set is one event"
                )
        yield arrays, total
        return
    ((dim, n),) = total.items()
    allowed = signature.ranges[dim]
    for start in range(0, n, allowed.max):
        size = max(min(allowed.max, n - start), allowed.min)
        first = min(start, n - size)  # the last piece may overlap the one before
        yield (
            {
                name: {
                    c.name: arrays[name][c.name]
                    if c.kind == "scalar"
                    else arrays[name][c.name][first : first + size]
                    for c in signature.layouts[name].columns
                }
                for name in signature.input_collections
            },
            {dim: size},
        )
