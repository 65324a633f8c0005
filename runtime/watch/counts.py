"""Counts of a version's values in the bins of its profile. Those of many processes add up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.native import count_between
from engines.processes import Lock
from runtime.errors import LoadError
from runtime.watch.profile import Bins, Profile, components
from soa.files import read_plain
from soa.memory import Collection, Span, span_of
from soa.records import Record, as_data, read_record
from soa.signature import Signature

_WIDER = ("float16", "bfloat16")  # counted as float32

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Counts(Record):
    """Numbers of values, by the keys of a `Profile`: first those of `KINDS`, then one for each bin.

    `digest`: that of the version's bundle. `calls`: how many calls were counted.
    """

    schema_version: int = 1
    model: str
    version: str | None
    digest: str
    calls: int = 0
    columns: dict[str, list[int]]

    @property
    def label(self) -> str:
        return f"{self.model}/{self.version}" if self.version else self.model

    def plus(self, other: Counts) -> Counts:
        """The sum. LoadError if `other` counts another version."""
        if other.digest != self.digest:
            raise LoadError(
                f"counts of {other.label} ({other.digest[:12]}) beside counts of {self.label} "
                f"({self.digest[:12]}): give those of one version"
            )
        every = dict.fromkeys((*self.columns, *other.columns))
        try:
            columns = {key: _sum(self.columns.get(key), other.columns.get(key)) for key in every}
        except ValueError as error:
            raise LoadError(f"these are no counts of {self.label}: {error}") from None
        return Counts(
            model=self.model,
            version=self.version,
            digest=self.digest,
            calls=self.calls + other.calls,
            columns=columns,
        )

    def to_json(self) -> str:
        return json.dumps(as_data(self)) + "\n"


def _sum(one: Sequence[int] | None, other: Sequence[int] | None) -> list[int]:
    if one is None or other is None:
        return list(one or other or ())
    return [a + b for a, b in zip(one, other, strict=True)]


def read_counts(places: Sequence[Path], digest: str) -> Counts:
    """The sum of the counts of one version in files, and in the .json files of folders. `digest`:
    that of its bundle.

    Counts of other versions in a folder are left out. LoadError if there are no counts, or if a
    file counts another version.
    """
    found: list[Counts] = []
    for place in places:
        if place.is_dir():
            own = (_read(file) for file in sorted(place.glob("*.json")))
            found += [each for each in own if each.digest == digest]
        elif place.exists():
            found.append(_read(place))
    if not found:
        listed = ", ".join(map(str, places))
        raise LoadError(
            f"{listed}: there are no counts of this version: set PIPELINE_WATCH=0.01 where it runs"
        )
    total = sum_of(found)
    if total.digest != digest:
        raise LoadError(f"these are counts of {total.label} ({total.digest[:12]}), another version")
    return total


def _read(file: Path) -> Counts:
    try:
        return read_record(Counts, read_plain(file))
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{file}: these are no counts: {error}") from error


def sum_of(counts: Sequence[Counts]) -> Counts:
    """The sum of at least one. LoadError if they count several versions, or in other bins."""
    total, *others = counts
    for each in others:
        total = total.plus(each)
    return total


class Counter:
    """Counts the values of collections. Any number of threads may add to it."""

    def __init__(self, profile: Profile, signature: Signature) -> None:
        self._tallies = [
            (each, Tally(edges_of(profile.columns[each.key])))
            for each in components(signature)
            if each.key in profile.columns
        ]
        self._lock = Lock()
        self._calls = 0

    def add(self, memory: Mapping[str, Collection], rows: Mapping[str, int]) -> None:
        """Count the first rows of each collection, by its name; a scalar once. Memory of a GPU is
        copied, after the work of torch's current stream."""
        with self._lock:
            for each, tally in self._tallies:
                n = 1 if each.column.kind == "scalar" else rows[each.collection]
                tally.add(memory[each.collection].span(each.column.name, each.number).first(n))
            self._calls += 1

    def counts(self, model: str, version: str | None, digest: str) -> Counts:
        """What was counted so far."""
        with self._lock:
            columns = {each.key: tally.counts() for each, tally in self._tallies}
            calls = self._calls
        return Counts(model=model, version=version, digest=digest, calls=calls, columns=columns)


class Tally:
    """Counts the values of one column between edges, which ascend."""

    def __init__(self, edges: npt.NDArray[np.float64]) -> None:
        import numpy as np

        self._edges = edges
        self._raw = np.zeros(4 + len(edges), np.int64)
        """NaN, -infinity, infinity, zero, and for each edge the values below it."""
        self._all = 0

    def add(self, span: Span) -> None:
        if span.device.type != "cpu" or span.dtype in _WIDER:
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


def edges_of(bins: Bins) -> npt.NDArray[np.float64]:
    import numpy as np

    return np.array(bins.edges, np.float64)


def counted(edges: npt.NDArray[np.float64], values: npt.NDArray[Any]) -> list[int]:
    """The numbers of values, `(n,)`, as `Tally.counts`."""
    import numpy as np

    values = np.ascontiguousarray(values.astype(np.float32) if values.dtype == "f2" else values)
    tally = Tally(edges)
    tally.add(Span(values.ctypes.data, values.dtype.name, values.shape, owner=values))
    return tally.counts()
