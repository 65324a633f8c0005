"""Counts of one column's values between edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.native import count_between
from soa.memory import Span, span_of

_WIDER = ("float16", "bfloat16")  # counted as float32


class Tally:
    """Counts the values of one column between edges, which ascend."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = np.array(edges, np.float64)
        self._raw = np.zeros(4 + len(edges), np.int64)
        """NaN, -infinity, infinity, zero, and for each edge the values below it."""
        self._all = 0

    def add(self, span: Span) -> None:
        if span.device.type == "cpu" and span.dtype == "float16":
            span = _of_array(span.numpy().astype(np.float32))
        elif span.device.type != "cpu" or span.dtype in _WIDER:
            values = span.tensor().cpu()
            span = span_of(values.float() if span.dtype in _WIDER else values)
        (n,) = span.shape
        count_between(
            span.address, span.dtype, n, self._edges.ctypes.data, len(self._edges),
            self._raw.ctypes.data,
        )  # fmt: skip
        self._all += n

    def counts(self) -> list[int]:
        """The numbers of values: those of `KINDS`, then one for each bin."""
        nan, low, high, zero, *below = self._raw.tolist()
        # Below each edge, without -infinity and zeros, which are counted apart.
        own = [
            b - low - (zero if edge > 0 else 0) for b, edge in zip(below, self._edges, strict=True)
        ]
        finite = self._all - nan - low - high - zero
        outside = (own[0], finite - own[-1]) if own else (0, finite)
        return [nan, low, high, zero, *outside, *(b - a for a, b in pairwise(own))]


def counted(edges: Sequence[float], values: npt.NDArray[Any]) -> list[int]:
    """The numbers of values, `(n,)`, as `Tally.counts`."""
    tally = Tally(edges)
    tally.add(_of_array(np.ascontiguousarray(values)))
    return tally.counts()


def _of_array(values: npt.NDArray[Any]) -> Span:
    return Span(values.ctypes.data, values.dtype.name, values.shape, owner=values)
