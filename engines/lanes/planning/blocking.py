"""Cuts a matrix product into blocks whose sums fit into registers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engines.lanes.index import Index, Variable, is_linear, loops_of
from engines.lanes.planning.plan import Kernel
from engines.lanes.tensors import Constant, Elements, Product
from engines.lanes.values import Read, Tensor
from soa.dtypes import itemsize

_NO_LOOP = Variable("", 1)
_LEAST_SUMS, _LEAST_STEPS = 16, 16
"""The least numbers of sums and of their steps for which registers hold sums of one row: handing
them out costs time, too."""


@dataclass(frozen=True)
class Sums:
    """How many sums registers hold at a time: of `m` rows of the left operand, `j` columns of the
    right one, and `r` rows of the network, if a GPU's threads compute these together."""

    m: int
    j: int
    r: int = 1


@dataclass(frozen=True)
class Loops:
    """The loops of a product. Only the left operand depends on the loop `m`, only the right operand
    on `j`. If one of them is the same for all rows, it is the right one."""

    left: Read
    right: Read
    outer: tuple[Variable, ...]
    m: Variable
    j: Variable
    steps: tuple[Variable, ...]
    size: int
    """The bytes of a sum."""

    @classmethod
    def of(cls, kernel: Kernel, elements: Elements) -> Loops | None:
        """The loops of a kernel that computes a product. None if an operand is a number, or if an
        address is not a sum of loop variables with factors."""
        product = kernel.inner
        assert isinstance(product, Product)
        left, right = product.operands(kernel.inner_at, elements.at)
        if not isinstance(left, Read) or not isinstance(right, Read):
            return None
        if isinstance(left.tensor, Constant):
            left, right = right, left
        left_at, right_at = address(left), address(right)
        if not is_linear((left_at, right_at)):
            return None
        m = _largest(v for v in kernel.loops if left_at.factor(v) and not right_at.factor(v))
        j = _largest(v for v in kernel.loops if right_at.factor(v) and not left_at.factor(v))
        outer = tuple(v for v in kernel.loops if v not in (m, j))
        steps = loops_of(product.steps())
        return cls(left, right, outer, m, j, steps, itemsize(product.dtype))

    @property
    def weights(self) -> torch.Tensor | None:
        """The right operand, if it is the same for all rows."""
        return self.right.tensor.data if isinstance(self.right.tensor, Constant) else None

    @property
    def around(self) -> int:
        """How often the outer loops run."""
        return math.prod(v.extent for v in self.outer)

    @property
    def length(self) -> int:
        """How many steps a sum has."""
        return math.prod(v.extent for v in self.steps)


def address(read: Read) -> Index:
    """The position of an element in the memory of its tensor, in elements."""
    return read.tensor.address(read.index)


@dataclass(frozen=True)
class Operand:
    """An operand that each row computes. Its element lies at `rest` (an index of the outer loops)
    + `by_m` * m + `by_j` * j, plus the steps of the sum."""

    tensor: Tensor
    rest: Index
    by_m: int = 0
    by_j: int = 0


@dataclass(frozen=True)
class Weights:
    """Weights in the order in which they are read. `rest`: where a read begins, as an index of the
    outer loops."""

    data: torch.Tensor
    rest: Index


@dataclass(frozen=True)
class Blocked:
    """A product in blocks. `most`: the sums in registers at a time. `steps`: see `_steps_text`.
    `right` or `weights`: the right operand. `few`: a register holds `most.j` sums of one row."""

    outer: tuple[Variable, ...]
    m: Variable
    j: Variable
    most: Sums
    steps: str
    left: Operand
    right: Operand | None
    weights: Weights | None
    few: bool = False

    @classmethod
    def of(
        cls, loops: Loops, registers: int, vectors: int, few: int = 0, tile: Sums | None = None
    ) -> Blocked:
        """The blocks of a product. `few`: see `Width`. `tile`: the sums of a thread, if a GPU's
        threads compute `vectors` rows together."""
        left_at, right_at, data = address(loops.left), address(loops.right), loops.weights
        few_sums = _sums_of_one_row(loops, few)
        if tile is not None:
            most = tile
        elif few_sums:
            most = Sums(1, few_sums)
        else:  # all vectors of rows use the same weights, but each has a right operand of its own
            most = _best(loops, registers, 1 if data is None else vectors)
        rest = _only(left_at, loops.outer)
        left = Operand(loops.left.tensor, rest, by_m=left_at.factor(loops.m) or 0)
        right, weights = None, None
        if data is None:
            rest = _only(right_at, loops.outer)
            right = Operand(loops.right.tensor, rest, by_j=right_at.factor(loops.j) or 0)
        else:
            zeros = -loops.j.extent % most.j if tile is not None or few_sums else 0
            width = most.j if tile is None else loops.j.extent + zeros  # tiles share one block
            weights = _packed(data, loops, width, zeros)
        return cls(
            loops.outer, loops.m, loops.j, most, _steps_text(loops), left, right, weights,
            few=few_sums > 0,
        )  # fmt: skip


