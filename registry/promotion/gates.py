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


def decide(findings: Findings) -> list[Decision]:
    """Return the decisions of all gates, also after one has refused: users see every obstacle."""
    return [decision for gate in GATES for decision in gate(findings)]


def digests(findings: Findings) -> Iterable[Decision]:
    """Is every file as it was when the bundle was sealed?

    Always passes: an altered bundle cannot be opened, so it never comes here; see `altered`.
    """
    detail = "every file has the digest it was sealed with"
    yield Decision("digests", True, "all match", "all match", detail)


def altered(why: str) -> Decision:
    """Return the only decision on a bundle that could not be opened, for the reason `why`."""
    return Decision("digests", False, "altered", "as sealed", why)


def verified(findings: Findings) -> Iterable[Decision]:
    """Has each required target run on a device of its kind?"""
    if not findings.needed.targets:
        detail = "found no target to serve, at least 1 is needed"
        yield Decision("verified", False, "no target", "at least 1", detail)
    for target in findings.needed.targets:
        yield _judge_target(findings, target)


def _judge_target(findings: Findings, target: str) -> Decision:
    """Decide whether a target has run on a device of its kind, or may do without that."""
    record = findings.manifest.targets.get(target)
    if record is None:
        known = ", ".join(findings.manifest.targets) or "none"
        detail = f"{target} is not in the bundle, which has {known}"
        return Decision("verified", False, "absent", "verified", detail)
    if record.status == "verified":
        detail = f"{target} is verified ({record.chosen})"
        return Decision("verified", True, "verified", "verified", detail)
    if findings.needs_a_device(target) and findings.is_excused(target):
        detail = f"{target} is {record.status}: no device of this kind has run it; allowed by name"
        return Decision("verified", True, record.status, "unverified allowed", detail)
    if record.status == "emulated" and not findings.needed.production:
        detail = f"{target} is emulated: it gave the reference's answers on an emulator"
        return Decision("verified", True, "emulated", "emulated", detail)
    advice = ""
    if findings.needs_a_device(target):
        named = target in findings.needed.named_targets
        advice = ": run it there" + (", a policy names it" if named else ", or allow it by name")
    detail = f"{target} is {record.status}, verified is needed{advice}"
    return Decision("verified", False, record.status, "verified", detail)


def tolerance(findings: Findings) -> Iterable[Decision]:
    """Do the outputs of each required target, run again now, agree with the reference?"""
    for target in findings.needed.targets:
        record = findings.manifest.targets.get(target)
        limit = f"outside <= {findings.needed.max_outside:g}"
        if worst := findings.worst.get(target):
            yield _judge_worst("tolerance", target, worst, findings)
        elif record and findings.needs_a_device(target) and findings.is_excused(target):
            detail = f"{target} was not run again: {record.status}, allowed by name"
            yield Decision("tolerance", True, "not run", "unverified allowed", detail)
        elif record and record.status == "emulated" and not findings.needed.production:
            candidate = record.candidates[str(record.chosen)]
            yield _judge_worst("tolerance", f"{target} on an emulator", candidate.worst, findings)
        else:
            detail = f"{target} was not run again on its reference, {limit} must be shown"
            yield Decision("tolerance", False, "not run", limit, detail)


def _judge_worst(gate: str, where: str, worst: Mapping[str, Worst], findings: Findings) -> Decision:
    """Decide whether all outputs agree, by the one that exceeds its limit the most.

    `where` begins the detail of the decision. `worst`: the deviations by output.
    """
    for_all = f"outside <= {findings.needed.max_outside:g}"
    if absent := sorted(findings.manifest.tolerances.keys() - worst.keys()):
        detail = f"{where}: output {absent[0]} was not compared, {for_all} must be shown"
        return Decision(gate, False, "not compared", for_all, detail)
    if unknown := sorted(findings.needed.max_outside_by_output.keys() - worst.keys()):
        detail = f"{where}: there is no output {unknown[0]}, for which a policy has a limit"
        return Decision(gate, False, "no such output", for_all, detail)
    excess = {name: worst[name].outside - findings.max_outside(name) for name in worst}
    # NaN is no larger than any number, and must be refused: it is compared before the numbers.
    output = max(excess, key=lambda name: (math.isnan(excess[name]), excess[name]))
    limit, tolerance = findings.max_outside(output), findings.manifest.tolerances.get(output)
    band = "tolerance" if tolerance is None else f"atol {tolerance.atol:g} rtol {tolerance.rtol:g}"
    outside = worst[output].outside
    detail = (
        f"{where}: output {output} has a fraction of {number(outside)} outside {band}, "
        f"limit {limit:g}; largest deviation {number(worst[output].max_abs)}"
    )
    passed = outside <= limit  # False for NaN
    return Decision(gate, passed, f"outside {number(outside)}", f"outside <= {limit:g}", detail)


