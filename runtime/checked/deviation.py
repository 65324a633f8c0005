"""The record of how far one output was from the reference; reading it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Deviation:
    """How far one output was from the reference, over all its elements.

    `ulp_*` are quantiles of the distance in units in the last place of the output's dtype (None for
    integers). `outside` is the fraction of elements that are out of tolerance. `argmax` is the
    fraction of rows whose largest element is in the same place (None if the model is no
    classifier). `worst_row` is the row of `max_abs`, or of the first NaN or infinity that the
    reference does not have.
    """

    FIRST_DECADE: ClassVar = -18
    """The power of ten at which the first decade of `error_bins` begins."""

    elements: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    outside: float = 0.0
    nonfinite_mismatches: int = 0
    ulp_p50: float | None = None
    ulp_p99: float | None = None
    ulp_max: float | None = None
    argmax: float | None = None
    worst_row: int | None = None
    ulp_bins: tuple[int, ...] = ()
    """How many elements differ by 0, 1, 2 … 3, 4 … 7 and so on units in the last place. Empty for
    integers, and in reports of earlier releases."""
    error_bins: tuple[int, ...] = ()
    """How many finite elements differ by 0, by less than 1e-18, and by each power of ten from there
    to 1e9. Empty in reports of earlier releases."""
    reclassified: tuple[tuple[int, int, int], ...] = ()
    """For a classifier: the reference's class, the class found instead, and the number of such
    rows; the most frequent pairs only."""
