"""Diff: what changed between two versions, as far as their bundles say and hold it.

Weights are compared by tensor, in `program.pt2`; everything else is what the manifests record: what
was measured then, where it was built. Nothing is run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from engines.errors import EngineError
from engines.exported import load_program, quiet_torch
from pipeline.report.tables import microseconds, new_table
from registry.bundle import Bundle, Candidate, Manifest
from registry.errors import BundleError
from registry.store import Registry
from runtime.opening import Opening, open_version
from soa.options import known_options

if TYPE_CHECKING:
    from pipeline.report.tables import Part

_LONGEST = 80
_MOST_ROWS = 40


@dataclass(frozen=True)
class Side:
    ref: str
    digest: str
    annexes: Mapping[str, str]


@dataclass(frozen=True)
class TensorChange:
    """One tensor that is not the same bit by bit. Norms are Frobenius norms, in float64."""

    name: str
    a: str | None
    """Dtype and shape, as `float32 (48, 6)`; None where there is no such tensor."""
    b: str | None
    elements: int | None = None
    """How many differ; None, as what follows, where the shapes do."""
    max_abs: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_difference: float | None = None


@dataclass(frozen=True)
class Weights:
    """`same` counts the tensors that are equal bit by bit. `unreadable`: why nothing is known."""

    same: int
    changes: tuple[TensorChange, ...]
    unreadable: str = ""


@dataclass(frozen=True)
class Change:
    """One recorded value; None where one side has no such."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Speed:
    """Median microseconds of a call, as each side's own benchmark found it when it was built."""

    target: str
    engine: str
    rows: str
    a_us: float | None
    b_us: float | None

    @property
    def ratio(self) -> float | None:
        """Above 1: B is slower."""
        return self.b_us / self.a_us if self.a_us and self.b_us else None


@dataclass(frozen=True)
class Deviation:
    """Largest deviation from the model's own answers, and the fraction outside the tolerance."""

    target: str
    engine: str
    output: str
    a_max_abs: float | None
    b_max_abs: float | None
    a_outside: float | None
    b_outside: float | None


@dataclass(frozen=True)
class Difference:
    """What changed from `a` to `b`."""

    a: Side
    b: Side
    weights: Weights
    records: Mapping[str, tuple[Change, ...]]
    """By subject: config, signature, targets, tolerances, tools, … ; empty ones are left out."""
    speed: tuple[Speed, ...]
    deviations: tuple[Deviation, ...]

    @property
    def same(self) -> bool:
        """The very same files, also of the targets that were built later."""
        return (self.a.digest, self.a.annexes) == (self.b.digest, self.b.annexes)

    def to_json(self) -> dict[str, Any]:
        """What is not finite is written as text: `nan`, `inf`."""
        data = asdict(self) | {"same": self.same}
        data["speed"] = [asdict(each) | {"ratio": each.ratio} for each in self.speed]
        found: dict[str, Any] = _finite(data)
        return found


@known_options()
def diff(registry: Registry, a: str, b: str) -> Difference:
    """Compare two versions, or folders of bundles; every digest is checked first."""
    opened = [open_version(Opening(ref, mode="test", registry=registry)) for ref in (a, b)]
    left, right = (
        (each.version.ref if each.version else str(each.bundle.path), each.bundle)
        for each in opened
    )
    return compare(left, right)


def compare(a: tuple[str, Bundle], b: tuple[str, Bundle]) -> Difference:
    """Two bundles, each with what it is called."""
    sides = [
        Side(ref, bundle.digest, {target: annex.digest for target, annex in bundle.annexes.items()})
        for ref, bundle in (a, b)
    ]
    one, two = a[1], b[1]
    subjects_a, subjects_b = _subjects(one), _subjects(two)
    records = {what: tuple(_changes(subjects_a[what], subjects_b[what])) for what in subjects_a}
    return Difference(
        sides[0],
        sides[1],
        _weights(one, two),
        {subject: changes for subject, changes in records.items() if changes},
        tuple(_speed(one.manifest, two.manifest)),
        tuple(_deviations(one.manifest, two.manifest)),
    )


