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
    old_total, new_total = max(sum(bins.counts), 1), max(sum(counts), 1)
    return [
        Share(name, old / old_total, new / new_total)
        for name, old, new in zip(names, bins.counts, counts, strict=True)
        if old or new
    ]


def measure_drift(profile: Profile, counts: Counts) -> list[Moved]:
    """The difference of each column with values, the largest first. LoadError if the counts are not
    in the bins of this profile."""
    for key, column in counts.columns.items():
        bins = profile.columns.get(key)
        if bins is None or len(bins.counts) != len(column):
            raise LoadError(f"these are no counts of {counts.label}: its columns have other bins")
    counted = {key: column for key, column in counts.columns.items() if sum(column)}
    differences = [
        _measure_column(key, profile.columns[key], counted[key], len(counted)) for key in counted
    ]
    return sorted(differences, key=lambda moved: (-moved.psi, moved.column))


def _measure_column(key: str, bins: Bins, counts: Sequence[int], columns: int) -> Moved:
    """How far the counts of a column are from the reference's bins. `columns`: how many columns are
    judged together."""
    shares = list(zip(_smoothed_shares(bins.counts), _smoothed_shares(counts), strict=True))
    psi = sum((b - a) * math.log(b / a) for a, b in shares)
    js = sum(_divergence(a, b) + _divergence(b, a) for a, b in shares)
    old, new = sum(bins.counts), sum(counts)
    used = sum(a + b > 0 for a, b in zip(bins.counts, counts, strict=True))
    # For samples of one distribution psi is about chi-squared, with used - 1 degrees of freedom,
    # times 1 / old + 1 / new; this is the mean.
    chance = (used - 1) * (1 / max(old, 1) + 1 / new)
    significant = _differ_significantly(bins.counts, counts, _BY_CHANCE / columns)
    return Moved(
        key,
        psi,
        js=js,
        chance=chance,
        significant=significant,
        values=new,
        reference=old,
        changes=tuple(_describe_changes(bins, counts)),
    )


def _differ_significantly(first: Sequence[int], second: Sequence[int], by_chance: float) -> bool:
    """Whether two samples, counted in the same bins, come from different distributions. If they do
    not, the answer is wrong with at most the probability `by_chance`.

    Half of it is for Pearson's test. The other half is for single bins: of its values, the share in
    each sample is bounded by H. Chernoff (1952), which holds for any number.
    """
    n, m = sum(first), sum(second)
    if not n or not m:
        return False
    bins = list(zip(first, second, strict=True))
    pooled = _pool_rare_bins(bins, n, m)
    # Pearson's statistic: the sum of (found - expected)**2 / expected over both samples.
    squares = sum((m * a - n * b) ** 2 / (a + b) for a, b in pooled) / (n * m)
    if len(pooled) > 1 and squares > _chi_squared(len(pooled) - 1, by_chance / 2):
        return True
    largest = max(_unlikelihood(a, b, n, m) for a, b in bins)
    # The bound is tried for each bin and on both sides: 2 * len(bins) times.
    return largest > math.log(4 * len(bins) / by_chance)


def _pool_rare_bins(bins: Sequence[tuple[int, int]], n: int, m: int) -> list[tuple[int, int]]:
    """The counts of two samples of n and m values, with the bins in which few values are expected
    taken together; left out if even together they have few."""

    def has_few(a: int, b: int) -> bool:  # the smaller sample expects (a + b) * min / (n + m)
        return (a + b) * min(n, m) < _FEWEST * (n + m)

    pooled = [(a, b) for a, b in bins if not has_few(a, b)]
    few = [(a, b) for a, b in bins if has_few(a, b)]
    rest = sum(a for a, _ in few), sum(b for _, b in few)
    return pooled if has_few(*rest) else [*pooled, rest]


def _unlikelihood(a: int, b: int, n: int, m: int) -> float:
    """How unlikely the counts a and b of one bin are, in samples of n and m values of the same
    distribution: the logarithm of the reciprocal of Chernoff's bound for the probability that of
    the a + b values at least so many more than expected, or fewer, lie in the second sample."""
    if not a + b:
        return 0.0
    shares = ((a, n / (n + m)), (b, m / (n + m)))
    return sum(k * math.log(k / ((a + b) * share)) for k, share in shares if k)


def _smoothed_shares(counts: Sequence[int]) -> list[float]:
    """The share of each bin, with half a value more in each."""
    total = sum(counts) + 0.5 * len(counts)
    return [(count + 0.5) / total for count in counts]


def _divergence(a: float, b: float) -> float:
    """Half the Kullback-Leibler divergence, in bits, of a share a from the mean of a and b."""
    return 0.5 * a * math.log2(2 * a / (a + b))


def _chi_squared(freedom: int, above: float) -> float:
    """The value that a chi-squared variable exceeds with the probability `above` (E. B. Wilson and
    M. M. Hilferty, 1931)."""
    from statistics import NormalDist  # here: it takes 10 ms, and opening a version needs it not

    # The cube root of chi-squared / freedom is about normal, around 1 - variance.
    variance = 2 / (9 * freedom)
    quantile = NormalDist().inv_cdf(1 - above)
    return float(freedom * (1 - variance + quantile * math.sqrt(variance)) ** 3)


def _describe_changes(bins: Bins, counts: Sequence[int]) -> Iterator[str]:
    """The three kinds of values or bins whose shares changed most."""
    changed = [share for share in shares_of(bins, counts) if share.reference != share.counted]
    changed.sort(key=lambda share: -abs(share.counted - share.reference))
    for share in changed[:3]:
        yield f"{share.name}: {_percent(share.reference)} to {_percent(share.counted)}"


def _percent(share: float) -> str:
    """A share in percent, as text."""
    return f"{number(100 * share)} %"
