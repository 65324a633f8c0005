"""Find the inputs and outputs for which a reference would not show a wrong artifact.

If the expected answers are all NaN or all equal, an artifact that reads the wrong memory passes
too. So NaN and infinite values are counted, and refused above a limit (nonfinite.py). Here each
input column gets other values, to see whether any output of the eager model changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from soa.signature import BoundBlock, Signature
from stages.errors import ReferenceDataError
from stages.reference.answers import Reference, run_eager
from stages.reference.nonfinite import CURE, Case, label

# Row counts to try if the smallest size shows nothing, since more rows hold rarer values: the first
# size from _ROWS on, and the largest one up to _MORE_ROWS.
_ROWS, _MORE_ROWS = 32, 1000


class _InputColumn(NamedTuple):
    """An input column, as notes name it: `collection.name`."""

    collection: str
    name: str

    def __str__(self) -> str:
        return f"{self.collection}.{self.name}"


def find_weaknesses(
    model: torch.nn.Module, signature: Signature, reference: Reference
) -> tuple[str, ...]:
    """Find what the reference would not show: input columns that change no output or are equal, and
    outputs that do not change. Returns sentences for the user.

    The model runs many times, with other values in its inputs. Raises ReferenceDataError if no
    input changes any output.
    """
    blocks = [bound.block for bound in signature.inputs]
    read = [_InputColumn(block.collection, name) for block in blocks for name in block.columns]
    columns = list(dict.fromkeys(read))
    constant = [column for column in columns if _is_constant(_column_values(reference, column))]
    varying = [column for column in columns if column not in constant]
    effects = _try_columns(model, signature, reference, varying)
    if not effects.outputs:
        why = f"no input changes any output (asked at {effects.largest})"
        if not varying:
            why = "every row of its inputs is the same"
        raise ReferenceDataError(
            f"the reference proves nothing: {why}, so an artifact that reads the wrong memory "
            f"would pass: {CURE}"
        )
    notes = [f"input column {column} is the same in every row" for column in constant]
    notes += [
        f"input columns {' and '.join(map(str, group))} hold the same values: an artifact that "
        "confuses them would pass"
        for group in _group_equal(reference, varying)
    ]
    notes += [
        f"input column {column} changes no output (other values were tried at {effects.largest})"
        for column in varying
        if column in effects.tried - effects.columns
    ]
    for bound in signature.outputs:
        if bound.name in effects.outputs:
            notes += _note_constants(signature, bound, reference)
        else:
            notes.append(
                f"output {bound.name!r} is changed by no input (tried at {effects.largest})"
            )
    return tuple(notes)


@dataclass
class _Effects:
    """What the trials with other values in input columns have shown so far."""

    tried: set[_InputColumn] = field(default_factory=set)
    """The columns that had other values in a trial."""
    columns: set[_InputColumn] = field(default_factory=set)
    """Those of them that changed an output."""
    outputs: set[str] = field(default_factory=set)
    """The outputs that changed."""
    largest: str = ""
    """The label of the last case that was tried."""

    def add(self, column: _InputColumn, changed: set[str]) -> None:
        """Record a trial with other values in a column; `changed` are the outputs that changed."""
        self.tried.add(column)
        self.outputs |= changed
        if changed:
            self.columns.add(column)


def _try_columns(
    model: torch.nn.Module, signature: Signature, reference: Reference, columns: list[_InputColumn]
) -> _Effects:
    """Run the model with other values in each input column, to see which outputs change.

    A column gets other values first in one row, then in all rows at ever larger sizes. Columns that
    have changed an output are left out, once each output has changed. The values are drawn from the
    column itself, so that the model accepts them.
    """
    generator = torch.Generator().manual_seed(0)
    names = {bound.name for bound in signature.outputs}
    effects = _try_columns_in_rows(model, signature, reference, columns)
    for case in _sizes_to_ask(reference.cases):
        effects.largest = label(case)
        expected = reference.outputs[reference.cases.index(case)]
        for column in columns:
            if column in effects.columns and effects.outputs == names:
                continue
            n = case[signature.rows_of[column.collection]]
            other_values = _draw_anew(_column_values(reference, column), n, generator)
            if other_values is None:
                continue
            inputs = {name: dict(values) for name, values in reference.inputs.items()}
            inputs[column.collection][column.name] = other_values
            try:
                answers = run_eager(model, signature, inputs, case)
                changed = {name for name in names if not _equal(answers[name], expected[name])}
            except Exception:  # an error shows that the model reads the column
                changed = names
            effects.add(column, changed)
    return effects


def _try_columns_in_rows(
    model: torch.nn.Module, signature: Signature, reference: Reference, columns: list[_InputColumn]
) -> _Effects:
    """Run the model with another value of each column in one row only. So one run tries as many
    columns as there are rows.

    Only columns that change an output in their row are recorded: the others may change it in other
    rows. With several row dimensions nothing is tried.
    """
    effects = _Effects()
    case = _sizes_to_ask(reference.cases)[-1]
    if len(case) > 1:
        return effects
    expected = reference.outputs[reference.cases.index(case)]
    with_rows = [bound.name for bound in signature.outputs if not bound.rowless]
    (n,) = case.values()
    for start in range(0, len(columns), n):
        inputs = {name: dict(values) for name, values in reference.inputs.items()}
        changed_in: dict[int, _InputColumn] = {}  # the column that is changed in a row
        for row, column in enumerate(columns[start : start + n]):
            other_values = _change_in_row(_column_values(reference, column), row, n)
            if other_values is not None:
                inputs[column.collection][column.name] = other_values
                changed_in[row] = column
        try:
            answers = run_eager(model, signature, inputs, case)
        except Exception:  # tried one by one, each column shows whether it is the cause
            continue
        for row, column in changed_in.items():
            changed = {
                name for name in with_rows if not _equal(answers[name][row], expected[name][row])
            }
            if changed:
                effects.add(column, changed)
    return effects


def _column_values(reference: Reference, column: _InputColumn) -> torch.Tensor:
    """The values of a column in the reference's inputs."""
    return reference.inputs[column.collection][column.name]


