"""Count values between edges, in memory that does not grow with the number of values.

A stored histogram is read without NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from soa.text import number

if TYPE_CHECKING:
    import numpy.typing as npt

BINS = 40
_AT_ONCE = 1 << 18  # values that are counted at once, which bounds the memory for their copies


@dataclass(frozen=True)
class Histogram:
    """Bins of equal width from `low` to `high`, and the counts below and above.

    `least`, `largest` and `total` are over all finite values.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0
    nonfinite: int = 0
    least: float = math.inf
    largest: float = -math.inf
    total: float = 0.0

    @classmethod
    def over(cls, values: npt.NDArray[Any], tail: float = 0.0) -> Histogram:
        """An empty histogram whose bins suit `values`; the values themselves are not counted.

        The edges are the quantiles `tail` and 1 - `tail` of the finite values. If both quantiles
        lie between 0 and 1 and are more than 0.5 apart, as those of scores are, the edges are 0 and
        1 instead.
        """
        import numpy as np

        low, high = 0.0, 1.0
        finite = values[np.isfinite(values)].astype(np.float64)
        if finite.size:
            low, high = map(float, np.quantile(finite, (tail, 1 - tail)))
        if low >= 0 and high <= 1 and high - low > 0.5:
            low, high = 0.0, 1.0
        if not 0 < high - low < math.inf:  # one value only, or a width that overflows
            margin = max(0.5, abs(low) / 10)
            low, high = low - margin, low + margin
        return cls(low, high, (0,) * BINS)

    def plus(self, values: npt.NDArray[Any]) -> Histogram:
        """A new histogram that also counts `values`, an array of any shape."""
        counted = self
        flat = values.reshape(-1)
        for start in range(0, len(flat), _AT_ONCE):
            counted = counted._plus_piece(flat[start : start + _AT_ONCE])
        return counted

    def _plus_piece(self, values: npt.NDArray[Any]) -> Histogram:
        """A new histogram that also counts at most `_AT_ONCE` values, `(n,)`."""
        import numpy as np

        wide = values.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        if not finite.size:
            return replace(self, nonfinite=self.nonfinite + wide.size)
        counts, _ = np.histogram(finite, len(self.counts), (self.low, self.high))
        return Histogram(
            self.low,
            self.high,
            counts=tuple(np.add(self.counts, counts).tolist()),
            below=self.below + int((finite < self.low).sum()),
            above=self.above + int((finite > self.high).sum()),
            nonfinite=self.nonfinite + wide.size - finite.size,
            least=min(self.least, float(finite.min())),
            largest=max(self.largest, float(finite.max())),
            total=self.total + float(finite.sum()),
        )

    @property
    def finite(self) -> int:
        """The number of finite values that were counted, including those outside the bins."""
        return sum(self.counts) + self.below + self.above

    @property
    def mean(self) -> float:
        """The mean of all finite values; NaN without any."""
        return self.total / self.finite if self.finite else math.nan

    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + i * width for i in range(len(self.counts) + 1)]

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each group of values that lies in no bin: those below, those above,
        and those that are not finite."""
        for count, where in (
            (self.below, f"below {number(self.low)}"),
            (self.above, f"above {number(self.high)}"),
            (self.nonfinite, "NaN or infinite"),
        ):
            if count:
                yield f"{count:,} {'value is' if count == 1 else 'values are'} {where}"
