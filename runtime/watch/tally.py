"""Counts of one column's values in bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.native import count_between
from soa.memory import Span, span_of

_KINDS = 6  # what is counted beside the bins: `KINDS` of profile.py
_WIDER = ("float16", "bfloat16")  # counted as float32


class Tally:
    """Counts the values of one column in the bins between edges, which ascend."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = np.array(edges, np.float64)
        self._counts = np.zeros(_KINDS + max(len(edges) - 1, 0), np.int64)
        # Arguments of `count_between`: the edges' address and number, and the counts' address.
        self._bins = (self._edges.ctypes.data, len(edges), self._counts.ctypes.data)

    def add(self, span: Span, n: int) -> None:
        """Count the first n values of a column.

        Memory of a GPU is copied first, after the work of torch's current stream.
        """
        if span.dtype in _WIDER or span.device.type != "cpu":
            span = _copy_to_cpu(span.first(n))
        count_between(span.address, span.dtype, n, *self._bins)

    def counts(self) -> list[int]:
        """Return how many values were counted: first of each of `KINDS`, then in each bin."""
        return self._counts.tolist()


def count_values(edges: Sequence[float], values: npt.NDArray[Any]) -> list[int]:
    """Count an array of values, `(n,)`, and return the result as `Tally.counts` does."""
    tally = Tally(edges)
    tally.add(_array_span(np.ascontiguousarray(values)), len(values))
    return tally.counts()


def _copy_to_cpu(span: Span) -> Span:
    """Copy the values to the CPU, and convert floats of 16 bits to float32.

    torch does both, except for float16 that is on a CPU already: NumPy converts that.
    """
    if span.device.type == "cpu" and span.dtype == "float16":
        return _array_span(span.numpy().astype(np.float32))
    values = span.tensor().cpu()
    return span_of(values.float() if span.dtype in _WIDER else values)


def _array_span(values: npt.NDArray[Any]) -> Span:
    """Return the memory of a contiguous array as a span, which keeps the array alive."""
    return Span(values.ctypes.data, values.dtype.name, values.shape, owner=values)
