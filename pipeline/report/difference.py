"""Diff: finds the changes between two versions in the contents of their bundles.

Weights are compared tensor by tensor, in `program.pt2`. Everything else comes from the manifests,
with the measurements that were made where each was built. Nothing is run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from engines.errors import EngineError
from engines.exported import load_program, quiet_torch
from pipeline.report.tables import new_table
from pipeline.report.versions import first_names, percent
from registry.bundle import Bundle, Candidate, Manifest
from registry.errors import BundleError
from registry.store import Registry
from runtime.opening import Opening, open_version
from soa.text import microseconds, number

if TYPE_CHECKING:
    from pipeline.report.tables import Part, Table

_MOST_CHARACTERS = 80  # of a value in a table
_MOST_ROWS = 40  # of a table
_NUMBERS = ("max_abs", "norm_a", "norm_b", "norm_difference")


def diff(registry: Registry, a: str, b: str) -> dict[str, Any]:
    """Compare two versions, or folders of bundles; every digest is checked first.

    Returns JSON data. Numbers that are not finite are the texts `nan` and `inf`; a value that one
    side lacks is None. `weights` has the changed tensors: how many elements differ, the largest
    difference and Frobenius norms in float64, all None if the shapes differ. Its `unreadable` says
    why weights could not be compared. `records` has changes by subject (config, signature, targets,
    …). `speed` and `deviations` were measured when each side was built. `same` is true if all files
    are identical, also those of targets that were built later.
    """
    opened = [open_version(Opening(ref, mode="test", registry=registry)) for ref in (a, b)]
    refs = [side.version.ref if side.version else str(side.bundle.path) for side in opened]
    return compare(opened[0].bundle, opened[1].bundle, refs[0], refs[1])


def compare(a: Bundle, b: Bundle, ref_a: str, ref_b: str) -> dict[str, Any]:
    """Compare two bundles and return what `diff` returns. `ref_a`, `ref_b`: their names in it."""
    annexes_a, annexes_b = (
        {target: annex.digest for target, annex in bundle.annexes.items()} for bundle in (a, b)
    )
    subjects_a, subjects_b = _comparable_records(a), _comparable_records(b)
    records = {name: list(_find_changes(subjects_a[name], subjects_b[name])) for name in subjects_a}
    difference: dict[str, Any] = _without_nonfinite(
        {
            "a": {"ref": ref_a, "digest": a.digest, "annexes": annexes_a},
            "b": {"ref": ref_b, "digest": b.digest, "annexes": annexes_b},
            "weights": _compare_weights(a, b),
            "records": {subject: changes for subject, changes in records.items() if changes},
            **_compare_measurements(a.manifest, b.manifest),
            "same": a.digest == b.digest and annexes_a == annexes_b,
        }
    )
    return difference


def _compare_weights(a: Bundle, b: Bundle) -> dict[str, Any]:
    """Compare the tensors of two bundles; the result is `weights` in that of `diff`.

    `same` counts equal tensors, `changes` describes the others, and `unreadable` says why the
    tensors could not be read, else is empty.
    """
    try:
        tensors_a, tensors_b = _load_tensors(a), _load_tensors(b)
    except (EngineError, BundleError) as error:
        return {"same": 0, "changes": [], "unreadable": str(error)}
    names = dict.fromkeys((*tensors_a, *tensors_b))
    compared = [compare_tensor(name, tensors_a.get(name), tensors_b.get(name)) for name in names]
    changes = [change for change in compared if change is not None]
    return {"same": len(compared) - len(changes), "changes": changes, "unreadable": ""}


def _load_tensors(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Load the parameters, buffers and constants of a bundle's portable program, by name."""
    with quiet_torch():
        program = load_program(bundle.file(bundle.manifest.program))
    values = {**program.constants, **program.state_dict}
    return {name: t.detach() for name, t in values.items() if isinstance(t, torch.Tensor)}


def compare_tensor(
    name: str, a: torch.Tensor | None, b: torch.Tensor | None
) -> dict[str, Any] | None:
    """Describe how a tensor differs between two versions; None is given for a side that lacks it.

    Returns None if all bits are equal: so NaN equals itself, and 0 differs from -0.
    """

    def describe_type(tensor: torch.Tensor | None) -> str | None:
        """Return dtype and shape, such as `float32 (48, 6)`."""
        if tensor is None:
            return None
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        """Return all elements as bytes, since these are equal also for NaN."""
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    change = {"name": name, "a": describe_type(a), "b": describe_type(b), "elements": None}
    if a is None or b is None or a.shape != b.shape:
        return change | dict.fromkeys(_NUMBERS)
    if a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b)):
        return None
    widest = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    wide_a, wide_b = a.to(widest), b.to(widest)
    difference = (wide_a - wide_b).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    norms = (float(torch.linalg.vector_norm(values)) for values in (wide_a, wide_b, difference))
    numbers = dict(zip(_NUMBERS, (largest, *norms), strict=True))
    return change | {"elements": int((wide_a != wide_b).sum())} | numbers


