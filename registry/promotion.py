"""The gates between a version and an alias: pure functions over what was measured.

Whoever promotes measures first (opens the bundle, runs it again, times it beside the version in
place) and passes the numbers; nothing here touches a file, a device or the registry. A number that
is NaN passes no gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from registry.manifest import Manifest, Worst

NEVER_OVERRIDDEN = frozenset({"digests"})


@dataclass(frozen=True)
class Decision:
    """One gate's answer. `found` and `limit` are for a table, `detail` is a sentence with both."""

    gate: str
    passed: bool
    found: str
    limit: str
    detail: str
    override: str = ""
    """Why somebody let the version pass all the same."""

    @property
    def lets_pass(self) -> bool:
        return self.passed or (self.override != "" and self.gate not in NEVER_OVERRIDDEN)

    @property
    def answer(self) -> str:
        if self.passed:
            return "passed"
        return "overridden" if self.lets_pass else "REFUSED"


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
    """All points measured against the version `old` ("name/3")."""

    old: str
    points: tuple[SpeedPoint, ...]


def decide(
    manifest: Manifest,
    *,
    targets: Collection[str],
    digest_ok: bool,
    revalidation: Mapping[str, Mapping[str, Worst] | None] | None,
    speed: SpeedComparison | None,
    max_slowdown: float,
    max_outside: float,
    allow_unverified: frozenset[str] = frozenset(),
) -> list[Decision]:
    """Ask every gate, also after one has refused: the user sees all of what is in the way.

    `targets`: what the version must serve. `revalidation`: per target that was run again now, the
    worst deviation of each output; a required target that is absent or None was not run, and is
    refused unless `allow_unverified` names it. `speed`: None if no version is in place.
    """
    decisions = [_digests(digest_ok)]
    if not targets:
        decisions.append(Decision("verified", False, "no target", "at least 1", _NO_TARGET))
    for target in targets:
        decisions.append(_verified(manifest, target, target in allow_unverified))
    for target in targets:
        worst = None if revalidation is None else revalidation.get(target)
        record = manifest.targets.get(target)
        excused = (
            target in allow_unverified and record is not None and record.status == "unverified"
        )
        decisions.append(_tolerance(manifest, target, worst, max_outside, excused))
    decisions.append(_speed(speed, max_slowdown))
    return decisions


_NO_TARGET = "found no target to serve, at least 1 is needed"


def _digests(ok: bool) -> Decision:
    does = "has" if ok else "does not have"
    detail = f"every file {does} the digest it was sealed with"
    return Decision("digests", ok, "all match" if ok else "mismatch", "all match", detail)


def _verified(manifest: Manifest, target: str, allowed: bool) -> Decision:
    record = manifest.targets.get(target)
    if record is None:
        detail = f"{target} is not in the bundle, which has {', '.join(manifest.targets) or 'none'}"
        return Decision("verified", False, "absent", "verified", detail)
    if record.status == "verified":
        detail = f"{target} is verified ({record.chosen})"
        return Decision("verified", True, "verified", "verified", detail)
    if record.status == "unverified" and allowed:
        detail = f"{target} is unverified: no device of this kind has run it; allowed by name"
        return Decision("verified", True, "unverified", "unverified allowed", detail)
    advice = ": run it there, or allow it by name" if record.status == "unverified" else ""
    detail = f"{target} is {record.status}, verified is needed{advice}"
    return Decision("verified", False, record.status, "verified", detail)


def _tolerance(
    manifest: Manifest,
    target: str,
    worst: Mapping[str, Worst] | None,
    max_outside: float,
    excused: bool,
) -> Decision:
    limit_text = f"outside <= {max_outside:g}"
    if not worst and excused:
        detail = f"{target} was not run again: unverified, allowed by name"
        return Decision("tolerance", True, "not run", "unverified allowed", detail)
    if not worst:
        detail = f"{target} was not run again on its reference, {limit_text} must be shown"
        return Decision("tolerance", False, "not run", limit_text, detail)
    if absent := sorted(manifest.tolerances.keys() - worst.keys()):
        detail = f"{target}: output {absent[0]} was not compared, {limit_text} must be shown"
        return Decision("tolerance", False, "not compared", limit_text, detail)

    def limit_of(output: str) -> float:
        tolerance = manifest.tolerances.get(output)
        return max_outside if tolerance is None else min(max_outside, tolerance.max_outside)

    output = _worst_of(worst, lambda name: worst[name].outside - limit_of(name))
    found, limit, tolerance = worst[output], limit_of(output), manifest.tolerances.get(output)
    band = "tolerance" if tolerance is None else f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    passed = found.outside <= limit  # False for NaN
    detail = (
        f"{target}: output {output} has a fraction of {found.outside:.3g} outside {band}, "
        f"limit {limit:g}; largest deviation {found.max_abs:.3g}"
    )
    found_text = f"outside {found.outside:.3g}"
    return Decision("tolerance", passed, found_text, f"outside <= {limit:g}", detail)


def _speed(speed: SpeedComparison | None, max_slowdown: float) -> Decision:
    limit = f"ratio <= {max_slowdown:g}"
    if speed is None:
        detail = f"no version in place to compare with, limit {max_slowdown:g} times its time"
        return Decision("speed", True, "no version in place", limit, detail)
    if not speed.points:
        detail = f"not measured beside {speed.old}, limit {max_slowdown:g} times its time"
        return Decision("speed", False, "not measured", limit, detail)
    points = {f"{p.target} at n={p.rows}": p for p in speed.points}
    name = _worst_of(points, lambda key: points[key].ratio)
    worst = points[name]
    detail = (
        f"{name}: median {worst.new_us:.4g} us against {worst.old_us:.4g} us of {speed.old}, "
        f"ratio {worst.ratio:.3g}, limit {max_slowdown:g}"
    )
    passed = worst.ratio <= max_slowdown  # False for NaN
    return Decision("speed", passed, f"ratio {worst.ratio:.3g}", limit, detail)


def _worst_of(names: Iterable[str], badness: Callable[[str], float]) -> str:
    """The name with the largest badness; NaN is worse than any number."""
    return max(names, key=lambda name: (math.isnan(badness(name)), badness(name)))
