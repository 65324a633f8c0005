"""The distribution of each column of a version's reference: what the model was proven on.

A version keeps it as `reports/columns.json`. Other rows are counted in the same bins (counts.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from registry.bundle import Bundle
from runtime.errors import LoadError
from soa.files import read_plain
from soa.layout import Column
from soa.records import Record, Within, as_data, read_record
from soa.signature import Signature, offsets_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROFILE = "reports/columns.json"
"""The file in a bundle."""
BINS = 16
KINDS = ("NaN", "-infinity", "infinity", "zero", "below", "above")
"""The kinds of values that are counted beside the bins. A bin has only values that are finite and
not zero; `below` and `above` are such values outside all bins."""

Values = Annotated[int, Within(0, 10**18)]
"""A number of values."""


@dataclass(frozen=True, kw_only=True)
class Bins(Record):
    """The bins of a column: bin k has the values from `edges[k]` to below `edges[k + 1]`.

    `counts`: how many values the reference has, first of each of `KINDS`, then in each bin.
    """

    edges: list[float]
    counts: list[Values]

    def __post_init__(self) -> None:
        """Raise ValueError if edges and counts do not fit together, or the edges do not ascend."""
        super().__post_init__()
        if len(self.counts) != len(KINDS) + max(len(self.edges) - 1, 0):
            raise ValueError(f"{len(self.edges)} edges with {len(self.counts)} counts")
        if any(not a < b for a, b in pairwise([-math.inf, *self.edges])):
            raise ValueError("the edges do not ascend")


@dataclass(frozen=True, kw_only=True)
class Profile(Record):
    """The bins of each column of a version.

    A key is `collection/column`, or `collection/column[k]` for component k of an Eigen column.
    """

    schema_version: int = 1
    columns: dict[str, Bins]

    def to_json(self) -> str:
        """Return the text of the file `PROFILE`."""
        return json.dumps(as_data(self), indent=1) + "\n"


@dataclass(frozen=True)
class Component:
    """A physical column whose values are counted. `number`: which component of `column` it is."""

    collection: str
    column: Column
    number: int

    @cached_property
    def has_rows(self) -> bool:
        """False for a scalar, which has one value for all rows."""
        return self.column.kind != "scalar"

    @property
    def key(self) -> str:
        """Its key in `Profile.columns`."""
        index = f"[{self.number}]" if self.column.components > 1 else ""
        return f"{self.collection}/{self.column.name}{index}"


def components(signature: Signature) -> Iterator[Component]:
    """Yield every physical column that the model reads or writes, inputs first.

    The offsets of jagged collections are left out.
    """
    blocks = [bound.block for bound in (*signature.inputs, *signature.outputs)]
    columns = dict.fromkeys((block.collection, name) for block in blocks for name in block.columns)
    offsets = {offsets_of(name) for name in signature.jagged}
    for collection, name in columns:
        if collection in offsets:
            continue
        column = signature.layouts[collection][name]
        for number in range(column.components):
            yield Component(collection, column, number)


def make_bins(values: npt.NDArray[Any]) -> Bins:
    """Choose bins with about the same number of values in each, and count the values in them.

    If there are at most `BINS` different values, each has its own bin. `values`: `(n,)`.
    """
    import numpy as np

    from runtime.watch.tally import count_values

    finite = values[np.isfinite(values) & (values != 0)]
    starts = np.unique(finite)
    if len(starts) > BINS:
        shares = np.linspace(0, 1, BINS + 1)
        starts = np.unique(np.quantile(finite, shares, method="lower"))[:-1]
    edges = sorted({float(start) for start in starts})  # large integers may be the same float
    if edges:  # a bin ends below its upper edge: the last one must lie above the largest value
        edges.append(max(_next_larger(finite.max()), math.nextafter(edges[-1], math.inf)))
    return Bins(edges=edges, counts=count_values(edges, values))


def _next_larger(value: np.generic) -> float:
    """Return the next larger number: of the same dtype for a float, else the next integer."""
    import numpy as np

    if not isinstance(value, np.floating):
        return float(int(value) + 1)
    with np.errstate(over="ignore"):  # after the largest number comes infinity
        return float(np.nextafter(value, np.inf, dtype=value.dtype))


def has_profile(bundle: Bundle) -> bool:
    """Whether a version has a profile.

    It has none if an older release built it, or if its reference was not made of the user's rows.
    """
    return PROFILE in bundle.files


def read_profile(bundle: Bundle) -> Profile:
    """Read the profile of a version. Raises LoadError if it has none, or a damaged one."""
    if not has_profile(bundle):
        raise LoadError(
            f"{bundle.manifest.name}: this version does not say how its columns are distributed: "
            "run its config again, with rows of yours as reference (a file or a factory)"
        )
    try:
        return read_record(Profile, read_plain(bundle.file(PROFILE)))
    except (OSError, ValueError) as error:
        raise LoadError(f"{bundle.file(PROFILE)}: {error}") from error


def make_profile(pieces: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Profile:
    """Make the profile of a version from its reference.

    `pieces`: parts of the reference, each with values `(n,)` by the keys of `components`.
    """
    import numpy as np

    by_key: dict[str, list[npt.NDArray[Any]]] = {}
    for piece in pieces:
        for key, values in piece.items():
            by_key.setdefault(key, []).append(values)
    return Profile(columns={key: make_bins(np.concatenate(parts)) for key, parts in by_key.items()})