def _change_in_row(values: torch.Tensor, row: int, n: int) -> torch.Tensor | None:
    """A copy of the first n values of a column, with another one of them in `row`. None if all n
    are equal, or the column is a scalar, which has no rows."""
    if values.ndim == 0:
        return None
    others = (values[:n] != values[row]).reshape(n, -1).any(1).nonzero()
    if not len(others):
        return None
    changed = values[:n].clone()
    changed[row] = values[int(others[row % len(others)])]
    return changed


def _sizes_to_ask(cases: Sequence[Case]) -> list[Case]:
    """Up to three cases at which to run the model, ascending: the smallest, which costs least, and
    two larger ones. All of them have at least 2 rows of each dimension."""
    several = [case for case in cases if min(case.values()) >= 2]
    ordered = sorted(several, key=lambda case: sum(case.values()))
    middle = next((case for case in ordered if min(case.values()) >= _ROWS), ordered[-1])
    large = [case for case in ordered if max(case.values()) <= _MORE_ROWS][-1:]
    chosen = (ordered[0], middle, *large)
    return [case for case in ordered if case in chosen]


def _draw_anew(values: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor | None:
    """A draw of n of the column's first n rows, with replacement, that is not equal to them. None
    if no draw is. A scalar, which has no rows, gets another value: doubled, or its last bit
    flipped."""
    if values.ndim == 0:
        scalar = values.item()
        if not isinstance(scalar, float):
            return torch.tensor(int(scalar) ^ 1, dtype=values.dtype)  # true and false change places
        return torch.tensor(2 * scalar if scalar else 1.0, dtype=values.dtype)
    own = values[:n]
    for _ in range(8):  # tries: a draw may leave all rows as they were
        drawn = own[torch.randint(n, (n,), generator=generator)]
        if not _equal(drawn, own):
            return drawn
    return None


def _is_constant(values: torch.Tensor) -> bool:
    """Whether a column has the same value in all rows; false for a scalar, which has no rows."""
    return values.ndim > 0 and _equal(values, values[:1].expand_as(values))


def _note_constants(signature: Signature, bound: BoundBlock, reference: Reference) -> list[str]:
    """A sentence about each column of an output that has the same value in all rows of the largest
    case. Outputs without rows have none."""
    if bound.plan.kind == "scalars":
        return []
    layout = signature.layouts[bound.block.collection]
    sizes = [sum(case.values()) for case in reference.cases]
    largest = sizes.index(max(sizes))
    values = reference.outputs[largest][bound.name]
    columns = values.reshape(len(values), -1).split(
        [layout[name].components for name in bound.block.columns], dim=1
    )
    return [
        f"output column {bound.block.collection}.{name} is the same in every row at "
        f"{label(reference.cases[largest])}"
        for name, column in zip(bound.block.columns, columns, strict=True)
        if _is_constant(column)
    ]


def _group_equal(reference: Reference, columns: list[_InputColumn]) -> list[list[_InputColumn]]:
    """Group the columns that hold the same bytes, and have the same shape and dtype. Only groups of
    at least two columns are returned."""
    groups: dict[tuple[torch.Size, torch.dtype, str], list[_InputColumn]] = {}
    for column in columns:
        values = _column_values(reference, column)
        if values.ndim:
            content = values.contiguous().view(torch.uint8).numpy()
            digest = hashlib.sha256(content.data).hexdigest()
            groups.setdefault((values.shape, values.dtype, digest), []).append(column)
    return [group for group in groups.values() if len(group) > 1]


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal, where NaN is equal to NaN. NaN is found as the only number
    that is not equal to itself, which works for integers and bools too."""
    both_nan = (first != first) & (second != second)
    return bool(((first == second) | both_nan).all())
