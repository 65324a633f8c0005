"""The reference of jagged rows: padded row by row, with nothing of the code that an artifact has.

Of the pool of inputs a case takes the first n rows and the first m items. Where a row's items lie
beyond these, the case has it without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soa.dtypes import torch_dtype
from soa.signature import Signature, offsets_of
from stages.errors import ReferenceDataError
from stages.model import InFront, Inputs, Mask, Padded, Padding

Columns = Mapping[str, torch.Tensor]


class ByRows(InFront):
    """In place of `Padded`: the same in a loop over the rows."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs) -> None:
        super().__init__(model)
        self.inputs = inputs

    def prepare(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            inputs[one]
            if isinstance(one, int)
            else _rows(one, inputs[one.items], inputs[one.offsets].tolist())
            for one in self.inputs
        ]


def by_rows(model: torch.nn.Module) -> torch.nn.Module:
    """The model, its jagged inputs padded row by row."""
    if isinstance(model, Padded):
        return ByRows(model.model, model.inputs)
    return model.around(by_rows(model.model)) if isinstance(model, InFront) else model


def _rows(one: Padding | Mask, items: torch.Tensor, spans: list[list[int]]) -> torch.Tensor:
    n = len(spans)
    if isinstance(one, Mask):
        found = torch.zeros(n, one.length)
    else:
        found = torch.full((n, one.length, *items.shape[1:]), one.value, dtype=items.dtype)
    for row, (begin, end) in enumerate(spans):
        if not 0 <= begin <= end <= len(items):
            raise ReferenceDataError(f"row {row} has items {begin} … {end} of {len(items)}")
        there = min(end - begin, one.length)
        found[row, :there] = 1 if isinstance(one, Mask) else items[begin : begin + there]
    if isinstance(one, Mask):
        return found.reshape(n, *one.shape).to(torch_dtype(one.dtype))
    return found if one.items_first else found.movedim(1, -1).contiguous()


def inputs_at(
    signature: Signature, inputs: Mapping[str, Columns], case: Mapping[str, int]
) -> dict[str, dict[str, torch.Tensor]]:
    """The pool as a case has it: no offset leads beyond its items."""
    found = {name: dict(columns) for name, columns in inputs.items()}
    for name in signature.jagged:
        columns = found[offsets_of(name)]
        for key, values in columns.items():
            columns[key] = values.clamp(max=case[signature.rows_of[name]])
    return found


def drawn_offsets(rows: int, items: int, dtype: torch.dtype, generator: torch.Generator) -> Columns:
    """Offsets of rows that hold all items one after another: a fifth none, few most of them."""
    share = torch.rand(rows, generator=generator, dtype=torch.float64) ** 3
    share[torch.rand(rows, generator=generator) < 0.2] = 0
    total = share.cumsum(0)
    end = (total / total[-1:].clamp(min=1e-9) * items).to(dtype)
    return {"begin": torch.cat([end.new_zeros(1), end[:-1]])[:rows], "end": end}


def check_offsets(columns: Columns, where: str, items: int | None) -> None:
    """Raise ReferenceDataError unless 0 <= begin <= end (<= items) in every row."""
    begin, end = columns["begin"], columns["end"]
    wrong = (begin < 0) | (end < begin)
    if items is not None:
        wrong |= end > items
    if wrong.any():
        row = int(wrong.nonzero()[0])
        of = "" if items is None else f" of {items}"
        raise ReferenceDataError(
            f"reference collection {where!r}: row {row} has items {int(begin[row])} … "
            f"{int(end[row])}{of}; needed 0 <= begin <= end <= number of items"
        )


def with_every_kind(columns: Columns, length: int, items: int) -> dict[str, torch.Tensor]:
    """Offsets whose first rows are what padding may get wrong: overlong, empty, exactly full.

    They take items that other rows have too, so that the rest stays as it is.
    """
    kinds = [(0, length + 1), (items, items), (1, length + 1)]
    found = {name: values.clone() for name, values in columns.items()}
    for row, (begin, end) in enumerate(kinds[: len(columns["begin"])]):
        found["begin"][row], found["end"][row] = min(begin, items), min(end, items)
    return found
