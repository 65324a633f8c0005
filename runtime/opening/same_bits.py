"""Check that an artifact gives the same bits on this host as where it was validated.

Validation records a digest of an artifact's outputs for a few rows of the reference. A host
computes the digest again at the first load, and logs a warning if it differs. Outputs with other
bits may still be within the tolerances. To compute the digest for another processor:

    qemu-x86_64 -cpu Haswell python -m runtime.opening.same_bits <job.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engines.base import Executable
from engines.errors import first_line
from engines.kinds import cpu_flags
from runtime.opening.artifact import open_candidate
from runtime.opening.host_notes import find_out_once
from runtime.session import RangedExecutable, Session
from soa.layout import Layout
from soa.memory import CPU, Collection
from soa.records import parse_json
from soa.signature import Signature, offsets_of
from soa.text import logger

if TYPE_CHECKING:
    import torch

    from runtime.opening.request import Opened

log = logger("soa-pipeline")

FEW = 33  # rows of a small case: a full vector of any width, and one more row


def digest_answers(session: Session, reference: Path, *, every: bool = False) -> str | None:
    """Run cases of a stored reference, and return the sha256 of the outputs.

    `reference`: the file. `every`: run all cases, else only the one that `choose_digest_case`
    chooses. Returns None if an input is bfloat16, which NumPy does not have.
    """
    signature = session.signature
    layouts = [signature.layouts[name] for name in signature.input_collections]
    if any(column.dtype == "bfloat16" for layout in layouts for column in layout.numbers):
        return None
    digest = hashlib.sha256()
    for trial in _read_trials(signature, reference, every):
        written = _run_trial(session, trial)
        for bound in signature.outputs:
            n = 1 if bound.plan.kind == "scalars" else trial.rows[bound.rows]
            for column, k in bound.plan.components:
                span = written[bound.block.collection].span(column, k)
                digest.update(span.first(n).raw().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Trial:
    """A case of a stored reference: its rows by dimension, its inputs, and empty outputs.

    A collection that is read and written is in both `given` and `written`.
    """

    rows: Mapping[str, int]
    given: dict[str, Collection]
    written: dict[str, Collection]


def _run_trial(session: Session, trial: Trial) -> dict[str, Collection]:
    """Run a session on any device, and return the output collections on the CPU, by name."""
    if session.device.type == "cpu":
        session.run(trial.given, trial.written)
        return trial.written
    on_device = {
        name: collection.to(str(session.device))
        for name, collection in {**trial.given, **trial.written}.items()
    }
    outputs = {name: on_device[name] for name in trial.written}
    session.run({name: on_device[name] for name in trial.given}, outputs)
    return {name: collection.to("cpu") for name, collection in outputs.items()}


def read_small_trial(signature: Signature, reference: Path) -> Trial:
    """Read the case of a stored reference that `choose_digest_case` chooses."""
    return next(_read_trials(signature, reference, every=False))


def choose_digest_case(cases: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Choose the case for the digest: the largest one with up to 33 rows, else the smallest one.

    `cases`: rows by dimension. Cases with 0 rows of a dimension are left out.
    """
    with_rows = [case for case in cases if min(case.values()) > 0]
    small = [case for case in with_rows if max(case.values()) <= FEW]
    return max(small, key=_total_rows) if small else min(with_rows, key=_total_rows)


def _total_rows(case: Mapping[str, int]) -> int:
    """Return the number of rows of all dimensions together."""
    return sum(case.values())


def _read_trials(signature: Signature, reference: Path, every: bool) -> Iterator[Trial]:
    """Yield the cases of a stored reference (stages/reference) that have rows.

    `every`: all of them, else only the one that `choose_digest_case` chooses.
    """
    from safetensors import safe_open

    with safe_open(reference, framework="np") as stored:
        all_cases = parse_json(stored.metadata()["cases"])
        cases = [case for case in all_cases if min(case.values()) > 0]
        for case in cases if every else [choose_digest_case(cases)]:
            rows = {name: case[dim] for name, dim in signature.rows_of.items()}
            given = {
                name: _read_inputs(stored, name, signature.layouts[name], rows[name])
                for name in signature.input_collections
            }
            for name in signature.jagged:  # the offsets go up to all stored items: cut them
                for edge in ("begin", "end"):
                    values = given[offsets_of(name)][edge]
                    np.minimum(values, rows[name], out=values)
            written = {
                name: given.get(name) or Collection(signature.layouts[name], rows[name])
                for name in signature.output_collections
            }
            yield Trial(case, given, written)


def _read_inputs(stored: Any, name: str, layout: Layout, n: int) -> Collection:
    """Make a collection of the first n rows of a stored input collection.

    Columns that the model writes are not stored, and stay empty. `stored`: the open file.
    """
    collection, keys = Collection(layout, n), set(stored.keys())
    for column in layout.numbers:
        key = f"input/{name}/{column.name}"
        if key in keys:
            has_rows = column.kind != "scalar"
            values = stored.get_slice(key)[:n] if has_rows else stored.get_tensor(key)
            collection.fill(column.name, values)
    return collection


def warn_of_other_bits(opened: Opened, executable: Executable, target: str) -> None:
    """Log a warning if an artifact for a CPU gives other bits here than where it was validated.

    The digest is computed at the first load, and kept in this host's cache for this kind of
    processor. Nothing happens if the version has no recorded digest, as with bfloat16 inputs.
    """
    manifest = opened.bundle.manifest
    name = opened.opening.engine_name or str(manifest.targets[target].chosen)
    recorded = manifest.targets[target].candidates[name].bits
    if recorded is None:
        return

    def compute() -> str | None:
        """Compute the digest of the chosen artifact's answers on this host."""
        chosen = executable
        if isinstance(chosen, RangedExecutable):
            chosen = chosen.at(sys.maxsize)  # no other artifact runs so many rows
        session = Session(opened.signature, chosen)
        return digest_answers(session, opened.bundle.file(manifest.reference))

    processor = " ".join(sorted(cpu_flags()))
    try:
        bits_here = find_out_once("bits", opened, target, name, processor, compute)
    except Exception as error:  # the first event raises the error again, to the user
        log.warning("%s: its bits were not compared: %s", opened.label, first_line(error))
        return
    if bits_here != recorded:
        log.warning(
            "%s: %s (%s) gives other bits on this processor than where it was validated; "
            "`pipeline check` shows how far it is from the reference here",
            opened.label, name, target,
        )  # fmt: skip


def main(job: dict[str, Any]) -> str | None:
    """Compute the digest of an artifact's answers in this process.

    `job`: the artifact's `file`, `engine` and `signature`, and the file of the `reference`.
    """
    executable = open_candidate(job["engine"], Path(job["file"]), cast("torch.device", CPU))
    signature = Signature.from_dict(job["signature"])
    return digest_answers(Session(signature, executable), Path(job["reference"]))


if __name__ == "__main__":
    print(main(json.load(sys.stdin)))  # trusted
