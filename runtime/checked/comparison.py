"""Compute how far one output is from the reference, in numbers that a physicist can judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

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
    """Compare two CPU tensors of one shape. The reference is first rounded to the dtype of
    `found`."""
    if found.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(reference.shape)}")
    floating = found.is_floating_point()
    rounded = reference.to(found.dtype)
    if found.numel() == 0:
        ulp = 0.0 if floating else None
        agreement = 1.0 if classifier else None
        return Deviation(0, ulp_p50=ulp, ulp_p99=ulp, ulp_max=ulp, argmax=agreement)
    a, b = found.double(), rounded.double()
    same = (found == rounded) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    mismatch = ~finite & ~same
    gap = torch.where(finite, (a - b).abs(), 0.0)
    if not floating:  # different large int64 may be the same float64
        gap = torch.where(same, 0.0, gap.clamp_min(1.0))
    outside = mismatch | (gap > tolerance.atol + tolerance.rtol * torch.where(finite, b.abs(), 0.0))
    scale = torch.where(finite, b.abs(), 0.0)
    relative = torch.where(scale > 0, gap / scale.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    worst = int((mismatch.double() if mismatch.any() else gap).argmax())
    quantiles: tuple[float | None, ...] = (None, None, None)
    bins: tuple[int, ...] = ()
    if floating:
        distances = _ulp_distances(found, rounded, finite)
        quantiles, bins = _quantiles(distances), _bins(distances)
    agreement, reclassified = _classes(a, b) if classifier else (None, ())
    return Deviation(
        elements=found.numel(),
        max_abs=float(gap.max()),
        max_rel=float(relative.max()),
        outside=float(outside.double().mean()),
        nonfinite_mismatches=int(mismatch.sum()),
        ulp_p50=quantiles[0],
        ulp_p99=quantiles[1],
        ulp_max=quantiles[2],
        argmax=agreement,
        worst_row=worst // max(1, found[0].numel()) if found.ndim else 0,
        ulp_bins=bins,
        error_bins=_error_bins(gap[finite]),
        reclassified=reclassified,
    )


def _ulp_distances(
    found: torch.Tensor, rounded: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    """Distances in units in the last place between the finite elements, ascending."""

    def ordered(values: torch.Tensor) -> torch.Tensor:
        """Bit patterns as integers whose order is the order of the values."""
        bits = values.contiguous().view(_INTEGER_OF[values.dtype])
        lowest = torch.iinfo(bits.dtype).min
        return torch.where(bits < 0, lowest - bits.long(), bits.long())

    ours, theirs = ordered(found)[finite], ordered(rounded)[finite]
    # Exact if int64 holds the difference; across zero the difference may be too large for it.
    rough = (ours.double() - theirs.double()).abs()
    distance = torch.where(rough < 2.0**62, (ours - theirs).abs().double(), rough)
    return distance.sort().values


def _quantiles(values: torch.Tensor) -> tuple[float, float, float]:
    last = values.numel() - 1
    if last < 0:
        return (0.0, 0.0, 0.0)
    return (float(values[last // 2]), float(values[round(0.99 * last)]), float(values[last]))


def _bins(values: torch.Tensor) -> tuple[int, ...]:
    """The counts of Deviation.ulp_bins; frexp gives the power of two above a number."""
    return tuple(torch.bincount(torch.frexp(values).exponent).tolist())


def _error_bins(gaps: torch.Tensor) -> tuple[int, ...]:
    """The counts of Deviation.error_bins."""
    decades = torch.bucketize(gaps, _DECADES, right=True) + 1
    return tuple(torch.bincount(torch.where(gaps > 0, decades, 0)).tolist())


def _classes(a: torch.Tensor, b: torch.Tensor) -> tuple[float, tuple[tuple[int, int, int], ...]]:
    """The fraction of rows that have the same class in both, and Deviation.reclassified."""
    found, wanted = (rows.reshape(rows.shape[0], -1).argmax(1) for rows in (a, b))
    differ = found != wanted
    pairs = Counter(zip(wanted[differ].tolist(), found[differ].tolist(), strict=True))
    return float((~differ).double().mean()), _most(pairs)


def _most(pairs: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((*pair, rows) for pair, rows in pairs.most_common(MOST_PAIRS))


def combine(parts: list[Deviation]) -> Deviation:
    """Combine the cases of one output, of which there may be none.

    Counts are added, and `outside` is for all elements. Of every other value the worst is kept.
    """
    full = [p for p in parts if p.elements] or parts
    elements = sum(p.elements for p in full)

    def worst(name: str) -> float | None:
        values = [getattr(p, name) for p in full if getattr(p, name) is not None]
        return max(values) if values else None

    agreements = [p.argmax for p in full if p.argmax is not None]
    pairs: Counter[tuple[int, int]] = Counter()
    for part in full:
        pairs.update({(wanted, found): rows for wanted, found, rows in part.reclassified})

    def summed(bins: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*bins, fillvalue=0)))

    return Deviation(
        elements=elements,
        max_abs=max((p.max_abs for p in full), default=0.0),
        max_rel=max((p.max_rel for p in full), default=0.0),
        outside=sum(p.outside * p.elements for p in full) / max(elements, 1),
        nonfinite_mismatches=sum(p.nonfinite_mismatches for p in full),
        ulp_p50=worst("ulp_p50"),
        ulp_p99=worst("ulp_p99"),
        ulp_max=worst("ulp_max"),
        argmax=min(agreements) if agreements else None,
        ulp_bins=summed(p.ulp_bins for p in full),
        error_bins=summed(p.error_bins for p in full),
        reclassified=_most(pairs),
    )
