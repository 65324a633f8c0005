"""The gates between a version and an alias: pure functions of what was measured.

Each gate is a function in `GATES`. It yields a decision for each requirement, and none if there
is no requirement. Gates use no files, no devices and no registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from registry.bundle import Worst
from registry.promotion.decision import Decision
from registry.promotion.findings import Bits, Findings, Measured
from soa.text import microseconds, number


def decide(found: Findings) -> list[Decision]:
    """The decisions of all gates, also after one has refused: the user sees every obstacle."""
    return [decision for gate in GATES for decision in gate(found)]


def digests(found: Findings) -> Iterable[Decision]:
    """Is every file as it was when the bundle was sealed?

    Always passes: an altered bundle cannot be opened, so it never comes here; see `altered`.
    """
    detail = "every file has the digest it was sealed with"
    yield Decision("digests", True, "all match", "all match", detail)


def altered(why: str) -> Decision:
    """The only decision on a bundle that could not be opened."""
    return Decision("digests", False, "altered", "as sealed", why)


def verified(found: Findings) -> Iterable[Decision]:
    """Has each required target run on a device of its kind?"""
    if not found.needed.targets:
        detail = "found no target to serve, at least 1 is needed"
        yield Decision("verified", False, "no target", "at least 1", detail)
    for target in found.needed.targets:
        yield _verified(found, target)


def _verified(found: Findings, target: str) -> Decision:
    """Whether a target ran on a device of its kind, or may go without."""
    record = found.manifest.targets.get(target)
    if record is None:
        have = ", ".join(found.manifest.targets) or "none"
        detail = f"{target} is not in the bundle, which has {have}"
        return Decision("verified", False, "absent", "verified", detail)
    if record.status == "verified":
        detail = f"{target} is verified ({record.chosen})"
        return Decision("verified", True, "verified", "verified", detail)
    if found.waits(target) and found.excused(target):
        detail = f"{target} is {record.status}: no device of this kind has run it; allowed by name"
        return Decision("verified", True, record.status, "unverified allowed", detail)
    if record.status == "emulated" and not found.needed.production:
        detail = f"{target} is emulated: it gave the reference's answers on an emulator"
        return Decision("verified", True, "emulated", "emulated", detail)
    advice = ""
    if found.waits(target):
        named = target in found.needed.named_targets
        advice = ": run it there" + (", a policy names it" if named else ", or allow it by name")
    detail = f"{target} is {record.status}, verified is needed{advice}"
    return Decision("verified", False, record.status, "verified", detail)


def tolerance(found: Findings) -> Iterable[Decision]:
    """Do the outputs of each required target, run again now, agree with the reference?"""
    for target in found.needed.targets:
        record = found.manifest.targets.get(target)
        limit = f"outside <= {found.needed.max_outside:g}"
        if worst := found.worst.get(target):
            yield _within("tolerance", target, worst, found)
        elif record and found.waits(target) and found.excused(target):
            detail = f"{target} was not run again: {record.status}, allowed by name"
            yield Decision("tolerance", True, "not run", "unverified allowed", detail)
        elif record and record.status == "emulated" and not found.needed.production:
            candidate = record.candidates[str(record.chosen)]
            yield _within("tolerance", f"{target} on an emulator", candidate.worst, found)
        else:
            detail = f"{target} was not run again on its reference, {limit} must be shown"
            yield Decision("tolerance", False, "not run", limit, detail)


def _within(gate: str, where: str, worst: Mapping[str, Worst], found: Findings) -> Decision:
    """Decide by the output that exceeds its limit the most."""
    text = f"outside <= {found.needed.max_outside:g}"
    if absent := sorted(found.manifest.tolerances.keys() - worst.keys()):
        detail = f"{where}: output {absent[0]} was not compared, {text} must be shown"
        return Decision(gate, False, "not compared", text, detail)
    if unknown := sorted(found.needed.max_outside_by_output.keys() - worst.keys()):
        detail = f"{where}: there is no output {unknown[0]}, for which a policy has a limit"
        return Decision(gate, False, "no such output", text, detail)
    excess = {name: each.outside - found.max_outside(name) for name, each in worst.items()}
    output = max(excess, key=lambda name: (math.isnan(excess[name]), excess[name]))
    limit, tolerance = found.max_outside(output), found.manifest.tolerances.get(output)
    band = "tolerance" if tolerance is None else f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    outside = worst[output].outside
    detail = (
        f"{where}: output {output} has a fraction of {number(outside)} outside {band}, "
        f"limit {limit:g}; largest deviation {number(worst[output].max_abs)}"
    )
    passed = outside <= limit  # False for NaN
    return Decision(gate, passed, f"outside {number(outside)}", f"outside <= {limit:g}", detail)


_SAME_BITS = "the same bits"


def reproducible(found: Findings) -> Iterable[Decision]:
    """Does each artifact give the same bits in all measured ways to run it?"""
    if not found.needed.reproducible:
        return
    known: dict[tuple[str, bool], tuple[str | None, str]] = {}
    for target in found.needed.targets:
        bits = [each for each in found.bits if each.target == target]
        here = [each for each in bits if each.digest is not None]
        if not here:
            why = bits[0].why if bits else "this host does not run it"
            detail = f"{target}: not measured ({why}), {_SAME_BITS} must be shown"
            yield Decision("reproducible", False, "not measured", _SAME_BITS, detail)
            continue
        other = [*_other_bits(here, known)]
        missing = [f"{each.how}: {each.why}" for each in bits if each.digest is None]
        engines = ", ".join(dict.fromkeys(each.engine for each in here))
        detail = f"{target}: " + (
            "; ".join(other) or f"{engines} gives {_SAME_BITS} in {len(here)} ways"
        )
        if missing:
            detail += f"; not measured {'; '.join(dict.fromkeys(missing))}"
        yield Decision(
            "reproducible", not other, "other bits" if other else _SAME_BITS, _SAME_BITS, detail
        )
    targets = (found.manifest.targets.get(target) for target in found.needed.targets)
    choices = dict.fromkeys(r.choice() for r in targets if r is not None and r.chosen)
    if len(choices) > 1:
        detail = f"the levels run different engines: {'; '.join(choices)}"
        yield Decision("reproducible", False, "other engines", _SAME_BITS, detail)


def _other_bits(
    here: Sequence[Bits], known: dict[tuple[str, bool], tuple[str | None, str]]
) -> Iterator[str]:
    """What gives other bits than an earlier way. `known`: by engine and set of rows, the digest of
    the first way and what this way was; new ones are added."""
    for each in here:
        where = f"{each.target} {each.how}"
        first, at = known.setdefault((each.engine, each.every), (each.digest, where))
        if each.digest != first:
            yield f"{each.engine} {each.how} gives other bits than {at}"


def independence(found: Findings) -> Iterable[Decision]:
    """If asked for: does the program's graph show that rows are independent?"""
    if not found.needed.shown:
        return
    capture = found.manifest.capture
    why = capture.tried or capture.dependence
    known = "shown" if capture.shown else "tried" if capture.tried else "not shown"
    detail = "that rows are independent is shown by the program's graph"
    if not capture.shown:
        detail = (
            f"that rows are independent is {known}: {why or 'an older release recorded nothing'}"
        )
    yield Decision("independence", capture.shown, known, "shown", detail)