def _weights(one: Bundle, two: Bundle) -> Weights:
    try:
        a, b = _tensors(one), _tensors(two)
    except (EngineError, BundleError) as error:
        return Weights(0, (), str(error))
    names = dict.fromkeys((*a, *b))
    found = [_compare(name, a.get(name), b.get(name)) for name in names]
    changes = tuple(change for change in found if change is not None)
    return Weights(len(found) - len(changes), changes)


def _tensors(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants of the portable program."""
    with quiet_torch():
        program = load_program(bundle.file(bundle.manifest.program))
    both = {**program.constants, **program.state_dict}
    return {name: t.detach() for name, t in both.items() if isinstance(t, torch.Tensor)}


def _compare(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> TensorChange | None:
    kind_a, kind_b = _kind(a), _kind(b)
    if a is None or b is None or a.shape != b.shape:
        return TensorChange(name, kind_a, kind_b)
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    difference = (x - y).abs()
    return TensorChange(
        name,
        kind_a,
        kind_b,
        int((x != y).sum()),
        float(difference.max()) if difference.numel() else 0.0,
        float(torch.linalg.vector_norm(x)),
        float(torch.linalg.vector_norm(y)),
        float(torch.linalg.vector_norm(difference)),
    )


def _kind(tensor: torch.Tensor | None) -> str | None:
    if tensor is None:
        return None
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is equal to itself here, and 0 is not -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _subjects(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    provenance = manifest.provenance
    return {
        "model": {
            "name": manifest.name,
            "description": manifest.description,
            "capture": manifest.capture.model_dump(),
            "session": manifest.session.model_dump(),
            "classifiers": manifest.classifiers,
        },
        "signature": manifest.signature,
        "config": provenance.config,
        "tolerances": {k: asdict(t) for k, t in manifest.tolerances.items()},
        "targets": {name: _target(bundle, name) for name in manifest.targets},
        "tools": {"python": provenance.python, **provenance.tools},
        "host": provenance.host,
        "source": {"git_commit": provenance.git_commit, "git_dirty": provenance.git_dirty},
        "files": dict(bundle.files),
    }


def _target(bundle: Bundle, name: str) -> dict[str, Any]:
    record = bundle.manifest.targets[name]
    annex = bundle.annexes.get(name)
    return {
        "status": record.status,
        "engine": record.choice() if record.chosen else None,
        "built later": annex is not None,
        "candidates": {
            engine: c.status + (f": {c.reason}" if c.reason else "")
            for engine, c in record.candidates.items()
        },
        "facts": {engine: c.facts for engine, c in record.candidates.items() if c.facts},
        "tools": annex.record.tools if annex else {},
    }


def _changes(a: Any, b: Any, at: str = "") -> Iterator[Change]:
    """Values that differ, by the path that leads to them; list items that have names, by name."""
    left, right = _named(a), _named(b)
    if left is None or right is None:
        if a != b:
            yield Change(at, a, b)
        return
    if isinstance(a, list) and left.keys() == right.keys() and list(left) != list(right):
        yield Change(f"{at}, order", list(left), list(right))
    for key in dict.fromkeys((*left, *right)):
        place = f"{at}.{key}" if at else str(key)
        if key in left and key in right:
            yield from _changes(left[key], right[key], place)
        else:
            yield Change(place, left.get(key), right.get(key))


def _named(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        named = {str(item["name"]): item for item in value if "name" in item}
        return named if value and len(named) == len(value) else None
    return None


def _pairs(one: Manifest, two: Manifest) -> Iterator[tuple[str, str, Candidate, Candidate]]:
    """Each target and engine of either side; one without a record for the side that has none."""
    a, b = (
        {(t, e): c for t, record in side.targets.items() for e, c in record.candidates.items()}
        for side in (one, two)
    )
    none = Candidate(status="failed")
    for target, engine in dict.fromkeys((*a, *b)):
        yield target, engine, a.get((target, engine), none), b.get((target, engine), none)


def _speed(one: Manifest, two: Manifest) -> Iterator[Speed]:
    for target, engine, a, b in _pairs(one, two):
        for rows in dict.fromkeys((*a.benchmark, *b.benchmark)):
            times = [c.benchmark[rows].median_us if rows in c.benchmark else None for c in (a, b)]
            yield Speed(target, engine, rows, *times)


def _deviations(one: Manifest, two: Manifest) -> Iterator[Deviation]:
    for target, engine, a, b in _pairs(one, two):
        for output in dict.fromkeys((*a.worst, *b.worst)):
            found = [c.worst.get(output) for c in (a, b)]
            largest = (None if worst is None else worst.max_abs for worst in found)
            outside = (None if worst is None else worst.outside for worst in found)
            yield Deviation(target, engine, output, *largest, *outside)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def describe_difference(found: Difference) -> Iterator[Part]:
    """The same for people: lines and tables."""
    for letter, side in (("A", found.a), ("B", found.b)):
        yield f"{letter} {side.ref}  {side.digest[:12]}"
    if found.same:
        yield "the same files, byte for byte"
        return
    yield from _describe_weights(found.weights)
    for subject, changes in found.records.items():
        if subject == "files":
            names = ", ".join(change.what for change in changes[:6])
            more = f", … ({len(changes)})" if len(changes) > 6 else ""
            yield f"files that differ: {names}{more}"
            continue
        rows = ((c.what, _value(c.a), _value(c.b)) for c in changes[:_MOST_ROWS])
        yield new_table(subject, "", "A", "B", rows=rows)
        yield from _more(len(changes))
    if found.deviations:
        table = new_table(
            "deviation from the model's own answers: max abs (fraction outside the tolerance)",
            "target", "engine", "output", "A", "B",
        )  # fmt: skip
        for d in found.deviations:
            sides = ((d.a_max_abs, d.a_outside), (d.b_max_abs, d.b_outside))
            cells = ("—" if worst is None else f"{worst:.2e} ({out:.2%})" for worst, out in sides)
            table.add_row(d.target, d.engine, d.output, *cells)
        yield table
    if found.speed:
        table = new_table(
            "median of a call, as measured when each was built", "target", "engine", "rows", "A",
            "B", "B / A",
        )  # fmt: skip
        for s in found.speed:
            times = ("—" if t is None else microseconds(t) for t in (s.a_us, s.b_us))
            ratio = "" if s.ratio is None else f"{s.ratio:.2f}"
            table.add_row(s.target, s.engine, s.rows, *times, ratio)
        yield table


def _describe_weights(weights: Weights) -> Iterator[Part]:
    if weights.unreadable or not weights.changes:
        why = f"not compared: {weights.unreadable}"
        yield f"weights: {why if weights.unreadable else f'all {weights.same} tensors are equal'}"
        return
    table = new_table(
        f"weights: {len(weights.changes)} tensors differ, {weights.same} are equal",
        "tensor", "A", "B", "elements", "max |A-B|", "norm A", "norm B", "norm A-B",
    )  # fmt: skip
    for change in weights.changes[:_MOST_ROWS]:
        numbers = (change.max_abs, change.norm_a, change.norm_b, change.norm_difference)
        table.add_row(
            change.name,
            change.a or "—",
            "=" if change.a == change.b else change.b or "—",
            "" if change.elements is None else str(change.elements),
            *("" if n is None else f"{n:.3g}" for n in numbers),
        )
    yield table
    yield from _more(len(weights.changes))


def _more(count: int) -> Iterator[str]:
    if count > _MOST_ROWS:
        yield f"  … and {count - _MOST_ROWS} more: --json has all"


def _value(value: Any) -> str:
    if value is None:
        return "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
