"""The gates between a version and an alias: pure functions over what was measured.

Whoever promotes measures first (opens the bundle, runs it again, times it beside the version in
place) and passes the numbers; nothing here touches a file, a device or the registry. A number that
is NaN passes no gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from registry.bundle import Manifest, Worst
from registry.errors import RegistryError
from soa.options import known_options

# What loads in production holds these too, so to let a version pass here would be of no use.
NEVER_OVERRIDDEN = frozenset({"digests", "signature"})


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


@dataclass(frozen=True)
class SetResult:
    """One artifact against the portable program on a larger set.

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
class Staging:
    """How long a version has been in staging, None if it is not, and how long it has to be."""

    found: timedelta | None
    needed: timedelta


@dataclass(frozen=True)
class Approvals:
    """Whose approvals are needed, and whose a version has."""

    needed: tuple[str, ...]
    found: Collection[str]


@dataclass(frozen=True)
class Signature:
    """Which of the keys that policies ask for signed a version; `error`: why none did."""

    needed: str
    found: str = ""
    error: str = ""


@known_options()
def decide(
    manifest: Manifest,
    *,
    targets: Collection[str],
    digest_ok: bool,
    revalidation: Mapping[str, Mapping[str, Worst] | None] | None,
    proof: Proof,
    speed: SpeedComparison | None,
    max_slowdown: float,
    max_outside: float,
    allow_unverified: frozenset[str] = frozenset(),
    named_targets: frozenset[str] = frozenset(),
    max_outside_by_output: Mapping[str, float] | None = None,
    sets: Sequence[SetResult] = (),
    staging: Staging | None = None,
    approvals: Approvals | None = None,
    signature: Signature | None = None,
) -> list[Decision]:
    """Ask every gate, also after one has refused: the user sees all of what is in the way.

    `targets`: what the version must serve. `revalidation`: per target that was run again now, the
    worst deviation of each output; a required target that is absent or None was not run, and is
    refused unless `allow_unverified` names it and no policy does (`named_targets`). `proof`: what
    the reference is worth that all were compared with. `speed`: None if no version is in place.
    `sets`: for each larger reference set and each target that this host runs. `staging`,
    `approvals`, `signature`: None where no policy asks.
    """
    limits = Limits(max_outside, max_outside_by_output or {})
    allowed = allow_unverified - named_targets
    decisions = [_digests(digest_ok)]
    if not targets:
        decisions.append(Decision("verified", False, "no target", "at least 1", _NO_TARGET))
    for target in targets:
        decisions.append(_verified(manifest, target, target in allowed, target in named_targets))
    for target in targets:
        worst = None if revalidation is None else revalidation.get(target)
        record = manifest.targets.get(target)
        excused = target in allowed and record is not None and record.status == "unverified"
        decisions.append(_tolerance(manifest, target, worst, limits, excused))
    decisions.append(_reference(proof))
    decisions += [_reference_set(manifest, result, limits) for result in sets]
    decisions.append(_speed(speed, max_slowdown))
    if staging is not None:
        decisions.append(_staging(staging))
    if approvals is not None:
        decisions.append(_approvals(approvals))
    if signature is not None:
        decisions.append(_signature(signature))
    return decisions


def check_override(gates: Iterable[str], reason: str) -> None:
    """What can be said before any gate has been asked; RegistryError."""
    named = sorted(gates)
    if named and not reason.strip():
        raise RegistryError("to override a gate takes a reason: --reason '...'")
    if fixed := [gate for gate in named if gate in NEVER_OVERRIDDEN]:
        raise RegistryError(f"the gate {fixed[0]!r} cannot be overridden")


def override(decisions: Iterable[Decision], gates: Iterable[str], reason: str) -> list[Decision]:
    """Let a version pass gates that refuse it, by their names, for a reason that is kept."""
    kept, named = list(decisions), set(gates)
    check_override(named, reason)
    there = dict.fromkeys(d.gate for d in kept if d.gate not in NEVER_OVERRIDDEN)
    if unknown := sorted(named - there.keys()):
        raise RegistryError(f"no gate {unknown[0]!r} was asked; there are: {', '.join(there)}")
    return [replace(d, override=reason) if d.gate in named and not d.passed else d for d in kept]


_NO_TARGET = "found no target to serve, at least 1 is needed"


def _digests(ok: bool) -> Decision:
    does = "has" if ok else "does not have"
    detail = f"every file {does} the digest it was sealed with"
    return Decision("digests", ok, "all match" if ok else "mismatch", "all match", detail)


