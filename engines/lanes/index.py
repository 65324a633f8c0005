"""Indices of tensor elements, as sums of loop variables with constant factors.

A view of a tensor changes its indices; this is computed when the program is compiled. `view` and
`reshape` introduce quotients and remainders. Nearly always these can be simplified to plain sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Variable:
    """A loop variable, from 0 to `extent` - 1."""

    name: str
    extent: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value. Each kind of atom has such bounds."""
        return 0, self.extent - 1


@dataclass(frozen=True)
class Quotient:
    """`of // by`, rounded down."""

    of: Index
    by: int

    @property
    def bounds(self) -> tuple[int, int]:
        low, high = self.of.bounds
        return low // self.by, high // self.by


@dataclass(frozen=True)
class Remainder:
    """`of % by`, which is never negative."""

    of: Index
    by: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds of any remainder, though `of` may not reach all of them."""
        return 0, self.by - 1


@dataclass(frozen=True)
class Entry:
    """Entry number `at` of a constant table. The table is the same for all rows."""

    table: tuple[int, ...]
    at: Index

    @property
    def bounds(self) -> tuple[int, int]:
        return min(self.table), max(self.table)


@dataclass(frozen=True)
class OfRow:
    """A number that differs between rows: `value` is an expression of dtype int64, and it lies
    between `low` and `high`."""

    value: Any
    low: int
    high: int

    @property
    def bounds(self) -> tuple[int, int]:
        return self.low, self.high


Atom: TypeAlias = "Variable | Quotient | Remainder | Entry | OfRow"


@dataclass(frozen=True)
class Index:
    """`constant` plus the sum of atom * factor over all `terms`. `//` and `%` take only positive
    divisors."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value."""
        low = high = self.constant
        for atom, factor in self.terms:
            ends = [factor * end for end in atom.bounds]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        return _sum([*self.terms, *other.terms], self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        terms = tuple((atom, own * factor) for atom, own in self.terms)
        return Index(terms, self.constant * factor)

    def __floordiv__(self, by: int) -> Index:
        """The quotient, rounded down. It contains a `Quotient` only if it is no plain sum."""
        whole, rest = self._split(by)
        if rest.bounds[1] < by:
            return whole
        rest, by = rest._cancel(by)
        return whole + Index(((Quotient(rest, by), 1),))

    def __mod__(self, by: int) -> Index:
        """The remainder, which is never negative. It contains a `Remainder` only if it is no plain
        sum."""
        _, rest = self._split(by)
        return rest if rest.bounds[1] < by else Index(((Remainder(rest, by), 1),))

    def _split(self, by: int) -> tuple[Index, Index]:
        """Returns (q, r) with self = q * by + r; r is never negative, but may exceed `by`. Terms
        whose factors are multiples of `by` are in q: 8 * i + j by 4 -> (2 * i, j)."""
        whole = Index(tuple((atom, f // by) for atom, f in self.terms if f % by == 0))
        rest = Index(tuple((atom, f) for atom, f in self.terms if f % by), self.constant)
        shift = rest.bounds[0] // by  # moved from r to q, so that the least r is 0 to `by` - 1
        return whole + shift, rest + -shift * by

    def _cancel(self, by: int) -> tuple[Index, int]:
        """Divides the index and `by` by the common divisor g of `by` and all factors, and returns
        both: (6 i + 5) // 4 -> (3 i + 2) // 2. The constant is rounded down, which does not change
        the quotient, since (g * a + c) // (g * b) = (a + c // g) // b."""
        common = math.gcd(by, *(factor for _, factor in self.terms))
        terms = tuple((atom, factor // common) for atom, factor in self.terms)
        return Index(terms, self.constant // common), by // common

    @property
    def is_of_row(self) -> bool:
        """True if a row's own numbers are in the index (`OfRow`)."""
        return any(isinstance(atom, OfRow) for atom in self.atoms())

    def atoms(self) -> Iterable[Atom]:
        """All atoms, also those inside other atoms."""
        for atom, _ in self.terms:
            yield atom
            if isinstance(atom, Quotient | Remainder):
                yield from atom.of.atoms()
            elif isinstance(atom, Entry):
                yield from atom.at.atoms()

    def factor(self, variable: Variable) -> int | None:
        """The factor of a variable, 0 if the index does not contain it; None if the index is not
        linear in it."""
        own_factor = 0
        for atom, factor in self.terms:
            if atom == variable:
                own_factor = factor
            elif not isinstance(atom, Variable) and variable in Index(((atom, 1),)).atoms():
                return None  # it is inside another atom
        return own_factor

    def replaced(self, values: Mapping[Atom, Index]) -> Index:
        """The index with each atom that is a key of `values` replaced by its value, simplified."""
        total = Index((), self.constant)
        for atom, factor in self.terms:
            total = total + _replace_in(atom, values) * factor
        return total


Indices = tuple[Index, ...]
"""The index of an element: one for each dimension."""


def _replace_in(atom: Atom, values: Mapping[Atom, Index]) -> Index:
    """The index that an atom becomes when it, or an atom inside it, is replaced by its value."""
    if atom in values:
        return values[atom]
    if isinstance(atom, Quotient):
        return atom.of.replaced(values) // atom.by
    if isinstance(atom, Remainder):
        return atom.of.replaced(values) % atom.by
    if isinstance(atom, Entry):
        return entry(atom.table, atom.at.replaced(values))
    return Index(((atom, 1),))


def _sum(terms: Sequence[tuple[Atom, int]], constant: int) -> Index:
    """The index that is the sum of terms. An atom may be in several terms; their factors are added,
    and a term whose factor becomes 0 is left out."""
    factors: dict[Atom, int] = {}
    for atom, factor in terms:
        factors[atom] = factors.get(atom, 0) + factor
    nonzero = [(atom, factor) for atom, factor in factors.items() if factor]
    # By name, so that sums of the same variables are equal in any order. Other atoms come last: "~"
    # sorts after all letters.
    nonzero.sort(key=lambda term: getattr(term[0], "name", "~"))
    return Index(tuple(nonzero), constant)


def constant(value: int) -> Index:
    """A number as an index."""
    return Index((), value)


def variable(name: str, extent: int) -> Index:
    """A loop variable as an index. A loop of extent 1 has no variable: it is the constant 0."""
    return Index(((Variable(name, extent), 1),)) if extent != 1 else Index()


def entry(table: tuple[int, ...], at: Index) -> Index:
    """Entry number `at` of a constant table, as an index. If the entries have equal steps, it is a
    sum without the table: of (3, 5, 7) it is 2 * at + 3."""
    if len(table) == 1 or not at.terms:  # `at` is a known number
        return constant(table[at.constant])
    step = table[1] - table[0]
    if all(b - a == step for a, b in pairwise(table)):
        return at * step + table[0]
    return Index(((Entry(table, at), 1),))


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, in elements: (2, 3, 4) -> (12, 4, 1)."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def flat(index: Indices, shape: Sequence[int]) -> Index:
    """The position of an element in the memory of a dense tensor of this shape."""
    return dot(index, strides(shape))


def dot(index: Indices, strides: Sequence[int]) -> Index:
    """The position of an element in memory with these strides."""
    total = Index()
    for position, stride in zip(index, strides, strict=True):
        total = total + position * stride
    return total


def is_linear(indices: Iterable[Index]) -> bool:
    """True if the indices are sums of loop variables, without other atoms."""
    return all(isinstance(atom, Variable) for index in indices for atom, _ in index.terms)


def loops_of(indices: Iterable[Index]) -> tuple[Variable, ...]:
    """The loop variables that are terms of the indices, in the order of the terms. One that is in
    several indices is there several times."""
    atoms = (atom for index in indices for atom, _ in index.terms)
    return tuple(atom for atom in atoms if isinstance(atom, Variable))


def reshaped(index: Indices, shape: Sequence[int], before: Sequence[int]) -> Indices:
    """The index that an element had in shape `before`, from its `index` after a reshape to `shape`:
    for (6,) reshaped to (2, 3), (i, j) -> (3 * i + j,).

    The first size of both shapes may be known only at run time, because it is not used.
    """
    position = flat(index, shape)
    quotients = [position // stride for stride in strides(before)]
    others = zip(quotients[1:], before[1:], strict=True)
    # The first quotient is smaller than its size without a remainder.
    return (*quotients[:1], *(quotient % size for quotient, size in others))