_SAME_BITS = "the same bits"


def reproducible(findings: Findings) -> Iterable[Decision]:
    """Does each artifact give the same bits in all measured ways to run it?"""
    if not findings.needed.reproducible:
        return
    first: dict[tuple[str, bool], Bits] = {}
    for target in findings.needed.targets:
        yield _judge_bits(findings, target, first)
    records = (findings.manifest.targets.get(target) for target in findings.needed.targets)
    choices = dict.fromkeys(record.choice() for record in records if record and record.chosen)
    if len(choices) > 1:
        detail = f"the levels run different engines: {'; '.join(choices)}"
        yield Decision("reproducible", False, "other engines", _SAME_BITS, detail)


def _judge_bits(findings: Findings, target: str, first: dict[tuple[str, bool], Bits]) -> Decision:
    """Decide whether a target gives the same bits in all ways, and as the targets before it.

    `first`: see `_compare_bits`.
    """
    bits = [result for result in findings.bits if result.target == target]
    measured = [result for result in bits if result.digest is not None]
    if not measured:
        why = bits[0].why if bits else "this host does not run it"
        detail = f"{target}: not measured ({why}), {_SAME_BITS} must be shown"
        return Decision("reproducible", False, "not measured", _SAME_BITS, detail)
    engines = ", ".join(dict.fromkeys(result.engine for result in measured))
    answer, detail = _SAME_BITS, f"{engines} gives {_SAME_BITS} in {len(measured)} ways"
    other = list(_compare_bits(measured, first))
    if other:
        answer, detail = "other bits", "; ".join(other)
    missing = dict.fromkeys(
        f"{result.how}: {result.why}" for result in bits if result.digest is None
    )
    if missing:
        detail += f"; not measured {'; '.join(missing)}"
    return Decision("reproducible", not other, answer, _SAME_BITS, f"{target}: {detail}")


def _compare_bits(measured: Sequence[Bits], first: dict[tuple[str, bool], Bits]) -> Iterator[str]:
    """Yield a text for each result that differs from the first one of its engine and kind of rows.

    `first`: the first results, by engine and by `Bits.every`; this function adds new ones.
    """
    for result in measured:
        earlier = first.setdefault((result.engine, result.every), result)
        if result.digest != earlier.digest:
            where = f"{earlier.target} {earlier.how}"
            yield f"{result.engine} {result.how} gives other bits than {where}"


def independence(findings: Findings) -> Iterable[Decision]:
    """Does the program's graph show that rows are independent, if a policy requires this?"""
    if not findings.needed.shown:
        return
    capture = findings.manifest.capture
    answer, detail = "shown", "that rows are independent is shown by the program's graph"
    if not capture.shown:
        answer = "tried" if capture.tried else "not shown"
        why = capture.tried or capture.dependence or "an older release recorded nothing"
        detail = f"that rows are independent is {answer}: {why}"
    yield Decision("independence", capture.shown, answer, "shown", detail)


def reference(findings: Findings) -> Iterable[Decision]:
    """Are so few values of the reference NaN or infinite that it still tests the model?"""
    proof = findings.proof
    shown, limit = f"not finite {number(proof.nonfinite)}", f"not finite <= {proof.limit:g}"
    detail = proof.refusal or f"a fraction of {number(proof.nonfinite)} is NaN or infinite, {limit}"
    yield Decision("reference", proof.refusal is None, shown, limit, detail)


def reference_set(findings: Findings) -> Iterable[Decision]:
    """Do the artifacts agree with the portable program on a policy's reference file?"""
    limit = f"outside <= {findings.needed.max_outside:g}"
    for result in findings.sets:
        where = f"{result.target}: {result.engine} beside the portable program on {result.name}"
        if result.worst:
            yield _judge_worst("reference set", where, result.worst, findings)
        else:
            detail = f"{where}: {result.why}, {limit} must be shown"
            yield Decision("reference set", False, "not shown", limit, detail)


