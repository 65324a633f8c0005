"""Index arithmetic, compared with Python's own integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.lanes.index import (
    Atom,
    Entry,
    Index,
    Quotient,
    Remainder,
    Variable,
    constant,
    entry,
    reshaped,
    variable,
)

VARIABLES = (Variable("i", 3), Variable("j", 4), Variable("k", 6))


def value(index: Index, at: Mapping[Variable, int]) -> int:
    """The index as a number, for these values of its variables."""
    return index.constant + sum(factor * _atom(atom, at) for atom, factor in index.terms)


def _atom(atom: Atom, at: Mapping[Variable, int]) -> int:
    """An atom as a number: a variable, or a quotient, a remainder or an entry of an index."""
    match atom:
        case Variable():
            return at[atom]
        case Quotient(of, by):
            return value(of, at) // by
        case Remainder(of, by):
            return value(of, at) % by
        case Entry(table, place):
            return table[value(place, at)]
    raise AssertionError(atom)


def places() -> list[dict[Variable, int]]:
    """All values that the variables can have together."""
    ranges = (range(one_of.extent) for one_of in VARIABLES)
    return [dict(zip(VARIABLES, values, strict=True)) for values in itertools.product(*ranges)]


factors = st.integers(-12, 24)
sums = st.builds(
    lambda own, rest: Index(tuple((v, f) for v, f in zip(VARIABLES, own, strict=True) if f), rest),
    st.tuples(factors, factors, factors),
    st.integers(-50, 50),
)
divisors = st.integers(1, 30)


@given(sums, divisors, divisors)
def test_quotients_and_rests_are_those_of_integers(index: Index, by: int, next_by: int) -> None:
    quotient, rest = index // by, index % by
    both = (index // by + index % by) // next_by
    for at in places():
        number = value(index, at)
        assert value(quotient, at) == number // by
        assert value(rest, at) == number % by
        assert value(both, at) == (number // by + number % by) // next_by


@given(sums, divisors)
def test_bounds_are_never_passed(index: Index, by: int) -> None:
    for bounded in (index, index // by, index % by):
        low, high = bounded.bounds
        numbers = [value(bounded, at) for at in places()]
        assert low <= min(numbers)
        assert max(numbers) <= high


@given(sums, divisors, st.integers(0, 2), st.integers(0, 3))
def test_other_indices_take_the_place_of_variables(index: Index, by: int, i: int, j: int) -> None:
    shifted: Mapping[Atom, Index] = {
        VARIABLES[0]: constant(i),
        VARIABLES[1]: Index(((VARIABLES[1], -1),), 3),
    }
    replaced = (index // by).replaced(shifted)
    for at in places():
        before = {**at, VARIABLES[0]: i, VARIABLES[1]: 3 - at[VARIABLES[1]]}
        assert value(replaced, at) == value(index, before) // by


@given(st.lists(st.integers(-9, 9), min_size=6, max_size=6))
def test_an_entry_of_a_table_is_that_at_its_index(table: list[int]) -> None:
    of_k = entry(tuple(table), variable("k", 6))
    for at in places():
        assert value(of_k, at) == table[at[VARIABLES[2]]]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with the same number of elements."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
        edges = [0, *cuts, len(primes)]
        shuffled = draw(st.permutations(primes))
        return tuple(math.prod(shuffled[a:b]) for a, b in itertools.pairwise(edges))

    return grouped(), grouped()


@given(shapes())
def test_reshaped_keeps_the_order_of_elements(
    pair: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    before, after = pair
    tensor = torch.arange(math.prod(before)).reshape(before)
    variables = [Variable(f"d{d}", size) for d, size in enumerate(after)]
    index = tuple(variable(v.name, v.extent) for v in variables)
    in_tensor = reshaped(index, after, before)
    for place in itertools.product(*(range(size) for size in after)):
        at = dict(zip(variables, place, strict=True))
        where = tuple(value(coordinate, at) for coordinate in in_tensor)
        assert tensor[where] == tensor.reshape(after)[place]
