"""Writes the C++ header of a version, for a user's own loop or kernel.

The header is an artifact of the target `source/cpp`, `source/cuda` or `source/hip`: built, proven,
sealed and promoted as any other. What is written to a file is this artifact with the model's name
as its namespace, and with a self-test of some rows of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import EngineError
from engines.kinds import host_cpu_levels
from engines.lanes import HEADER, Rows, members_of, named_header, passes_self_test
from engines.native import namespace_of
from pipeline.building.add_target import build
from pipeline.building.work import Say, Show, show_nothing, silent
from registry.bundle import read_sealed
from registry.store import Registry
from runtime.loader import open_measured_session
from runtime.opening import Opened, Opening, digest_answers, open_version, read_small_trial
from runtime.session import Session
from soa.files import write_whole
from soa.memory import Span
from soa.signature import Signature

Array = np.ndarray[Any, Any]
_MOST_VALUES = 20_000  # the largest number of values in a self-test
_ENGINE = "lanes"


@dataclass(frozen=True)
class Written:
    """The result of `write_header`: a header in `file`, for the version `ref`.

    `rows`: the number of rows in its self-test. `compared`: the other targets of the version whose
    artifacts ran here and gave the same bits.
    """

    ref: str
    target: str
    file: Path
    namespace: str
    rows: int
    compared: tuple[str, ...]


def write_header(
    registry: Registry,
    ref: str,
    language: str,
    out: Path | None = None,
    work: Path | None = None,
    say: Say = silent,
    show: Show = show_nothing,
) -> Written:
    """Write the header of a version to the file `out` (default: `./MODEL.h`).

    `language`: cpp, cuda or hip. If the version has no artifact for that language, one is built and
    added to the version. Its answers to the whole reference are compared with those of the
    version's CPU artifacts that the engine `lanes` made, and which this host can run. Then the
    header is compiled here, and its self-test runs. EngineError if any bit differs; then no file is
    written.
    """
    if out is not None and not out.parent.is_dir():
        raise EngineError(
            f"--out {out}: the folder {out.parent} is not there: make it, or name another"
        )
    target = f"source/{language}"
    opened = open_version(Opening(ref, mode="test", registry=registry))
    record = opened.bundle.manifest.targets.get(target)
    if record is None or record.status != "verified":
        build(registry, ref, target, (), work, say, show)
        opened = open_version(Opening(ref, mode="test", registry=registry))
    session = open_measured_session(opened, target, _ENGINE)
    compared = _require_same_bits(opened, session, target)
    namespace = namespace_of(opened.bundle.manifest.name)
    file = out or Path(f"{namespace}.h")
    header = _make_header(opened, target, namespace, session)
    if not passes_self_test(header.text, namespace):
        raise EngineError(
            f"{file} was not written: its self-test fails with this host's compiler: name another "
            "one in CXX"
        )
    write_whole(file, header.text)
    return Written(opened.label, target, file, namespace, header.rows, compared)


@dataclass(frozen=True)
class TestedHeader:
    """The text of a header with its namespace and self-test, and the number of rows in the test."""

    text: str
    rows: int


def _make_header(opened: Opened, target: str, namespace: str, session: Session) -> TestedHeader:
    """Make the header from a version's artifact for `target`: its origin in the first lines, then
    the artifact's code in the namespace, with a self-test whose answers `session` computes."""
    bundle = opened.bundle
    files = bundle.manifest.targets[target].candidates[_ENGINE].files
    name = next(file for file in files if Path(file).name == HEADER)
    origin = _HEAD.format(
        label=opened.label, digest=bundle.digest, own=bundle.files[name], space=namespace
    )
    text = read_sealed(*bundle.place(name)).decode()
    tested = add_self_test(text, namespace, session, bundle.file(bundle.manifest.reference))
    return TestedHeader(origin + tested.text, tested.rows)


