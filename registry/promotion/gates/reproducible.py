"""reproducible: does each artifact give the same bits in all measured ways to run it?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 35
_SAME = "the same bits"


def decide(found: Findings) -> Iterable[Decision]:
    if not found.needed.reproducible:
        return
    known: dict[tuple[str, bool], tuple[str | None, str]] = {}
    for target in found.needed.targets:
        bits = [each for each in found.bits if each.target == target]
        here = [each for each in bits if each.digest is not None]
        if not here:
            why = bits[0].why if bits else "this host does not run it"
            detail = f"{target}: not measured ({why}), {_SAME} must be shown"
            yield Decision("reproducible", False, "not measured", _SAME, detail)
            continue
        other = []
        for each in here:
            where = f"{target} {each.how}"
            first, at = known.setdefault((each.engine, each.every), (each.digest, where))
            if each.digest != first:
                other.append(f"{each.engine} {each.how} gives other bits than {at}")
        missing = [f"{each.how}: {each.why}" for each in bits if each.digest is None]
        engines = ", ".join(dict.fromkeys(each.engine for each in here))
        detail = f"{target}: " + (
            "; ".join(other) or f"{engines} gives {_SAME} in {len(here)} ways"
        )
        if missing:
            detail += f"; not measured {'; '.join(dict.fromkeys(missing))}"
        yield Decision("reproducible", not other, "other bits" if other else _SAME, _SAME, detail)
    targets = (found.manifest.targets.get(target) for target in found.needed.targets)
    choices = dict.fromkeys(r.choice() for r in targets if r is not None and r.chosen)
    if len(choices) > 1:
        detail = f"the levels run different engines: {'; '.join(choices)}"
        yield Decision("reproducible", False, "other engines", _SAME, detail)
