"""The reference of jagged rows: padded in a loop that shares no code with the artifacts.

A case takes the first n rows and the first m items of the pool of inputs. A row whose items lie
beyond m has fewer items there, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soa.dtypes import torch_dtype
from soa.signature import Signature, offsets_of
from stages.errors import CaptureError
from stages.model import InFront, Padded, Padding

Columns = dict[str, torch.Tensor]


class ByRows(Padded):
    """Padding row by row. Raises CaptureError for wrong offsets."""

    def pad(self, padding: Padding, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The padded input, or the mask, filled row by row."""
        spans: list[list[int]] = inputs[padding.offsets].tolist()
        count = max((0, *(end for _, end in spans)))
        # A mask is made as if each item were 1.
        items = torch.ones(count) if padding.items is None else inputs[padding.items]
        shape = (len(spans), padding.length, *items.shape[1:])
        rows = torch.full(shape, padding.value, dtype=items.dtype)
        for row, (begin, end) in enumerate(spans):
            if not 0 <= begin <= end <= len(items):
                raise CaptureError(f"reference row {row} has items {begin}-{end} of {len(items)}")
            used = min(end - begin, padding.length)
            rows[row, :used] = items[begin : begin + used]
        if padding.items is None:
            rows = rows.reshape(len(spans), *(padding.shape or (1, padding.length)))
            return rows.to(torch_dtype(padding.dtype))
        if padding.shape is None:
            return rows.movedim(1, -1).contiguous()
        return rows.reshape(len(spans), *padding.shape)


def pad_row_by_row(model: torch.nn.Module) -> torch.nn.Module:
    """The model, with its jagged inputs padded row by row."""
    if isinstance(model, Padded):
        return ByRows(model.model, model.plan)
    return model.around(pad_row_by_row(model.model)) if isinstance(model, InFront) else model


def inputs_at(
    signature: Signature, inputs: Mapping[str, Columns], case: Mapping[str, int]
) -> dict[str, Columns]:
    """The pool of inputs, with offsets limited to the items of a case. `inputs` stay as they
    are."""
    arrays = dict(inputs)
    for name in signature.jagged:
        items, offsets = case[signature.rows_of[name]], offsets_of(name)
        arrays[offsets] = {
            column: values.clamp(max=items) for column, values in inputs[offsets].items()
        }
    return arrays


def draw_offsets(columns: Columns, items: int, generator: torch.Generator) -> Columns:
    """Offsets that cut the items into rows at random places: many rows are empty, or long. As many
    rows as `columns` has, and of their dtype."""
    n, dtype = len(columns["end"]), columns["end"].dtype
    end = torch.randint(0, items + 1, (n,), generator=generator).sort().values.to(dtype)
    return {"begin": torch.cat([end.new_zeros(1), end[:-1]]), "end": end}


def with_edge_lengths(signature: Signature, inputs: dict[str, Columns]) -> dict[str, Columns]:
    """Make the first rows of each jagged collection overlong, empty and exactly full, because
    padding may get these wrong. They take items that other rows have too, so the other rows do not
    change.
    """
    arrays = dict(inputs)
    for name, length in signature.jagged.items():
        items, offsets = signature.ranges[signature.rows_of[name]].proven, offsets_of(name)
        # Rows 0, 1 and 2: one item more than `length`, none, and just `length`.
        spans = {"begin": [0, items, 1], "end": [length + 1, items, length + 1]}
        columns = dict(inputs[offsets])
        for column, values in inputs[offsets].items():
            first = torch.tensor(spans[column], dtype=values.dtype)[: len(values)]
            columns[column] = torch.cat([first.clamp(max=items), values[3:]])
        arrays[offsets] = columns
    return arrays
