"""What the gates judge: what was measured of a version, and what is asked of it."""

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
    """Median time of a call, new version and version in place, measured side by side."""

    target: str
    rows: int
    new_us: float
    old_us: float

    @property
    def ratio(self) -> float:
        """Above 1: the new version is slower. NaN where a time makes no sense."""
        sane = self.old_us > 0 and self.new_us > 0
        return self.new_us / self.old_us if sane else math.nan


@dataclass(frozen=True)
class SpeedComparison:
    """All points measured against the version `old` ("name/3"); none: it could not be timed."""

    old: str
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True)
class SetResult:
    """One artifact against the portable program on a larger reference set.

    `worst` None: nothing was shown, for the reason `why`.
    """

    name: str
    target: str
    engine: str
    worst: Mapping[str, Worst] | None
    why: str = "it did not run"


@dataclass(frozen=True)
class Proof:
    """The largest fraction of an output's reference values that are NaN or infinite.

    `refusal`: why that is too much, if it is.
    """

    nonfinite: float
    limit: float
    refusal: str | None


@dataclass(frozen=True)
class Bits:
    """The digest of an artifact's answers, run in one way: `how`, for people.

    `digest` None: it was not measured, for the reason `why`. `every`: of all cases of the
    reference, else of a few rows; only digests of one kind are compared.
    """

    target: str
    engine: str
    how: str
    digest: str | None
    why: str = ""
    every: bool = False


@dataclass(frozen=True)
class SignatureCheck:
    """Whose signature is needed, and whose was found, or why it does not count."""

    needed: str
    found: str = ""
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """A number of the version, with its bounds; NaN, for the reason `why`, passes no gate.

    `old` is that of the version in place, `beside`, by the same measurement: with it a change has
    bounds too.
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
    """What was measured of one version, on the host that promotes it. NaN passes no gate."""

    manifest: Manifest
    needed: Requirements
    proof: Proof
    worst: Mapping[str, Mapping[str, Worst]]
    """Of each target that was run again now: the worst deviation of each output."""
    allow_unverified: frozenset[str] = frozenset()
    """Targets that may pass without having run, unless a policy names them."""
    sets: Sequence[SetResult] = ()
    """For each larger reference set, each target that this host runs and each engine of it."""
    speed: SpeedComparison | None = None
    """None: no other version holds the alias."""
    in_staging: timedelta | None = None
    """How long the version has been in staging by a promotion; None: it is not."""
    approved_by: Collection[str] = ()
    signature: SignatureCheck | None = None
    """None: no policy asks for one."""
    bounded: Sequence[Measured] = ()
    """Numbers whose bounds the config sets: latency, memory, size, metrics, a shadow's record."""
    bits: Sequence[Bits] = ()
    """Of each artifact of a target that this host runs, where it is asked for."""

    def waits(self, target: str) -> bool:
        """Whether a target only wants a device of its kind to prove it."""
        record = self.manifest.targets.get(target)
        return record is not None and record.status in get_args(Evidence)

    def excused(self, target: str) -> bool:
        return target in self.allow_unverified - self.needed.named_targets

    def max_outside(self, output: str) -> float:
        """The fraction of an output's elements that may lie outside its tolerance."""
        tolerance = self.manifest.tolerances.get(output)
        limits = [self.needed.max_outside, self.needed.max_outside_by_output.get(output, math.inf)]
        return min(limits if tolerance is None else [*limits, tolerance.max_outside])