def reference(found: Findings) -> Iterable[Decision]:
    """Are few enough values of the reference NaN or infinite?"""
    proof = found.proof
    shown, limit = f"not finite {number(proof.nonfinite)}", f"not finite <= {proof.limit:g}"
    detail = proof.refusal or f"a fraction of {number(proof.nonfinite)} is NaN or infinite, {limit}"
    yield Decision("reference", proof.refusal is None, shown, limit, detail)


def reference_set(found: Findings) -> Iterable[Decision]:
    """Do the artifacts agree with the portable program on a policy's reference file?"""
    limit = f"outside <= {found.needed.max_outside:g}"
    for result in found.sets:
        where = f"{result.target}: {result.engine} beside the portable program on {result.name}"
        if result.worst:
            yield _within("reference set", where, result.worst, found)
        else:
            detail = f"{where}: {result.why}, {limit} must be shown"
            yield Decision("reference set", False, "not shown", limit, detail)


def speed(found: Findings) -> Iterable[Decision]:
    """Is the version as fast as the one that holds the alias, within the limit?"""
    speed, most = found.speed, found.needed.max_slowdown
    limit = f"ratio <= {most:g}"
    if speed is None:
        detail = f"no version in place to compare with, limit {most:g} times its time"
        yield Decision("speed", True, "no version in place", limit, detail)
        return
    if not speed.points:
        detail = f"not measured beside {speed.old}, limit {most:g} times its time"
        yield Decision("speed", False, "not measured", limit, detail)
        return
    worst = max(speed.points, key=lambda point: (math.isnan(point.ratio), point.ratio))
    detail = (
        f"{worst.target} at n={worst.rows}: median {microseconds(worst.new_us)} against "
        f"{microseconds(worst.old_us)} of {speed.old}, ratio {number(worst.ratio)}, limit {most:g}"
    )
    passed = worst.ratio <= most  # False for NaN
    yield Decision("speed", passed, f"ratio {number(worst.ratio)}", limit, detail)


