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
"""A column has moved if its population stability index is larger than this. The index of a normal
distribution that moves by a tenth of its width is 0.01."""
_BY_CHANCE = 1e-4  # the probability that one of all columns is reported though nothing moved
_CHANGES_SHOWN = 3
_FEWEST = 5  # values that are expected in a bin, for the approximation by chi-squared


@dataclass(frozen=True)
class Moved:
    """The difference of one column: `psi`, the population stability index; `js`, the Jensen-Shannon
    divergence in bits, from 0 to 1.

    `values`: how many values were counted. `reference`: how many values the reference has.
    `chance`: about the index that chance alone gives at these numbers. `significant`: the
    difference is not by chance. If no column moved, and the rows are independent, the probability
    that any column is marked so is 1e-4. `changes`: the largest changes of shares, in words.
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
    """Which share of a column's values lies in one bin, or is of one of `KINDS`.

    `reference`: the share in the reference. `counted`: the share among the counted values.
    """

    name: str
    reference: float
    counted: float


def shares_of(bins: Bins, counts: Sequence[int]) -> list[Share]:
    """Return the shares of each kind and each bin, without those that have no values at all."""
    names = [*KINDS, *(f"{number(low)} to {number(high)}" for low, high in pairwise(bins.edges))]
    old_total, new_total = max(sum(bins.counts), 1), max(sum(counts), 1)
    return [
        Share(name, old / old_total, new / new_total)
        for name, old, new in zip(names, bins.counts, counts, strict=True)
        if old or new
    ]


def measure_drift(profile: Profile, counts: Counts) -> list[Moved]:
    """Measure how far each counted column moved from the reference; the largest index is first.

    Columns without values are left out. Raises LoadError if the counts have other columns or bins
    than the profile.
    """
    for key, column in counts.columns.items():
        bins = profile.columns.get(key)
        if bins is None or len(bins.counts) != len(column):
            raise LoadError(f"these are no counts of {counts.label}: its columns have other bins")
    counted = {key: column for key, column in counts.columns.items() if sum(column)}
    moved = [_measure(key, profile.columns[key], counted[key], len(counted)) for key in counted]
    return sorted(moved, key=lambda column: (-column.psi, column.column))


def _measure(key: str, bins: Bins, counts: Sequence[int], columns: int) -> Moved:
    """Measure how far the counts of one column are from those of the reference, in `bins`.

    `columns`: how many columns are judged together, for the probability of an error.
    """
    shares = list(zip(_smoothed_shares(bins.counts), _smoothed_shares(counts), strict=True))
    psi = sum((b - a) * math.log(b / a) for a, b in shares)
    js = sum(_divergence(a, b) + _divergence(b, a) for a, b in shares)
    old, new = sum(bins.counts), sum(counts)
    used_bins = sum(a + b > 0 for a, b in zip(bins.counts, counts, strict=True))
    # For samples of one distribution psi is about chi-squared, with used_bins - 1 degrees of
    # freedom, times 1 / old + 1 / new. The mean of chi-squared is its degrees of freedom.
    chance = (used_bins - 1) * (1 / max(old, 1) + 1 / new)
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
    """Whether two samples, counted in the same bins, come from different distributions.

    If they come from one distribution, the answer is wrong with a probability of at most
    `by_chance`. Half of this is for Pearson's test of all bins, which needs several values in each.
    The other half is for single bins, by the bound of H. Chernoff (1952) on the share of a bin's
    values in each sample; it holds for any number of values.
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
    """Put the bins in which few values are expected into one bin, and return all bins.

    `bins`: the counts of two samples, which have n and m values. The common bin is left out if even
    then few values are expected in it.
    """

    def has_few(a: int, b: int) -> bool:
        # Of a + b values, (a + b) * min(n, m) / (n + m) are expected in the smaller sample.
        return (a + b) * min(n, m) < _FEWEST * (n + m)

    pooled = [(a, b) for a, b in bins if not has_few(a, b)]
    rare = [(a, b) for a, b in bins if has_few(a, b)]
    common_bin = sum(a for a, _ in rare), sum(b for _, b in rare)
    return pooled if has_few(*common_bin) else [*pooled, common_bin]


def _unlikelihood(a: int, b: int, n: int, m: int) -> float:
    """Return how unlikely the counts a and b of one bin are, in two samples of one distribution.

    The samples have n and m values. Chernoff bounds the probability that the a + b values are
    divided at least so unevenly between the samples. The result is the logarithm of 1 / bound: the
    larger it is, the less likely are the counts.
    """
    if not a + b:
        return 0.0
    shares = ((a, n / (n + m)), (b, m / (n + m)))
    return sum(k * math.log(k / ((a + b) * share)) for k, share in shares if k)


def _smoothed_shares(counts: Sequence[int]) -> list[float]:
    """Return the share of each bin. Each gets half a value more, so that no share is 0."""
    total = sum(counts) + 0.5 * len(counts)
    return [(count + 0.5) / total for count in counts]


def _divergence(a: float, b: float) -> float:
    """Return what a bin adds to the Jensen-Shannon divergence, in bits, for one of its shares.

    It is half the Kullback-Leibler divergence of the share `a` from the mean of `a` and `b`.
    """
    return 0.5 * a * math.log2(2 * a / (a + b))


def _chi_squared(freedom: int, above: float) -> float:
    """Return the value that a chi-squared variable exceeds with the probability `above`.

    `freedom`: its degrees of freedom. This is the approximation of E. B. Wilson and M. M. Hilferty
    (1931): the cube root of chi-squared / freedom is about normal, with the mean 1 - variance.
    """
    from statistics import NormalDist  # here: the import takes 10 ms

    variance = 2 / (9 * freedom)
    quantile = NormalDist().inv_cdf(1 - above)
    return float(freedom * (1 - variance + quantile * math.sqrt(variance)) ** 3)


def _describe_changes(bins: Bins, counts: Sequence[int]) -> Iterator[str]:
    """Yield the largest changes of a column's shares in words, such as `0 to 1: 10 % to 25 %`."""
    changed = [share for share in shares_of(bins, counts) if share.reference != share.counted]
    changed.sort(key=lambda share: -abs(share.counted - share.reference))
    for share in changed[:_CHANGES_SHOWN]:
        yield f"{share.name}: {_percent(share.reference)} to {_percent(share.counted)}"


def _percent(share: float) -> str:
    """Return a share as text, in percent."""
    return f"{number(100 * share)} %"
