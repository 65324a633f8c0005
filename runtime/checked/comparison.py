"""Compute how far one output is from the reference, in numbers that a physicist can judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

import torch

from registry.bundle import Tolerance
from runtime.checked.deviation import Deviation

LAST_DECADE = 9
MOST_PAIRS = 50
_DECADES = torch.tensor(
    [10.0**i for i in range(Deviation.FIRST_DECADE, LAST_DECADE + 1)], dtype=torch.double
)
# Integers as wide as each floating type, to count units in the last place.
_INTEGER_OF = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def compare(
    found: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance, classifier: bool
) -> Deviation:
    """Measure how far `found` is from `reference`: two CPU tensors of one shape, rows first.

    The reference is first rounded to the dtype of `found`. `classifier`: compare the classes of the
    rows, too. Raises ValueError if the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(reference.shape)}")
    floating = found.is_floating_point()
    rounded = reference.to(found.dtype)
    if found.numel() == 0:
        distance = 0.0 if floating else None
        all_agree = 1.0 if classifier else None
        return Deviation(0, ulp_p50=distance, ulp_p99=distance, ulp_max=distance, argmax=all_agree)
    found64, rounded64 = found.double(), rounded.double()
    same = (found == rounded) | (found64.isnan() & rounded64.isnan())
    finite = found64.isfinite() & rounded64.isfinite()
    mismatch = ~finite & ~same
    gap = torch.where(finite, (found64 - rounded64).abs(), 0.0)
    if not floating:  # two different large int64 may be one float64: count them as 1 apart
        gap = torch.where(same, 0.0, gap.clamp_min(1.0))
    scale = torch.where(finite, rounded64.abs(), 0.0)
    outside = mismatch | (gap > tolerance.atol + tolerance.rtol * scale)
    relative = torch.where(scale > 0, gap / scale.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    worst = int((mismatch.double() if mismatch.any() else gap).argmax())
    ulp = _ulp_statistics(found, rounded, finite) if floating else _UlpStatistics()
    agreement, reclassified = _compare_classes(found64, rounded64) if classifier else (None, ())
    return Deviation(
        elements=found.numel(),
        max_abs=float(gap.max()),
        max_rel=float(relative.max()),
        outside=float(outside.double().mean()),
        nonfinite_mismatches=int(mismatch.sum()),
        ulp_p50=ulp.p50,
        ulp_p99=ulp.p99,
        ulp_max=ulp.max,
        argmax=agreement,
        worst_row=worst // max(1, found[0].numel()) if found.ndim else 0,
        ulp_bins=ulp.bins,
        error_bins=_error_bins(gap[finite]),
        reclassified=reclassified,
    )


class _UlpStatistics(NamedTuple):
    """Quantiles of the distances in units in the last place, and `Deviation.ulp_bins`.

    Integers have no such distances: the quantiles are None, and the bins are empty.
    """

    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    bins: tuple[int, ...] = ()


def _ulp_statistics(
    found: torch.Tensor, rounded: torch.Tensor, finite: torch.Tensor
) -> _UlpStatistics:
    """Summarize the distances between the finite elements of two tensors of one floating dtype."""
    distances = _ulp_distances(found, rounded, finite)
    # The exponent of frexp is 0 for 0, 1 for 1, 2 for 2 … 3, 3 for 4 … 7: the number of the bin.
    bins = tuple(torch.bincount(torch.frexp(distances).exponent).tolist())
    last = distances.numel() - 1
    if last < 0:
        return _UlpStatistics(0.0, 0.0, 0.0, bins)
    p50, p99 = float(distances[last // 2]), float(distances[round(0.99 * last)])
    return _UlpStatistics(p50, p99, float(distances[last]), bins)


def _ulp_distances(
    found: torch.Tensor, rounded: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    """Return the distances between the finite elements in units in the last place, ascending."""

    def as_ordered_integers(values: torch.Tensor) -> torch.Tensor:
        """Map floating numbers to integers in the same order, so that neighbours differ by 1.

        The bit pattern of a positive number is such an integer already. The patterns of negative
        numbers grow with the magnitude, so their order is reversed.
        """
        bits = values.contiguous().view(_INTEGER_OF[values.dtype])
        lowest = torch.iinfo(bits.dtype).min
        return torch.where(bits < 0, lowest - bits.long(), bits.long())

    ours, theirs = as_ordered_integers(found)[finite], as_ordered_integers(rounded)[finite]
    # int64 is exact, but a difference across zero may be too large for it: then take the double.
    rough = (ours.double() - theirs.double()).abs()
    distance = torch.where(rough < 2.0**62, (ours - theirs).abs().double(), rough)
    return distance.sort().values


def _error_bins(gaps: torch.Tensor) -> tuple[int, ...]:
    """Count `Deviation.error_bins`: bin 0 has the gaps of 0, each further bin those of a decade."""
    decades = torch.bucketize(gaps, _DECADES, right=True) + 1
    return tuple(torch.bincount(torch.where(gaps > 0, decades, 0)).tolist())


def _compare_classes(
    found: torch.Tensor, reference: torch.Tensor
) -> tuple[float, tuple[tuple[int, int, int], ...]]:
    """Compare the classes of the rows. The class of a row is the index of its largest element.

    Returns the fraction of rows with the same class in both, and `Deviation.reclassified`.
    """
    ours, theirs = (rows.reshape(rows.shape[0], -1).argmax(1) for rows in (found, reference))
    differ = ours != theirs
    pairs = Counter(zip(theirs[differ].tolist(), ours[differ].tolist(), strict=True))
    return float((~differ).double().mean()), _most_frequent(pairs)


def _most_frequent(pairs: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Make `Deviation.reclassified` from the number of rows of each (reference, found) pair."""
    return tuple((*pair, rows) for pair, rows in pairs.most_common(MOST_PAIRS))


def combine(cases: list[Deviation]) -> Deviation:
    """Combine the deviations of one output in several cases, of which there may be none.

    Counts are added, `outside` becomes the fraction of all elements, and of every other value the
    worst one is kept.
    """
    full = [case for case in cases if case.elements] or cases  # empty cases say nothing
    elements = sum(case.elements for case in full)
    agreements = [case.argmax for case in full if case.argmax is not None]
    pairs: Counter[tuple[int, int]] = Counter()
    for case in full:
        pairs.update({(expected, found): rows for expected, found, rows in case.reclassified})
    return Deviation(
        elements=elements,
        max_abs=max((case.max_abs for case in full), default=0.0),
        max_rel=max((case.max_rel for case in full), default=0.0),
        outside=sum(case.outside * case.elements for case in full) / max(elements, 1),
        nonfinite_mismatches=sum(case.nonfinite_mismatches for case in full),
        ulp_p50=_largest(case.ulp_p50 for case in full),
        ulp_p99=_largest(case.ulp_p99 for case in full),
        ulp_max=_largest(case.ulp_max for case in full),
        argmax=min(agreements) if agreements else None,
        ulp_bins=_sum_bins(case.ulp_bins for case in full),
        error_bins=_sum_bins(case.error_bins for case in full),
        reclassified=_most_frequent(pairs),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value, without regard to None; None if there is no other value."""
    return max((value for value in values if value is not None), default=None)


def _sum_bins(bins: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Add counts bin by bin. A tuple that is shorter than others has 0 in the missing bins."""
    return tuple(map(sum, zip_longest(*bins, fillvalue=0)))
