"""Many rows like those of the reference, so that a rare deviation is seen.

Where a network decides between nearly equal values (nearest neighbours, `topk`), an artifact may be
far off in one row of ten thousand. The rows are drawn from the reference with replacement, and
each number is moved a little, within the range of its column (a smoothed bootstrap: B. W.
Silverman and G. A. Young, 1987). So zeros, signs, categories and correlations stay.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from engines.errors import first_line
from soa.dtypes import is_float
from soa.signature import Signature, offsets_of
from stages.reference.answers import Arrays, Edge, MoreRows, run_eager, take_rows
from stages.reference.nonfinite import Case
from stages.reference.offsets import draw_offsets

WHAT = "rows like those of the reference"
_PIECE = 1024  # rows of a piece, if the model takes so many
_SPREAD = 0.1  # the width of the relative change of a number
_DIGITS = 2.0**11  # a number is short if its mantissa has at most 11 binary digits
# The limits of the number of rows by default: rows, work, bytes of inputs and answers, and pieces.
# Work is counted in units: each number that an operation writes is one, and so are _FLOPS products
# and sums. Eager torch does 0.2 to 1 · 10⁹ units in a second.
_ROWS = 200_000
_WORK = 2e9
_FLOPS = 8
_BYTES = 2**27
_PIECES = 500


def make_many_rows(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, wanted: int | None
) -> MoreRows:
    """Draw about `wanted` rows, in whole pieces, and run the eager model on them: an edge for each
    piece. If the model fails on one, there is only a note.

    If `wanted` is None, they are 200,000 rows, or fewer if the model needs much work for a row or
    takes few rows at a time. The work is counted, not timed, so that the number of rows is the same
    on every host. If it is 0, there are none.
    """
    case = _case_of_piece(signature)
    if wanted == 0 or not all(case.values()):
        return MoreRows()

    def answer(rows: Arrays) -> Edge:
        return Edge(WHAT, "stress", rows, case, run_eager(model, signature, rows, case))

    work = _Work()
    try:
        first_rows = draw_rows(signature, inputs, case, seed=0)
        with work:
            first = answer(first_rows)
        seeds = range(1, _piece_count(first, work.units, wanted))
        others = [answer(draw_rows(signature, inputs, case, seed)) for seed in seeds]
    except Exception as error:  # the user's own code may raise any type
        return MoreRows(notes=(f"{WHAT} are not tried: {first_line(error)}",))
    return MoreRows((first, *others))


def _piece_count(first: Edge, work: float, wanted: int | None) -> int:
    """The number of pieces to run, at least 1. `first` is the first piece, which took `work`, in
    the units of `_WORK`. `wanted` is the number of rows; None: as many as the limits allow."""
    rows = max(first.case.values())
    if wanted is not None:
        return math.ceil(wanted / rows)
    size = sum(value.nbytes for value in first.tensors().values())
    affordable = min(int(_WORK / max(work, 1)), _BYTES // max(size, 1), _PIECES)
    return max(1, min(math.ceil(_ROWS / rows), affordable))


def _case_of_piece(signature: Signature) -> Case:
    """The number of rows of a piece, for each dimension: at most about `_PIECE` in the smallest
    one. Several dimensions keep their proportions."""
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    least = max(min(rows.proven for rows in ranges.values()), 1)
    share = min(1.0, _PIECE / least)
    return {dim: max(int(rows.proven * share), rows.min) for dim, rows in ranges.items()}


def draw_rows(signature: Signature, inputs: Arrays, case: Case, seed: int) -> Arrays:
    """Draw rows of `inputs` with replacement, as many as `case` says, and change their floats a
    little. Scalars, integers and short numbers stay as they are. Jagged rows get other lengths."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {
        dim: torch.randint(signature.ranges[dim].proven, (n,), generator=generator)
        for dim, n in case.items()
    }
    rows = take_rows(signature, inputs, chosen)
    for name in signature.input_collections:
        for column in signature.layouts[name].numbers:
            if column.kind != "scalar" and is_float(column.dtype):
                values = rows[name][column.name]
                rows[name][column.name] = _move(values, inputs[name][column.name], generator)
    for name in signature.jagged:
        dim, offsets = signature.rows_of[name], offsets_of(name)
        rows[offsets] = draw_offsets(rows[offsets], case[dim], generator)
    return rows


def _move(values: torch.Tensor, own: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Change the values of a column a little, by a normal relative change, within the range of its
    values in the reference, `own`. Numbers that are short in binary stay as they are."""
    finite = own[own.isfinite()]
    if not finite.numel():
        return values
    wide = values.double()
    share = torch.randn(wide.shape, generator=generator, dtype=torch.float64) * _SPREAD
    moved = (wide * (1 + share)).clamp(float(finite.min()), float(finite.max()))
    return torch.where(has_few_digits(wide), wide, moved).to(values.dtype)


def has_few_digits(values: torch.Tensor) -> torch.Tensor:
    """For each number: whether it is short in binary, as categories, masks, halves and zero are, or
    not finite. It is short if its mantissa, which is from 0.5 to 1, is a multiple of
    1 / `_DIGITS`."""
    digits = torch.frexp(values).mantissa * _DIGITS
    return (digits == digits.round()) | ~values.isfinite()


class _Work(TorchDispatchMode):
    """A mode that counts the work of all operations of torch that run in it, in the units of
    `_WORK`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, which torch passes to this method, and count its work. A view writes
        nothing."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not function.is_view:
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.units += sum(tensor.numel() for tensor in results)
        count_flops = flop_registry.get(function._overloadpacket)
        if count_flops is not None:
            self.units += count_flops(*args, **kwargs, out_val=result) / _FLOPS
        return result
