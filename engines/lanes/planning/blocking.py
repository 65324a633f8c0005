"""Cuts a matrix product into blocks whose sums fit into registers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engines.lanes.index import Index, Variable
from engines.lanes.planning.plan import Kernel
from engines.lanes.tensors import Constant, Elements, Product
from engines.lanes.values import Read, Tensor
from soa.dtypes import itemsize

_NONE = Variable("", 1)
_SUMS, _STEPS = 16, 16
"""The least numbers of sums and of their steps for which registers hold sums of one row: handing
them out costs time, too."""


@dataclass(frozen=True)
class Sums:
    """How many sums registers hold at a time: of so many rows of the left operand, columns of the
    right one, and rows of the network, if a GPU's threads compute these together."""

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
        """None if an operand is a number, or if an address is not linear in each loop variable."""
        product = kernel.inner
        assert isinstance(product, Product)
        left, right = product.operands(kernel.inner_at, elements.at)
        if not isinstance(left, Read) or not isinstance(right, Read):
            return None
        if isinstance(left.tensor, Constant):
            left, right = right, left
        one, other = address(left), address(right)
        steps = tuple(v for i in product.steps() for v in _variables(i))
        factors = {v: (one.factor(v), other.factor(v)) for v in (*kernel.loops, *steps)}
        if any(f is None for pair in factors.values() for f in pair) or not _even(one, other):
            return None
        m = _largest(v for v in kernel.loops if factors[v][1] == 0 and factors[v][0])
        j = _largest(v for v in kernel.loops if factors[v][0] == 0 and factors[v][1])
        outer = tuple(v for v in kernel.loops if v not in (m, j))
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
    """A product in blocks. `most`: the sums in registers at a time. `steps`: a C++ value whose type
    lists the loops of a sum. `few`: a register holds `most.j` sums of one row."""

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
        one, other, data = address(loops.left), address(loops.right), loops.weights
        rests = [_only(each, loops.outer) for each in (one, other)]
        left = Operand(loops.left.tensor, rests[0], by_m=one.factor(loops.m) or 0)
        second, weights = None, None
        beside = 4 * few // loops.size
        if data is None or loops.j.extent < _SUMS or loops.length < _STEPS:
            beside = 0
        if tile is not None:
            most = tile
        elif beside:
            most = Sums(1, beside)
        else:
            most = _best(loops, registers, 1 if data is None else vectors)
        if data is None:
            second = Operand(loops.right.tensor, rests[1], by_j=other.factor(loops.j) or 0)
        else:
            filled = -loops.j.extent % most.j if tile or beside else 0
            weights = _packed(data, loops, loops.j.extent + filled if tile else most.j, filled)
        types = ", ".join(
            f"Loop<{v.extent}, {one.factor(v)}" + (f", {other.factor(v)}>" if second else ">")
            for v in loops.steps
        )
        steps = f"Loops<{types}>{{}}"
        return cls(loops.outer, loops.m, loops.j, most, steps, left, second, weights, beside > 0)


def _variables(index: Index) -> list[Variable]:
    return [a for a, _ in index.terms if isinstance(a, Variable)]


def _even(*addresses: Index) -> bool:
    return all(isinstance(a, Variable) for each in addresses for a, _ in each.terms)


def _largest(variables: Iterable[Variable]) -> Variable:
    return max(variables, key=lambda v: v.extent, default=_NONE)


def _only(address: Index, variables: Sequence[Variable]) -> Index:
    """The terms of an address in the given variables, and its constant."""
    return Index(tuple(t for t in address.terms if t[0] in variables), address.constant)


def _best(loops: Loops, registers: int, vectors: int) -> Sums:
    """The block size with the fewest estimated cycles: two fma and two loads for each cycle, with
    four cycles of latency."""
    m, j = loops.m.extent, loops.j.extent

    def cycles(most: tuple[int, int]) -> tuple[float, int]:
        total = 0.0
        for a, times_a in _pieces(m, most[0]):
            for b, times_b in _pieces(j, most[1]):
                work = a * b * vectors / 2
                loads = (a * vectors + b) / 2
                total += times_a * times_b * (max(work, loads, 4.0) + 0.5)
        return total, -most[0] * most[1]

    fit = [
        (a, b)
        for a, b in itertools.product(range(1, min(m, 8) + 1), range(1, min(j, 16) + 1))
        if (a * b + a) * vectors + 1 <= registers
    ]
    return Sums(*min(fit or [(1, 1)], key=cycles))


def _pieces(size: int, most: int) -> list[tuple[int, int]]:
    """The sizes of the blocks of a loop, each with the number of blocks of that size."""
    return [(each, times) for each, times in ((most, size // most), (size % most, 1)) if each]


def _packed(data: torch.Tensor, loops: Loops, most: int, filled: int) -> Weights:
    """Weights by the outer loops, then by blocks of at most `most` values of `j`, then by the steps
    of the sum. The values of a block for one step are adjacent. `filled`: so many zeros fill the
    last block."""
    at = address(loops.right)
    own = [v for v in loops.outer if at.factor(v)]
    place = torch.tensor(at.constant)
    for v in (*own, loops.j, *loops.steps):
        place = place.unsqueeze(-1) + (at.factor(v) or 0) * torch.arange(v.extent)
    whole = data.flatten()[place]
    whole = whole.flatten(len(own) + 1) if loops.steps else whole.unsqueeze(-1)
    whole = torch.nn.functional.pad(whole, (0, 0, 0, filled))
    blocks = [each.transpose(-1, -2).flatten(len(own)) for each in whole.split(most, dim=len(own))]
    packed = torch.cat(blocks, dim=-1)
    rest, size = Index(), packed.shape[-1]
    for v in reversed(own):
        rest = rest + Index(((v, size),))
        size *= v.extent
    return Weights(packed.contiguous(), rest)
