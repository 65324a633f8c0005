"""Find the inputs and outputs for which a reference would not show a wrong artifact.

If the expected answers are all NaN or all equal, an artifact that reads the wrong memory passes
too. So NaN and infinite values are counted, and refused above a limit (nonfinite.py). Here each
input column gets other values, to see whether any output of the eager model changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from soa.signature import BoundBlock, Signature
from stages.errors import ReferenceDataError
from stages.reference.answers import Reference, eager_answers
from stages.reference.nonfinite import CURE, Case, label

# Row counts to try if the smallest size shows nothing: more rows hold rarer values.
_ROWS, _MORE_ROWS = 32, 1000

Member = tuple[str, str]  # collection, column


def weaknesses(
    model: torch.nn.Module, signature: Signature, reference: Reference
) -> tuple[str, ...]:
    """Sentences about what the reference does not show, for the user.

    Raises ReferenceDataError if it shows nothing: no input changes any output.
    """
    columns = [(b.block.collection, name) for b in signature.inputs for name in b.block.columns]
    columns = list(dict.fromkeys(columns))
    constant = [c for c in columns if _constant(reference.inputs[c[0]][c[1]])]
    varying = [c for c in columns if c not in constant]
    effects = _effects(model, signature, reference, varying)
    if not effects.outputs:
        why = f"no input changes any output (asked at {effects.largest})"
        if not varying:
            why = "every row of its inputs is the same"
        raise ReferenceDataError(
            f"the reference proves nothing: {why}, so an artifact that reads the wrong memory "
            f"would pass: {CURE}"
        )
    notes = [f"input column {_name(c)} is the same in every row" for c in constant]
    notes += [
        f"input columns {' and '.join(map(_name, same))} hold the same values: an artifact that "
        "confuses them would pass"
        for same in _same_values(reference, varying)
    ]
    notes += [
        f"input column {_name(c)} changes no output (other values were tried at {effects.largest})"
        for c in varying
        if c in effects.tried - effects.columns
    ]
    for bound in signature.outputs:
        if bound.name in effects.outputs:
            notes += _constant_columns(signature, bound, reference)
        else:
            notes.append(
                f"output {bound.name!r} is changed by no input (tried at {effects.largest})"
            )
    return tuple(notes)


@dataclass
class _Effects:
    """What other values in the input columns have shown so far."""

    tried: set[Member] = field(default_factory=set)
    """The columns that got other values."""
    columns: set[Member] = field(default_factory=set)
    """The columns that change an output."""
    outputs: set[str] = field(default_factory=set)
    """The outputs that change."""
    largest: str = ""
    """The last number of rows that was tried."""

    def add(self, member: Member, changed: set[str]) -> None:
        """Note the outputs that changed with other values in a column."""
        self.tried.add(member)
        self.outputs |= changed
        if changed:
            self.columns.add(member)


def _effects(
    model: torch.nn.Module, signature: Signature, reference: Reference, columns: list[Member]
) -> _Effects:
    """Give each column other values, first in one row, then in all rows.

    The values of a column are drawn again from the same column, so the model accepts them.
    """
    generator = torch.Generator().manual_seed(0)
    names = {bound.name for bound in signature.outputs}
    effects = _effects_in_rows(model, signature, reference, columns)
    for case in _sizes_to_ask(reference.cases):
        effects.largest = label(case)
        expected = reference.outputs[reference.cases.index(case)]
        for collection, name in columns:
            if (collection, name) in effects.columns and effects.outputs == names:
                continue
            n = case[signature.rows_of[collection]]
            other = _drawn_anew(reference.inputs[collection][name], n, generator)
            if other is None:
                continue
            inputs = {**reference.inputs, collection: {**reference.inputs[collection], name: other}}
            try:
                answers = eager_answers(model, signature, inputs, case)
                changed = {key for key in names if not _alike(answers[key], expected[key])}
            except Exception:  # an error shows that the model reads the column
                changed = names
            effects.add((collection, name), changed)
    return effects


def _effects_in_rows(
    model: torch.nn.Module, signature: Signature, reference: Reference, columns: list[Member]
) -> _Effects:
    """Give each column another of its values in one row only: one run of the model tries as many
    columns as there are rows.

    A column that changes nothing in its row may change other rows: it does not count as tried.
    Nothing is tried if there are several dimensions.
    """
    effects = _Effects()
    case = _sizes_to_ask(reference.cases)[-1]
    if len(case) > 1:
        return effects
    expected = reference.outputs[reference.cases.index(case)]
    with_rows = [b.name for b in signature.outputs if not b.rowless]
    (n,) = case.values()
    for start in range(0, len(columns), n):
        inputs = {name: dict(values) for name, values in reference.inputs.items()}
        rows: dict[int, Member] = {}
        for row, (collection, name) in enumerate(columns[start : start + n]):
            other = _changed_in(inputs[collection][name], row, n)
            if other is not None:
                inputs[collection][name] = other
                rows[row] = (collection, name)
        try:
            answers = eager_answers(model, signature, inputs, case)
        except Exception:  # tried one by one, each column shows whether it is the cause
            continue
        for row, member in rows.items():
            changed = {k for k in with_rows if not _alike(answers[k][row], expected[k][row])}
            if changed:
                effects.add(member, changed)
    return effects


def _changed_in(values: torch.Tensor, row: int, n: int) -> torch.Tensor | None:
    """The values with another of the first n in one row; None if these are equal, or a scalar."""
    if values.ndim == 0:
        return None
    others = (values[:n] != values[row]).reshape(n, -1).any(1).nonzero()
    if not len(others):
        return None
    changed = values[:n].clone()
    changed[row] = values[int(others[row % len(others)])]
    return changed


def _sizes_to_ask(cases: Sequence[Case]) -> list[Case]:
    """The smallest size, which costs least; then larger ones, if the smallest shows nothing."""
    ordered = sorted((c for c in cases if min(c.values()) >= 2), key=lambda c: sum(c.values()))
    middle = next((c for c in ordered if min(c.values()) >= _ROWS), ordered[-1])
    large = [c for c in ordered if max(c.values()) <= _MORE_ROWS][-1:]
    wanted = (ordered[0], middle, *large)
    return [c for c in ordered if c in wanted]


def _drawn_anew(values: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor | None:
    """The first n rows in random order, some twice; None if all are equal. A scalar is changed."""
    if values.ndim == 0:
        one = values.item()
        other = (2 * one or 1.0) if isinstance(one, float) else int(one) ^ 1
        return torch.tensor(other, dtype=values.dtype)
    given = values[:n]
    for _ in range(8):  # a draw may leave all rows as they were
        drawn = given[torch.randint(n, (n,), generator=generator)]
        if not _alike(drawn, given):
            return drawn
    return None


def _constant(values: torch.Tensor) -> bool:
    return values.ndim > 0 and _alike(values, values[:1].expand_as(values))


def _constant_columns(signature: Signature, bound: BoundBlock, reference: Reference) -> list[str]:
    """Columns of an output that have one and the same value in all rows at the largest size."""
    if bound.plan.kind == "scalars":
        return []
    layout = signature.layouts[bound.block.collection]
    at = max(range(len(reference.cases)), key=lambda i: sum(reference.cases[i].values()))
    values = reference.outputs[at][bound.name]
    parts = values.reshape(len(values), -1).split(
        [layout[name].components for name in bound.block.columns], dim=1
    )
    return [
        f"output column {bound.block.collection}.{name} is the same in every row at "
        f"{label(reference.cases[at])}"
        for name, part in zip(bound.block.columns, parts, strict=True)
        if _constant(part)
    ]


def _same_values(reference: Reference, columns: list[Member]) -> list[list[Member]]:
    """Groups of columns that hold the same bytes."""
    groups: dict[tuple[torch.Size, torch.dtype, str], list[Member]] = {}
    for collection, name in columns:
        values = reference.inputs[collection][name]
        if values.ndim:
            content = values.contiguous().view(torch.uint8).numpy()
            digest = hashlib.sha256(content.data).hexdigest()
            groups.setdefault((values.shape, values.dtype, digest), []).append((collection, name))
    return [group for group in groups.values() if len(group) > 1]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _name(member: Member) -> str:
    return ".".join(member)
