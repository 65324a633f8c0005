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
    """Pads by a loop over rows, for the reference. Raises CaptureError for wrong offsets, for which
    the artifact gives no answer."""

    def pad(self, padding: Padding, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make one input of the model, padded rows or the mask, row by row. The shapes are those
        that `Padding` lists."""
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
    """The same model, but with its jagged inputs padded by a loop over rows."""
    if isinstance(model, Padded):
        return ByRows(model.model, model.plan)
    return model.around(pad_row_by_row(model.model)) if isinstance(model, InFront) else model


def inputs_at(
    signature: Signature, inputs: Mapping[str, Columns], case: Mapping[str, int]
) -> dict[str, Columns]:
    """The pool of inputs for a case: its offsets are cut at the number of items that the case has.
    `inputs` itself is not changed."""
    arrays = dict(inputs)
    for name in signature.jagged:
        items, offsets = case[signature.rows_of[name]], offsets_of(name)
        arrays[offsets] = {
            column: values.clamp(max=items) for column, values in inputs[offsets].items()
        }
    return arrays


def draw_offsets(columns: Columns, items: int, generator: torch.Generator) -> Columns:
    """Draw offsets that cut `items` items into rows at random places, so that many rows are empty
    or long. There are as many rows as in `columns`, whose dtype they have."""
    n, dtype = len(columns["end"]), columns["end"].dtype
    end = torch.randint(0, items + 1, (n,), generator=generator).sort().values.to(dtype)
    return {"begin": torch.cat([end.new_zeros(1), end[:-1]]), "end": end}


def with_edge_lengths(signature: Signature, inputs: dict[str, Columns]) -> dict[str, Columns]:
    """The inputs with other offsets in the first three rows of each jagged collection: one is too
    long, one empty and one exactly full, since padding may get these wrong.

    These rows share items with other rows, which so stay as they are.
    """
    arrays = dict(inputs)
    for name, length in signature.jagged.items():
        items, offsets = signature.ranges[signature.rows_of[name]].proven, offsets_of(name)
        # Rows 0, 1 and 2: one item more than `length`, none, and just `length`.
        spans = {"begin": [0, items, 1], "end": [length + 1, items, length + 1]}
        columns = dict(inputs[offsets])
        for column, values in inputs[offsets].items():
            first_rows = torch.tensor(spans[column], dtype=values.dtype)[: len(values)]
            columns[column] = torch.cat([first_rows.clamp(max=items), values[3:]])
        arrays[offsets] = columns
    return arrays