def _verified(manifest: Manifest, target: str, allowed: bool, named: bool) -> Decision:
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
    advice = ""
    if record.status == "unverified":
        advice = ": run it there" + (", a policy names it" if named else ", or allow it by name")
    detail = f"{target} is {record.status}, verified is needed{advice}"
    return Decision("verified", False, record.status, "verified", detail)


@dataclass(frozen=True)
class Limits:
    """The fraction of elements that may lie outside an output's tolerance."""

    max_outside: float
    by_output: Mapping[str, float]

    def of(self, manifest: Manifest, output: str) -> float:
        tolerance = manifest.tolerances.get(output)
        limit = min(self.max_outside, self.by_output.get(output, self.max_outside))
        return limit if tolerance is None else min(limit, tolerance.max_outside)


def _tolerance(
    manifest: Manifest,
    target: str,
    worst: Mapping[str, Worst] | None,
    limits: Limits,
    excused: bool,
) -> Decision:
    if not worst and excused:
        detail = f"{target} was not run again: unverified, allowed by name"
        return Decision("tolerance", True, "not run", "unverified allowed", detail)
    if not worst:
        limit = f"outside <= {limits.max_outside:g}"
        detail = f"{target} was not run again on its reference, {limit} must be shown"
        return Decision("tolerance", False, "not run", limit, detail)
    return _within("tolerance", manifest, target, worst, limits)


def _reference(proof: Proof) -> Decision:
    found = f"not finite {proof.nonfinite:.3g}"
    limit = f"not finite <= {proof.limit:g}"
    detail = proof.refusal or f"a fraction of {proof.nonfinite:.3g} is NaN or infinite, {limit}"
    return Decision("reference", proof.refusal is None, found, limit, detail)


def _reference_set(manifest: Manifest, result: SetResult, limits: Limits) -> Decision:
    where = f"{result.target}: {result.engine} beside the portable program on {result.name}"
    if not result.worst:
        limit = f"outside <= {limits.max_outside:g}"
        detail = f"{where}: {result.why}, {limit} must be shown"
        return Decision("reference set", False, "not shown", limit, detail)
    return _within("reference set", manifest, where, result.worst, limits)


def _within(
    gate: str, manifest: Manifest, where: str, worst: Mapping[str, Worst], limits: Limits
) -> Decision:
    """The output that is worst by its own limit."""
    limit_text = f"outside <= {limits.max_outside:g}"
    if absent := sorted(manifest.tolerances.keys() - worst.keys()):
        detail = f"{where}: output {absent[0]} was not compared, {limit_text} must be shown"
        return Decision(gate, False, "not compared", limit_text, detail)
    if unknown := sorted(limits.by_output.keys() - worst.keys()):
        detail = f"{where}: there is no output {unknown[0]}, for which a policy has a limit"
        return Decision(gate, False, "no such output", limit_text, detail)
    output = _worst_of(worst, lambda name: worst[name].outside - limits.of(manifest, name))
    found, limit = worst[output], limits.of(manifest, output)
    tolerance = manifest.tolerances.get(output)
    band = "tolerance" if tolerance is None else f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    passed = found.outside <= limit  # False for NaN
    detail = (
        f"{where}: output {output} has a fraction of {found.outside:.3g} outside {band}, "
        f"limit {limit:g}; largest deviation {found.max_abs:.3g}"
    )
    return Decision(gate, passed, f"outside {found.outside:.3g}", f"outside <= {limit:g}", detail)


def _staging(staging: Staging) -> Decision:
    limit = f">= {_hours(staging.needed)}"
    if staging.found is None:
        detail = f"not in staging by a promotion, {_hours(staging.needed)} there are needed"
        return Decision("staging", False, "not in staging", limit, detail)
    passed = staging.found >= staging.needed
    found = _hours(staging.found)
    detail = f"in staging for {found}, {_hours(staging.needed)} are needed"
    return Decision("staging", passed, found, limit, detail)


def _hours(time: timedelta) -> str:
    return f"{time.total_seconds() / 3600:.3g} h"


def _approvals(approvals: Approvals) -> Decision:
    missing = [name for name in approvals.needed if name not in approvals.found]
    found = ", ".join(name for name in approvals.needed if name in approvals.found) or "none"
    needed = ", ".join(approvals.needed)
    detail = f"approved by {found}; needed: {needed}"
    if missing:
        detail += f"; missing: {', '.join(missing)} (pipeline approve)"
    return Decision("approvals", not missing, found, needed, detail)


def _signature(signature: Signature) -> Decision:
    needed = signature.needed
    if signature.error:
        return Decision("signature", False, "not as asked", needed, signature.error)
    detail = f"signed by {signature.found}"
    return Decision("signature", True, signature.found, needed, detail)


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
