"""Ask every gate. A gate is a file in `gates/`; nothing else lists them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Protocol, cast

from registry.promotion import gates
from registry.promotion.decision import Decision
from registry.promotion.findings import Findings
from soa.options import known_options


class Gate(Protocol):
    """What a module in `gates/` has."""

    ORDER: int
    """Its place in the table."""

    def decide(self, found: Findings) -> Iterable[Decision]:
        """A decision for each thing asked; none where nobody asks."""


def every_gate() -> list[Gate]:
    names = [each.name for each in pkgutil.iter_modules(gates.__path__)]
    found = [importlib.import_module(f"{gates.__name__}.{name}") for name in names]
    return sorted((cast(Gate, module) for module in found), key=lambda gate: gate.ORDER)


@known_options()
def decide(found: Findings) -> list[Decision]:
    """Every gate's decisions, also after one has refused: the user sees all that is in the way."""
    return [decision for gate in every_gate() for decision in gate.decide(found)]