def _sums_of_one_row(loops: Loops, few: int) -> int:
    """How many sums of one row a register holds (`few`: see `Width`). 0 if the right operand is no
    weights, or if the sums are too few or too short."""
    if loops.weights is None or loops.j.extent < _LEAST_SUMS or loops.length < _LEAST_STEPS:
        return 0
    return 4 * few // loops.size


def _steps_text(loops: Loops) -> str:
    """A C++ value whose type lists the loops of a sum, each with its extent and with its factors in
    the addresses. Packed weights have none: they are read in order."""
    operands = [loops.left] if loops.weights is not None else [loops.left, loops.right]
    types = []
    for loop in loops.steps:
        factors = (address(operand).factor(loop) for operand in operands)
        types.append(f"Loop<{', '.join(map(str, (loop.extent, *factors)))}>")
    return f"Loops<{', '.join(types)}>{{}}"


def _largest(loops: Iterable[Variable]) -> Variable:
    """The loop with the most steps, the first of equal ones; _NO_LOOP of none."""
    return max(loops, key=lambda loop: loop.extent, default=_NO_LOOP)


def _only(address: Index, loops: Sequence[Variable]) -> Index:
    """The terms of an address in the given loops, and its constant."""
    terms = tuple((atom, factor) for atom, factor in address.terms if atom in loops)
    return Index(terms, address.constant)


def _best(loops: Loops, registers: int, vectors: int) -> Sums:
    """The block size with the fewest estimated cycles: two fma and two loads for each cycle, with
    four cycles of latency. Registers hold the sums and an element of each row of the left operand,
    `vectors` for each of these, and one element of the right operand."""
    m, j = loops.m.extent, loops.j.extent

    def cycles(most: Sums) -> tuple[float, int]:
        """Of all blocks for one step; of equal ones, the largest block is the least."""
        total = 0.0
        for rows, times_rows in _pieces(m, most.m):
            for columns, times_columns in _pieces(j, most.j):
                work = rows * columns * vectors / 2
                loads = (rows * vectors + columns) / 2
                total += times_rows * times_columns * (max(work, loads, 4.0) + 0.5)
        return total, -most.m * most.j

    fit = [
        Sums(rows, columns)
        for rows, columns in itertools.product(range(1, min(m, 8) + 1), range(1, min(j, 16) + 1))
        if (rows * columns + rows) * vectors + 1 <= registers
    ]
    return min(fit or [Sums(1, 1)], key=cycles)


def _pieces(extent: int, most: int) -> list[tuple[int, int]]:
    """The sizes of the blocks of a loop, each with the number of blocks of that size."""
    pieces = ((most, extent // most), (extent % most, 1))
    return [(size, times) for size, times in pieces if size]


def _packed(data: torch.Tensor, loops: Loops, width: int, zeros: int) -> Weights:
    """Weights by the outer loops, then by blocks of at most `width` values of `j`, then by the
    steps of the sum. The values of a block for one step are adjacent. `zeros`: so many fill the
    last block."""
    address_of_weight = address(loops.right)
    outer = [loop for loop in loops.outer if address_of_weight.factor(loop)]
    places = torch.tensor(address_of_weight.constant)
    for loop in (*outer, loops.j, *loops.steps):  # each adds a dimension
        factor = address_of_weight.factor(loop) or 0
        places = places.unsqueeze(-1) + factor * torch.arange(loop.extent)
    ordered = data.flatten()[places]  # (outer loops, j, steps)
    ordered = ordered.flatten(len(outer) + 1) if loops.steps else ordered.unsqueeze(-1)
    ordered = torch.nn.functional.pad(ordered, (0, 0, 0, zeros))
    blocks = ordered.split(width, dim=len(outer))
    packed = torch.cat([block.mT.flatten(len(outer)) for block in blocks], dim=-1)
    rest, size = Index(), packed.shape[-1]
    for loop in reversed(outer):
        rest = rest + Index(((loop, size),))
        size *= loop.extent
    return Weights(packed.contiguous(), rest)
