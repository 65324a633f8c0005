"""Counts of a version's values in the bins of its profile. Counts of many processes add up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.processes import Lock
from runtime.errors import LoadError
from runtime.watch.profile import Profile, Values, components
from runtime.watch.tally import Tally
from soa.files import read_plain
from soa.memory import Collection
from soa.records import Record, as_data, read_record
from soa.signature import Signature


@dataclass(frozen=True, kw_only=True)
class Counts(Record):
    """How many values each column had in each bin, while a session ran.

    `columns` has the keys of `Profile.columns`. Each list has first a count for each of `KINDS`,
    then one for each bin. `digest`: the digest of the version's bundle. `calls`: how many calls
    were counted.
    """

    schema_version: int = 1
    model: str
    version: str | None
    digest: str
    calls: Values = 0
    columns: dict[str, list[Values]]

    @property
    def label(self) -> str:
        """The version's name in messages: `name/3`, or only the model's name."""
        return f"{self.model}/{self.version}" if self.version else self.model

    def plus(self, other: Counts) -> Counts:
        """Return the sum of both. Raises LoadError if `other` counts another version."""
        if other.digest != self.digest:
            raise LoadError(
                f"counts of {other.label} ({other.digest[:12]}) beside counts of {self.label} "
                f"({self.digest[:12]}): give those of one version"
            )
        keys = dict.fromkeys((*self.columns, *other.columns))
        try:
            columns = {key: _add(self.columns.get(key), other.columns.get(key)) for key in keys}
            return replace(self, calls=self.calls + other.calls, columns=columns)
        except ValueError as error:
            raise LoadError(f"these are no counts of {self.label}: {error}") from None

    def to_json(self) -> str:
        """Return the text of a file of counts, which `read_counts` can read."""
        return json.dumps(as_data(self)) + "\n"


def _add(first: Sequence[int] | None, second: Sequence[int] | None) -> list[int]:
    """Add two counts of one column, bin by bin. None stands for a column without counts.

    Raises ValueError if the numbers of bins differ.
    """
    if first is None or second is None:
        return list(first or second or ())
    return [a + b for a, b in zip(first, second, strict=True)]


def read_counts(places: Sequence[Path], digest: str) -> Counts:
    """Read and add all counts of one version.

    `places`: files of counts, or folders whose `.json` files are read. `digest`: the digest of the
    version's bundle. Counts of other versions in a folder are left out. Raises LoadError if there
    are no counts, or if a file that is named counts another version.
    """
    counts_by_file: dict[Path, Counts] = {}
    for place in places:
        if place.is_dir():
            for file in sorted(place.glob("*.json")):
                counts = _read_file(file)
                if counts.digest == digest:
                    counts_by_file[file.resolve()] = counts
        elif place.exists() or place.suffix or len(places) > 1:
            counts_by_file[place.resolve()] = _read_file(place)
    if not counts_by_file:
        listed = ", ".join(map(str, places))
        raise LoadError(
            f"{listed}: there are no counts of this version: set PIPELINE_WATCH=0.01 where it runs"
        )
    total = add_counts([*counts_by_file.values()])
    if total.digest != digest:
        raise LoadError(f"these are counts of {total.label} ({total.digest[:12]}), another version")
    return total


def _read_file(file: Path) -> Counts:
    """Read the counts in one file. Raises LoadError if it has none, or cannot be read."""
    try:
        return read_record(Counts, read_plain(file))
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{file}: these are no counts: {error}") from error


def add_counts(counts: Sequence[Counts]) -> Counts:
    """Add at least one `Counts`. Raises LoadError if they differ in the version or the bins."""
    total, *others = counts
    for other in others:
        total = total.plus(other)
    return total


class Counter:
    """Counts the values of a model's collections in bins. Any number of threads may add to it."""

    def __init__(self, profile: Profile, signature: Signature) -> None:
        """Begin with no counts. Columns that the profile does not have are not counted."""
        self._tallies = [
            (component, Tally(profile.columns[component.key].edges))
            for component in components(signature)
            if component.key in profile.columns
        ]
        self._lock = Lock()
        self._calls = 0

    def add(self, memory: Mapping[str, Collection], rows: Mapping[str, int]) -> None:
        """Count the values of one call.

        `memory`: the collections by name. `rows`: for each name, how many of the first rows count;
        a scalar counts once. Memory of a GPU is copied, after the work of torch's current stream.
        """
        with self._lock:
            for component, tally in self._tallies:
                n = rows[component.collection] if component.has_rows else 1
                collection = memory[component.collection]
                tally.add(collection.span(component.column.name, component.number), n)
            self._calls += 1

    def counts(self, model: str, version: str | None, digest: str) -> Counts:
        """Return what was counted so far, as the counts of this version."""
        with self._lock:
            columns = {component.key: tally.counts() for component, tally in self._tallies}
            calls = self._calls
        return Counts(model=model, version=version, digest=digest, calls=calls, columns=columns)
