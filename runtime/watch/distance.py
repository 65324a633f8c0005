"""How far counts moved from the profile of the reference, and how far chance alone moves them.

Two measures of the difference between the shares of the bins: the population stability index (the
symmetric Kullback-Leibler divergence: S. Kullback and R. A. Leibler, 1951) and the Jensen-Shannon
divergence in bits (J. Lin, 1991). Each bin gets half a value more, so that no share is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.errors import LoadError
from runtime.watch.counts import Counts
from runtime.watch.profile import KINDS, Bins, Profile
from soa.text import number

LIMIT = 0.005
"""The index from which a column has moved. A normal distribution that moves by a tenth of its width
has 0.01."""
_BY_CHANCE = 1e-4  # the probability that one of all columns is reported though nothing moved
_FEWEST = 5  # values that are expected in a bin, for the approximation by chi-squared


@dataclass(frozen=True)
class Moved:
    """The difference of one column: `psi`, the population stability index; `js`, the Jensen-Shannon
    divergence in bits, from 0 to 1.

    `values`, `reference`: the numbers of values that were counted, and that the reference has.
    `chance`: about the index that chance alone gives at these numbers. `significant`: with
    independent rows that did not move, one of all columns has it with a probability of 1e-4.
    `changes`: in words, the largest changes of shares.
    """

    column: str
    psi: float
    js: float
    chance: float
    significant: bool
    values: int
    reference: int
    changes: tuple[str, ...]

    def beyond(self, limit: float) -> bool:
        """Whether the column moved by more than `limit`, and more than by chance."""
        return self.significant and self.psi > limit


@dataclass(frozen=True)
class Share:
    """The shares of a column's values that lie in one bin, or are of one kind."""

    name: str
    reference: float
    counted: float


def shares_of(bins: Bins, counts: Sequence[int]) -> list[Share]:
    """The shares of each kind and bin that has values."""
    names = [*KINDS, *(f"{number(low)} to {number(high)}" for low, high in pairwise(bins.edges))]
    old, new = max(sum(bins.counts), 1), max(sum(counts), 1)
    return [
        Share(name, a / old, b / new)
        for name, a, b in zip(names, bins.counts, counts, strict=True)
        if a or b
    ]


def drift(profile: Profile, counts: Counts) -> list[Moved]:
    """The difference of each column with values, the largest first. LoadError if the counts are not
    in the bins of this profile."""
    for key, column in counts.columns.items():
        bins = profile.columns.get(key)
        if bins is None or len(bins.counts) != len(column):
            raise LoadError(f"these are no counts of {counts.label}: its columns have other bins")
    counted = {key: column for key, column in counts.columns.items() if sum(column)}
    moved = [_moved(key, profile.columns[key], counted[key], len(counted)) for key in counted]
    return sorted(moved, key=lambda each: (-each.psi, each.column))


def _moved(key: str, bins: Bins, counts: Sequence[int], columns: int) -> Moved:
    """How far the counts of a column are from the reference's bins."""
    before, now = _shares(bins.counts), _shares(counts)
    psi = sum((b - a) * math.log(b / a) for a, b in zip(before, now, strict=True))
    js = sum(_half(a, b) + _half(b, a) for a, b in zip(before, now, strict=True))
    old, new = sum(bins.counts), sum(counts)
    used = sum(a + b > 0 for a, b in zip(bins.counts, counts, strict=True))
    chance = (used - 1) * (1 / max(old, 1) + 1 / new)
    significant = _differ(bins.counts, counts, _BY_CHANCE / columns)
    return Moved(
        key,
        psi,
        js=js,
        chance=chance,
        significant=significant,
        values=new,
        reference=old,
        changes=tuple(_changes(bins, counts)),
    )


def _differ(one: Sequence[int], other: Sequence[int], by_chance: float) -> bool:
    """Whether two samples come from different distributions. If they do not, the answer is wrong
    with at most the probability `by_chance`.

    Half of it is for Pearson's test; there, bins in which few values are expected are taken
    together. The other half is for single bins: of its values, the share in each sample is bounded
    by H. Chernoff (1952), which holds for any number.
    """
    n, m = sum(one), sum(other)
    if not n or not m:
        return False
    pairs = list[tuple[int, int]]()
    few_a = few_b = 0
    for a, b in zip(one, other, strict=True):
        if (a + b) * min(n, m) < _FEWEST * (n + m):
            few_a += a
            few_b += b
        else:
            pairs.append((a, b))
    if (few_a + few_b) * min(n, m) >= _FEWEST * (n + m):
        pairs.append((few_a, few_b))
    squares = sum((m * a - n * b) ** 2 / (a + b) for a, b in pairs) / (n * m)
    if len(pairs) > 1 and squares > _chi_squared(len(pairs) - 1, by_chance / 2):
        return True
    most = max(_unlikely(a, b, n, m) for a, b in zip(one, other, strict=True))
    return most > math.log(4 * len(one) / by_chance)


def _unlikely(a: int, b: int, n: int, m: int) -> float:
    """The logarithm of the reciprocal of a bound for the probability that of a + b values at least
    so many more than expected, or fewer, lie in the second sample of m values."""
    if not a + b:
        return 0.0
    shares = ((a, n / (n + m)), (b, m / (n + m)))
    return sum(k * math.log(k / ((a + b) * share)) for k, share in shares if k)


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) + 0.5 * len(counts)
    return [(each + 0.5) / total for each in counts]


def _half(a: float, b: float) -> float:
    return 0.5 * a * math.log2(2 * a / (a + b))


def _chi_squared(freedom: int, above: float) -> float:
    """The value that a chi-squared variable exceeds with the probability `above` (E. B. Wilson and
    M. M. Hilferty, 1931)."""
    from statistics import NormalDist  # here: it takes 10 ms, and opening a version needs it not

    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + NormalDist().inv_cdf(1 - above) * math.sqrt(part)) ** 3)


def _changes(bins: Bins, counts: Sequence[int]) -> Iterator[str]:
    """The three kinds of values or bins whose shares changed most."""
    changed = [each for each in shares_of(bins, counts) if each.reference != each.counted]
    for each in sorted(changed, key=lambda e: -abs(e.counted - e.reference))[:3]:
        yield f"{each.name}: {_percent(each.reference)} to {_percent(each.counted)}"


def _percent(share: float) -> str:
    return f"{number(100 * share)} %"
