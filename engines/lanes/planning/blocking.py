"""Cuts a matrix product into blocks whose sums fit into registers.

A product has a loop `m` over the rows of its left operand, a loop `j` over the columns of its right
operand, and a sum over `steps`. A block is some values of `m` times some values of `j`: their sums
are in registers at the same time.
"""

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

_NO_LOOP = Variable("", extent=1)
_LEAST_SUMS, _LEAST_STEPS = 16, 16
"""With fewer sums, or fewer steps in each, a register does not hold several sums of one row, since
taking them out of the register costs more than it saves."""


@dataclass(frozen=True)
class Sums:
    """How many sums are in registers at a time: those of `m` rows of the left operand times `j`
    columns of the right one. On a GPU whose threads compute rows of the network together, a thread
    has these for `r` rows of the network."""

    m: int
    j: int
    r: int = 1


@dataclass(frozen=True)
class Loops:
    """The loops of a product.

    Only the left operand depends on the loop `m`, and only the right operand on `j`. `outer` are
    the other loops around a sum, and `steps` the loops of the sum itself. If one operand has the
    same values for all rows of the network (weights), it is the right one.
    """

    left: Read
    right: Read
    outer: tuple[Variable, ...]
    m: Variable
    j: Variable
    steps: tuple[Variable, ...]
    size: int
    """The number of bytes of a sum."""

    @classmethod
    def of(cls, kernel: Kernel, elements: Elements) -> Loops:
        """Find the loops of a kernel that computes a product. Its operands are weights or in
        memory, at addresses that are linear in each loop (see `product_operand`)."""
        product = kernel.inner
        assert isinstance(product, Product)
        left, right = product.operands(kernel.inner_at, elements.at)
        assert isinstance(left, Read) and isinstance(right, Read)
        if isinstance(left.tensor, Constant):
            left, right = right, left
        left_at, right_at = address(left), address(right)
        assert is_linear((left_at, right_at))
        m = _longest_loop(v for v in kernel.loops if left_at.factor(v) and not right_at.factor(v))
        j = _longest_loop(v for v in kernel.loops if right_at.factor(v) and not left_at.factor(v))
        outer = tuple(loop for loop in kernel.loops if loop not in (m, j))
        steps = loops_of(product.steps())
        return cls(left, right, outer, m, j, steps, itemsize(product.dtype))

    @property
    def weights(self) -> torch.Tensor | None:
        """The right operand's values if it is the same for all rows, else None."""
        return self.right.tensor.data if isinstance(self.right.tensor, Constant) else None

    @property
    def around(self) -> int:
        """The number of steps of all outer loops together."""
        return math.prod(loop.extent for loop in self.outer)

    @property
    def length(self) -> int:
        """The number of products that are added up in a sum."""
        return math.prod(loop.extent for loop in self.steps)


def address(read: Read) -> Index:
    """The position of the element that is read, counted in elements from its tensor's first one."""
    return read.tensor.address(read.index)


@dataclass(frozen=True)
class Operand:
    """An operand that each row of the network computes.

    In the first step of a sum, its element lies at `rest + by_m * m + by_j * j`, where `rest` is an
    index of the outer loops.
    """

    tensor: Tensor
    rest: Index
    by_m: int = 0
    by_j: int = 0


@dataclass(frozen=True)
class Weights:
    """Weights, rearranged into the order in which the code reads them. `rest` is the position at
    which it begins to read, as an index of the outer loops."""

    data: torch.Tensor
    rest: Index


@dataclass(frozen=True)
class Blocked:
    """A product that is cut into blocks.

    `most` is the size of a block; the last ones of a loop may be smaller. `steps` is the C++ text
    of the sum's loops (see `_loops_type`). The right operand is either `right` or `weights`; the
    other one is None. With `few`, each register holds `most.j` sums of one row of the network,
    instead of one sum for each of several rows.
    """

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
        """Choose the blocks of a product for a processor with so many `registers`.

        `few` is that of `Width`. `tile` gives the sums of a thread if the threads of a GPU compute
        `vectors` rows together, else it is None.
        """
        left_at, right_at, data = address(loops.left), address(loops.right), loops.weights
        few_sums = _sums_of_one_row(loops, few)
        if tile is not None:
            most = tile
        elif few_sums:
            most = Sums(1, few_sums)
        else:  # all vectors of rows use the same weights, but each has a right operand of its own
            most = _fastest_block(loops, registers, 1 if data is None else vectors)
        left_rest = _terms_in(left_at, loops.outer)
        left = Operand(loops.left.tensor, left_rest, by_m=left_at.factor(loops.m) or 0)
        right, weights = None, None
        if data is None:
            right_rest = _terms_in(right_at, loops.outer)
            right = Operand(loops.right.tensor, right_rest, by_j=right_at.factor(loops.j) or 0)
        else:
            zeros = -loops.j.extent % most.j if tile is not None or few_sums else 0
            width = most.j if tile is None else loops.j.extent + zeros  # tiles share one block
            weights = _pack_weights(data, loops, width, zeros)
        return cls(
            loops.outer, loops.m, loops.j, most, _loops_type(loops), left, right, weights,
            few=few_sums > 0,
        )  # fmt: skip