def speed(findings: Findings) -> Iterable[Decision]:
    """Is the version as fast as the one that holds the alias, within the limit?"""
    speed, max_ratio = findings.speed, findings.needed.max_slowdown
    limit = f"ratio <= {max_ratio:g}"
    if speed is None:
        detail = f"no version in place to compare with, limit {max_ratio:g} times its time"
        yield Decision("speed", True, "no version in place", limit, detail)
        return
    if not speed.points:
        detail = f"not measured beside {speed.old}, limit {max_ratio:g} times its time"
        yield Decision("speed", False, "not measured", limit, detail)
        return
    worst = max(speed.points, key=lambda point: (math.isnan(point.ratio), point.ratio))
    detail = (
        f"{worst.target} at n={worst.rows}: median {microseconds(worst.new_us)} against "
        f"{microseconds(worst.old_us)} of {speed.old}, ratio {number(worst.ratio)}, "
        f"limit {max_ratio:g}"
    )
    passed = worst.ratio <= max_ratio  # False for NaN
    yield Decision("speed", passed, f"ratio {number(worst.ratio)}", limit, detail)


def bounded(findings: Findings) -> Iterable[Decision]:
    """Is each number within the bounds of the config: latency, memory, size, metrics, shadow?"""
    return map(_judge_bounds, findings.bounded)


def _judge_bounds(measured: Measured) -> Decision:
    """Decide whether a number is within its bounds, also those relative to the version in place."""
    value, old = measured.value, measured.old
    # By text of a limit: the limit, and whether the number is within it. A comparison with NaN is
    # False, and None means that there is no such limit.
    checks: list[tuple[str, float | None, Callable[[float], bool]]] = [
        (">=", measured.min, lambda limit: value >= limit),
        ("<=", measured.max, lambda limit: value <= limit),
    ]
    if measured.beside:
        checks += [
            ("drop <=", measured.max_drop, lambda limit: old - value <= limit),
            ("rise <=", measured.max_rise, lambda limit: value - old <= limit),
        ]
    bounds = [(text, limit, within) for text, limit, within in checks if limit is not None]
    passed = math.isfinite(value) and all(within(limit) for _, limit, within in bounds)
    limits = ", ".join(f"{text} {number(limit, digits=6)}" for text, limit, _ in bounds) or "none"
    shown = number(value, digits=6)
    if measured.beside:
        shown += f"; {measured.beside} has {number(old, digits=6)}"
    why = f": {measured.why}" if measured.why else ""
    detail = f"{measured.what} is {shown}, limit {limits}{why}"
    return Decision(measured.gate, passed, shown, limits, detail)


def staging(findings: Findings) -> Iterable[Decision]:
    """Has the version been in `@staging` for as long as the policies require?"""
    needed, time = findings.needed.min_time_in_staging, findings.in_staging
    if not needed:
        return
    limit = f">= {_hours_text(needed)}"
    if time is None:
        detail = f"not in staging by a promotion, {_hours_text(needed)} there are needed"
        yield Decision("staging", False, "not in staging", limit, detail)
        return
    detail = f"in staging for {_hours_text(time)}, {_hours_text(needed)} are needed"
    yield Decision("staging", time >= needed, _hours_text(time), limit, detail)


def _hours_text(time: timedelta) -> str:
    """Write a time in hours, such as `1.5 h`."""
    return f"{number(time.total_seconds() / 3600)} h"


def approvals(findings: Findings) -> Iterable[Decision]:
    """Have all persons whom a policy names approved this version?"""
    names = findings.needed.approvals
    if not names:
        return
    missing = [name for name in names if name not in findings.approved_by]
    approved = ", ".join(name for name in names if name in findings.approved_by) or "none"
    needed = ", ".join(names)
    detail = f"approved by {approved}; needed: {needed}"
    if missing:
        detail += f"; missing: {', '.join(missing)} (pipeline approve)"
    yield Decision("approvals", not missing, approved, needed, detail)


def signature(findings: Findings) -> Iterable[Decision]:
    """Is the version signed with one of the keys of each policy that names keys?"""
    check = findings.signature
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