def add_self_test(text: str, namespace: str, session: Session, reference: Path) -> TestedHeader:
    """Put an artifact's header `text` into a namespace, and add a self-test to it.

    The test runs some rows of the stored `reference`. It expects the answers that `session`, a
    session of the same artifact, gives to them.
    """
    rows = _choose_test_rows(session, reference)
    named = named_header(text, namespace, members_of(session.signature), rows)
    return TestedHeader(named, rows.n)


_HEAD = """\
// {label}: the network as C++ code. Written by soa-pipeline; do not edit.
// Version {digest}
// Artifact sha256:{own} (before the namespace was named)
// SPDX-License-Identifier: Apache-2.0
// {space}::row computes a row, {space}::self_test() is 0 if this compiler gives the same bits.
"""


def _require_same_bits(opened: Opened, session: Session, target: str) -> tuple[str, ...]:
    """Compare a header's answers to the reference with those of the version's CPU artifacts that
    `lanes` made and this host can run. Returns the targets of those artifacts. EngineError if one
    gives other bits. x86-64-v2 is left out: without fma, a product and a sum are rounded twice.
    """
    manifest = opened.bundle.manifest
    same_bits = []
    reference = opened.bundle.file(manifest.reference)
    bits = digest_answers(session, reference, every=True)
    for level in host_cpu_levels():
        other = f"cpu/{level}"
        record = manifest.targets.get(other)
        candidate = record.candidates.get(_ENGINE) if record else None
        if level == "x86-64-v2" or candidate is None or candidate.status != "valid":
            continue
        other_session = open_measured_session(opened, other, _ENGINE)
        if digest_answers(other_session, reference, every=True) != bits:
            raise EngineError(
                f"{target} gives other bits than {other} for the reference: one of them was built "
                "by other software: run the version's config again"
            )
        same_bits.append(other)
    return tuple(same_bits)


def _choose_test_rows(session: Session, reference: Path) -> Rows:
    """Choose rows of a stored reference to which `session` gives finite answers. Returns their
    values and those answers, by column and component, as the C++ self-test needs them."""
    signature = session.signature
    trial = read_small_trial(signature, reference)
    session.run(trial.given, trial.written)
    memory = {**trial.given, **trial.written}
    by_component: dict[tuple[str, str], dict[int, Array]] = {}
    for bound in (*signature.inputs, *signature.outputs):
        collection = bound.block.collection
        for column, k in bound.plan.components:
            shared = signature.layouts[collection][column].kind == "scalar"
            n = 1 if shared else trial.rows[signature.rows_of[collection]]
            span = memory[collection].span(column, k).first(n)
            by_component.setdefault((collection, column), {})[k] = _copy_for_cpp(span)
    values = {
        key: [components[k] for k in sorted(components)] for key, components in by_component.items()
    }
    return _keep_finite_rows(signature, values)


def _keep_finite_rows(signature: Signature, values: dict[tuple[str, str], list[Array]]) -> Rows:
    """Keep only the rows with finite answers in `values`, which is changed in place, and return it
    as the rows of a self-test.

    The rows are repeated, so that there is more than one block of any vector width: each is there
    twice, and one three times. There are fewer if rows are large. `values` has a list of components
    by collection and column. Scalars, and the items of jagged collections, stay whole.
    """
    answers = [
        component
        for bound in signature.outputs
        for name in bound.block.columns
        for component in values[bound.block.collection, name]
    ]
    finite = np.logical_and.reduce([np.isfinite(answer) for answer in answers])
    values_a_row = sum(len(components) for components in values.values())
    rows = np.flatnonzero(finite)
    rows = np.concatenate([rows, rows, rows[:1]])[: max(_MOST_VALUES // values_a_row, 1)]
    for (collection, column), components in values.items():
        shared = signature.layouts[collection][column].kind == "scalar"
        if not shared and collection not in signature.jagged:
            values[collection, column] = [component[rows] for component in components]
    return Rows(values, len(rows))


def _copy_for_cpp(span: Span) -> Array:
    """Return a copy of a column's values. float16 values are returned as their bits, in uint16,
    because C++17 has no such type."""
    values: Array = span.numpy().copy()
    return values.view("uint16") if values.dtype == "float16" else values
