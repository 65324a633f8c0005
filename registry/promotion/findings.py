"""The input of the gates: the measurements on a version, and the requirements."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import get_args

from registry.bundle import Evidence, Manifest, Worst
from registry.promotion.policy import Requirements


@dataclass(frozen=True)
class SpeedPoint:
    """The median time of a call of the new version and of the one that holds the alias.

    Both in microseconds, for calls of `rows` rows that were measured in turns.
    """

    target: str
    rows: int
    new_us: float
    old_us: float

    @property
    def ratio(self) -> float:
        """The new time relative to the old one: above 1 if slower. NaN if one is not positive."""
        positive = self.old_us > 0 and self.new_us > 0
        return self.new_us / self.old_us if positive else math.nan


@dataclass(frozen=True)
class SpeedComparison:
    """All points measured against the version `old` ("name/3"); none if timing was impossible."""

    old: str
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True)
class SetResult:
    """The comparison of one artifact with the portable program on a larger reference set.

    If `worst` is None, there is no result, for the reason `why`.
    """

    name: str
    target: str
    engine: str
    worst: Mapping[str, Worst] | None
    why: str = "it did not run"


@dataclass(frozen=True)
class Proof:
    """How well the reference tests the model.

    `nonfinite`: the largest fraction of an output's values that are NaN or infinite. `refusal`: the
    reason if this fraction is too large, else None.
    """

    nonfinite: float
    limit: float
    refusal: str | None


@dataclass(frozen=True)
class Bits:
    """The digest of an artifact's outputs when it runs in one way; `how` describes the way.

    If `digest` is None, it was not measured, for the reason `why`. `every`: True for the digest of
    all cases of the reference, False for a few rows; only digests of the same kind are compared.
    """

    target: str
    engine: str
    how: str
    digest: str | None
    why: str = ""
    every: bool = False


@dataclass(frozen=True)
class SignatureCheck:
    """The required keys, and the key that signed, or the error if the signature is not valid."""

    needed: str
    found: str = ""
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """A number of the version, with its bounds. NaN passes no gate; `why` is the reason for it.

    `old`: the same number of the version `beside`, which holds the alias; `max_drop` and `max_rise`
    limit the change.
    """

    gate: str
    what: str
    value: float
    min: float | None = None
    max: float | None = None
    beside: str = ""
    old: float = math.nan
    max_drop: float | None = None
    max_rise: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Findings:
    """The measurements on one version, on the host that promotes it. NaN passes no gate."""

    manifest: Manifest
    needed: Requirements
    proof: Proof
    worst: Mapping[str, Mapping[str, Worst]]
    """The worst deviation of each output, by target that was run again now."""
    allow_unverified: frozenset[str] = frozenset()
    """Targets that may pass without having run, unless a policy names them."""
    sets: Sequence[SetResult] = ()
    """A result for each larger reference set, each target that this host runs, and its engines."""
    speed: SpeedComparison | None = None
    """None if no other version holds the alias."""
    in_staging: timedelta | None = None
    """The time since the version was promoted to staging; None if it is not there by promotion."""
    approved_by: Collection[str] = ()
    signature: SignatureCheck | None = None
    """None if no policy requires a signature."""
    bounded: Sequence[Measured] = ()
    """Numbers whose bounds the config sets: latency, memory, size, metrics, a shadow's record."""
    bits: Sequence[Bits] = ()
    """Results for each artifact that this host runs, if reproducibility is required."""

    def needs_a_device(self, target: str) -> bool:
        """Return whether a target is built, and only needs a test on a device of its kind."""
        record = self.manifest.targets.get(target)
        return record is not None and record.status in get_args(Evidence)

    def is_excused(self, target: str) -> bool:
        """Return whether a target may pass without having run on a device of its kind."""
        return target in self.allow_unverified - self.needed.named_targets

    def max_outside(self, output: str) -> float:
        """Return the fraction of an output's elements that may lie outside its tolerance.

        It is the smallest of all limits: the requirements' and the manifest's.
        """
        tolerance = self.manifest.tolerances.get(output)
        limits = [self.needed.max_outside, self.needed.max_outside_by_output.get(output, math.inf)]
        return min(limits if tolerance is None else [*limits, tolerance.max_outside])