def bounded(found: Findings) -> Iterable[Decision]:
    """Latency, memory, size, metrics, shadow: is each number within the bounds of the config?"""
    return map(_judged, found.bounded)


def _judged(one: Measured) -> Decision:
    """A measured number beside its bounds, and beside that of the version in place."""
    asked: list[tuple[str, float | None, float]] = [
        (">=", one.min, one.value),
        ("<=", one.max, one.value),
    ]
    if one.beside:
        asked += [
            ("drop <=", one.max_drop, one.old - one.value),
            ("rise <=", one.max_rise, one.value - one.old),
        ]
    bounds = [(sign, bound, value) for sign, bound, value in asked if bound is not None]
    passed = math.isfinite(one.value) and all(
        value >= bound if sign == ">=" else value <= bound for sign, bound, value in bounds
    )  # False for NaN
    limit = ", ".join(f"{sign} {number(bound, 6)}" for sign, bound, _ in bounds) or "none"
    shown = number(one.value, 6) + (
        f"; {one.beside} has {number(one.old, 6)}" if one.beside else ""
    )
    why = f": {one.why}" if one.why else ""
    detail = f"{one.what} is {shown}, limit {limit}{why}"
    return Decision(one.gate, passed, shown, limit, detail)


def staging(found: Findings) -> Iterable[Decision]:
    """Has the version been in `@staging` for as long as the policies require?"""
    needed, time = found.needed.min_time_in_staging, found.in_staging
    if not needed:
        return
    limit = f">= {_hours(needed)}"
    if time is None:
        detail = f"not in staging by a promotion, {_hours(needed)} there are needed"
        yield Decision("staging", False, "not in staging", limit, detail)
        return
    detail = f"in staging for {_hours(time)}, {_hours(needed)} are needed"
    yield Decision("staging", time >= needed, _hours(time), limit, detail)


def _hours(time: timedelta) -> str:
    return f"{number(time.total_seconds() / 3600)} h"


def approvals(found: Findings) -> Iterable[Decision]:
    """Have all persons whom a policy names approved this version?"""
    names = found.needed.approvals
    if not names:
        return
    missing = [name for name in names if name not in found.approved_by]
    given = ", ".join(name for name in names if name in found.approved_by) or "none"
    needed = ", ".join(names)
    detail = f"approved by {given}; needed: {needed}"
    if missing:
        detail += f"; missing: {', '.join(missing)} (pipeline approve)"
    yield Decision("approvals", not missing, given, needed, detail)


def signature(found: Findings) -> Iterable[Decision]:
    """For each policy, is the version signed with one of the policy's keys?"""
    check = found.signature
    if check is None:
        return
    if check.error:
        yield Decision("signature", False, "not as asked", check.needed, check.error)
    else:
        detail = f"signed by {check.found}"
        yield Decision("signature", True, check.found, check.needed, detail)


GATES: tuple[Callable[[Findings], Iterable[Decision]], ...] = (
    digests,
    verified,
    tolerance,
    reproducible,
    independence,
    reference,
    reference_set,
    speed,
    bounded,
    staging,
    approvals,
    signature,
)
"""All gates, in the order of the table that `pipeline promote` prints."""