def _comparable_records(bundle: Bundle) -> dict[str, Any]:
    """Return the parts of a bundle that `diff` compares, as JSON data by subject."""
    manifest = bundle.manifest
    provenance = manifest.provenance
    return {
        "model": {
            "name": manifest.name,
            "description": manifest.description,
            "capture": asdict(manifest.capture),
            "session": asdict(manifest.session),
            "classifiers": manifest.classifiers,
        },
        "signature": manifest.signature,
        "config": provenance.config,
        "tolerances": {name: asdict(bound) for name, bound in manifest.tolerances.items()},
        "targets": {name: _comparable_target(bundle, name) for name in manifest.targets},
        "tools": {"python": provenance.python, **provenance.tools},
        "host": provenance.host,
        "source": {"git_commit": provenance.git_commit, "git_dirty": provenance.git_dirty},
        "files": dict(bundle.files),
    }


def _comparable_target(bundle: Bundle, name: str) -> dict[str, Any]:
    """Return the parts of a target's record that `diff` compares, as JSON data."""
    record, annex = bundle.manifest.targets[name], bundle.annexes.get(name)
    candidates = record.candidates.items()
    return {
        "status": record.status,
        "engine": record.choice() if record.chosen else None,
        "built later": annex is not None,
        "candidates": {
            engine: candidate.status + (f": {candidate.reason}" if candidate.reason else "")
            for engine, candidate in candidates
        },
        "facts": {engine: candidate.facts for engine, candidate in candidates if candidate.facts},
        "tools": annex.record.tools if annex else {},
    }


