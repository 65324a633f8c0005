"""tolerance: do the outputs of each required target, run again now, agree with the reference?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from registry.bundle import Worst
from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from soa.text import number

ORDER = 30


def decide(found: Findings) -> Iterable[Decision]:
    for target in found.needed.targets:
        record = found.manifest.targets.get(target)
        limit = f"outside <= {found.needed.max_outside:g}"
        if worst := found.worst.get(target):
            yield within("tolerance", target, worst, found)
        elif record and found.waits(target) and found.excused(target):
            detail = f"{target} was not run again: {record.status}, allowed by name"
            yield Decision("tolerance", True, "not run", "unverified allowed", detail)
        elif record and record.status == "emulated" and not found.needed.production:
            candidate = record.candidates[str(record.chosen)]
            yield within("tolerance", f"{target} on an emulator", candidate.worst, found)
        else:
            detail = f"{target} was not run again on its reference, {limit} must be shown"
            yield Decision("tolerance", False, "not run", limit, detail)


def within(gate: str, where: str, worst: Mapping[str, Worst], found: Findings) -> Decision:
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