def _sums_of_one_row(loops: Loops, few: int) -> int:
    """The number of sums of one row that a register holds; `few` is that of `Width`. 0 if the right
    operand is not weights, or if there are too few sums or too few steps in each."""
    if loops.weights is None or loops.j.extent < _LEAST_SUMS or loops.length < _LEAST_STEPS:
        return 0
    return 4 * few // loops.size  # `few` counts sums of 4 bytes


def _loops_type(loops: Loops) -> str:
    """The C++ text of a value whose type describes the loops of a sum.

    For each loop it has the extent, and the loop's factor in each operand's address, for example
    `Loops<Loop<8, 1, 4>>{}`. Packed weights have no factor, because they are read in order.
    """
    operands = [loops.left] if loops.weights is not None else [loops.left, loops.right]
    types = []
    for loop in loops.steps:
        factors = (address(operand).factor(loop) for operand in operands)
        types.append(f"Loop<{', '.join(map(str, (loop.extent, *factors)))}>")
    return f"Loops<{', '.join(types)}>{{}}"


def _longest_loop(loops: Iterable[Variable]) -> Variable:
    """The loop with the most steps, and of equal ones the first. _NO_LOOP if there are no loops."""
    return max(loops, key=lambda loop: loop.extent, default=_NO_LOOP)


def _terms_in(address: Index, loops: Sequence[Variable]) -> Index:
    """The part of an address that depends on the given loops, with the address's constant."""
    terms = tuple((atom, factor) for atom, factor in address.terms if atom in loops)
    return Index(terms, address.constant)


def _fastest_block(loops: Loops, registers: int, vectors: int) -> Sums:
    """The block size with the fewest estimated cycles.

    The estimate assumes a processor that does two fma and two loads in a cycle, and whose fma takes
    four cycles. The registers must hold all sums of a block, and one element of each row of the
    left operand, each for `vectors` vectors, and one element of the right operand.
    """
    m, j = loops.m.extent, loops.j.extent

    def cycles(most: Sums) -> tuple[float, int]:
        """The cycles that all blocks take for one step of their sums. The second number decides
        between equal sizes: the larger block comes first."""
        total = 0.0
        for rows, times_rows in _block_sizes(m, most.m):
            for columns, times_columns in _block_sizes(j, most.j):
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


def _block_sizes(extent: int, most: int) -> list[tuple[int, int]]:
    """The sizes of the blocks of a loop, each with the number of such blocks:
    `(10, 4) -> [(4, 2), (2, 1)]`."""
    pieces = ((most, extent // most), (extent % most, 1))
    return [(size, times) for size, times in pieces if size]


def _pack_weights(data: torch.Tensor, loops: Loops, width: int, zeros: int) -> Weights:
    """Rearrange weights into the order in which the code reads them.

    They are ordered by the outer loops, then by blocks of at most `width` values of `j`, and then
    by the steps of the sum, so that the values of a block for one step are adjacent. `zeros` is the
    number of zeros that are appended to the last block.
    """
    address_of_weight = address(loops.right)
    outer = [loop for loop in loops.outer if address_of_weight.factor(loop)]
    places = torch.tensor(address_of_weight.constant)
    for loop in (*outer, loops.j, *loops.steps):  # each adds a dimension
        factor = address_of_weight.factor(loop) or 0
        places = places.unsqueeze(-1) + factor * torch.arange(loop.extent)
    ordered = data.flatten()[places]  # of shape (outer loops, j, steps)
    ordered = ordered.flatten(len(outer) + 1) if loops.steps else ordered.unsqueeze(-1)
    ordered = torch.nn.functional.pad(ordered, (0, 0, 0, zeros))
    blocks = ordered.split(width, dim=len(outer))
    packed = torch.cat([block.mT.flatten(len(outer)) for block in blocks], dim=-1)
    rest, size = Index(), packed.shape[-1]
    for loop in reversed(outer):
        rest = rest + Index(((loop, size),))
        size *= loop.extent
    return Weights(packed.contiguous(), rest)