def _find_changes(a: Any, b: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield a record of each difference between two values of JSON data.

    Mappings are compared key by key, and lists whose items have names are compared name by name.
    `what` in a record is the path of the value, such as `jets.pt.dtype`; `path` is that of `a`
    and `b` themselves.
    """
    items_a, items_b = _items_by_name(a), _items_by_name(b)
    if items_a is None or items_b is None:
        if a != b:
            yield {"what": path, "a": a, "b": b}
        return
    if isinstance(a, list) and items_a.keys() == items_b.keys() and list(items_a) != list(items_b):
        yield {"what": f"{path}, order", "a": list(items_a), "b": list(items_b)}
    for key in dict.fromkeys((*items_a, *items_b)):
        item_path = f"{path}.{key}" if path else str(key)
        if key in items_a and key in items_b:
            yield from _find_changes(items_a[key], items_b[key], item_path)
        else:
            yield {"what": item_path, "a": items_a.get(key), "b": items_b.get(key)}


def _items_by_name(value: Any) -> dict[str, Any] | None:
    """Return the items of a mapping, or those of a list by their names.

    Returns None for any other value, and for a list whose items do not all have different names.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {str(item["name"]): item for item in value if "name" in item}
        return named if value and len(named) == len(value) else None
    return None


def _compare_measurements(a: Manifest, b: Manifest) -> dict[str, Any]:
    """Compare the recorded times and deviations, for each target and engine of either manifest."""
    of_a, of_b = _candidates_by_engine(a), _candidates_by_engine(b)
    none = Candidate(status="failed")  # it has no times and no deviations
    speed, deviations = [], []
    for target, engine in dict.fromkeys((*of_a, *of_b)):
        artifact = {"target": target, "engine": engine}
        both = of_a.get((target, engine), none), of_b.get((target, engine), none)
        speed += [{**artifact, **times} for times in _compare_times(*both)]
        deviations += [{**artifact, **worst} for worst in _compare_deviations(*both)]
    return {"speed": speed, "deviations": deviations}


def _candidates_by_engine(manifest: Manifest) -> dict[tuple[str, str], Candidate]:
    """Return all candidates of a version, by target and engine."""
    return {
        (target, engine): candidate
        for target, record in manifest.targets.items()
        for engine, candidate in record.candidates.items()
    }


def _compare_times(a: Candidate, b: Candidate) -> Iterator[dict[str, Any]]:
    """Yield the median times of a call of both candidates for each number of rows.

    `ratio` is the time of `b` relative to that of `a`; None if one of them was not timed.
    """
    for rows in dict.fromkeys((*a.benchmark, *b.benchmark)):
        a_us, b_us = (
            side.benchmark[rows].median_us if rows in side.benchmark else None for side in (a, b)
        )
        ratio = b_us / a_us if a_us and b_us else None
        yield {"rows": rows, "a_us": a_us, "b_us": b_us, "ratio": ratio}


def _compare_deviations(a: Candidate, b: Candidate) -> Iterator[dict[str, Any]]:
    """Yield the worst deviations of both candidates for each output; None where there is none."""
    for output in dict.fromkeys((*a.worst, *b.worst)):
        measured: dict[str, Any] = {"output": output}
        for side, worst in (("a", a.worst.get(output)), ("b", b.worst.get(output))):
            measured[f"{side}_max_abs"] = worst.max_abs if worst else None
            measured[f"{side}_outside"] = worst.outside if worst else None
        yield measured


def _without_nonfinite(value: Any) -> Any:
    """Return JSON data in which texts replace the numbers that JSON lacks: nan, inf and -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return value


def describe_difference(difference: Mapping[str, Any]) -> Iterator[Part]:
    """Describe the result of `diff` in lines and tables for people."""
    for side in ("a", "b"):
        yield f"{side.upper()} {difference[side]['ref']}  {difference[side]['digest'][:12]}"
    if difference["same"]:
        yield "the same files, byte for byte"
        return
    yield from _describe_weights(**difference["weights"])
    for subject, changes in difference["records"].items():
        yield from _describe_changes(subject, changes)
    if difference["deviations"]:
        yield _deviation_table(difference["deviations"])
    if difference["speed"]:
        yield _speed_table(difference["speed"])


def _describe_changes(subject: str, changes: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Describe the changes of one subject: in a table, or if these are files, only their names."""
    if subject == "files":
        names = first_names([change["what"] for change in changes])
        yield f"files that differ: {names}"
        return
    shown = changes[:_MOST_ROWS]
    rows = ((change["what"], _as_text(change["a"]), _as_text(change["b"])) for change in shown)
    yield new_table(subject, "", "A", "B", rows=rows)
    yield from _count_hidden_rows(len(changes))


def _deviation_table(deviations: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of each side's largest deviations from its model, a row for each output."""
    title = "deviation from the model's own answers: max abs (fraction outside the tolerance)"
    table = new_table(title, "target", "engine", "output", "A", "B")
    for row in deviations:
        cells = (_deviation_text(row[f"{side}_max_abs"], row[f"{side}_outside"]) for side in "ab")
        table.add_row(row["target"], row["engine"], row["output"], *cells)
    return table


def _speed_table(speed: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of the median times of a call of each side, a row for each number of rows."""
    title = "median of a call, as measured when each was built"
    table = new_table(title, "target", "engine", "rows", "A", "B", "B / A")
    for row in speed:
        times = (row["a_us"], row["b_us"])
        cells = ("—" if us is None else microseconds(float(us)) for us in times)
        ratio = "" if row["ratio"] is None else number(float(row["ratio"]))
        table.add_row(row["target"], row["engine"], row["rows"], *cells, ratio)
    return table


def _describe_weights(same: int, changes: list[dict[str, Any]], unreadable: str) -> Iterator[Part]:
    """Describe the tensors that differ, in a table with their norms; or say that none differs.

    The arguments are the fields of `weights` in the result of `diff`.
    """
    if unreadable or not changes:
        state = f"not compared: {unreadable}" if unreadable else f"all {same} tensors are equal"
        yield f"weights: {state}"
        return
    table = new_table(
        f"weights: {len(changes)} tensors differ, {same} are equal",
        "tensor", "A", "B", "elements", "max |A-B|", "norm A", "norm B", "norm A-B",
    )  # fmt: skip
    for change in changes[:_MOST_ROWS]:
        a, b, elements = change["a"], change["b"], change["elements"]
        numbers = (change[key] for key in _NUMBERS)
        table.add_row(
            change["name"],
            _shape_text(a),
            "=" if a == b else _shape_text(b),
            "" if elements is None else f"{elements:,}",
            *("" if n is None else number(float(n)) for n in numbers),
        )
    yield table
    yield from _count_hidden_rows(len(changes))


def _shape_text(kind: str | None) -> str:
    """Write dtype and shape as one word: `float32 (48, 6)` gives `float32[48,6]`."""
    return "—" if kind is None else kind.replace(" (", "[").replace(", ", ",").replace(")", "]")


def _deviation_text(largest: Any, outside: Any) -> str:
    """Write a largest deviation, and the fraction that is outside the tolerance.

    Both may be texts such as `nan`, since they come from JSON; None: it was not measured.
    """
    return "—" if largest is None else f"{number(float(largest))} ({percent(float(outside))})"


def _count_hidden_rows(count: int) -> Iterator[str]:
    """Yield a line that says how many of `count` changes the table above it hides, if any."""
    if count > _MOST_ROWS:
        yield f"  … and {count - _MOST_ROWS} more: --json has all"


def _as_text(value: Any) -> str:
    """Write a value of JSON data as text, which is cut to `_MOST_CHARACTERS` characters."""
    if value is None:
        return "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
