"""A gate's answer, and how a refusal is overridden by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from registry.errors import RegistryError

# Loading in production checks these two again, so overriding them here would gain nothing.
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


def check_override(gates: Iterable[str], reason: str) -> None:
    """Refuse, before any gate is asked, an override without a reason or of a fixed gate."""
    named = sorted(gates)
    if named and not reason.strip():
        raise RegistryError("to override a gate takes a reason: --reason '...'")
    if fixed := [gate for gate in named if gate in NEVER_OVERRIDDEN]:
        raise RegistryError(f"the gate {fixed[0]!r} cannot be overridden")


def override(decisions: Iterable[Decision], gates: Iterable[str], reason: str) -> list[Decision]:
    """The decisions, with `reason` on each refusal of the gates named."""
    kept, named = list(decisions), set(gates)
    check_override(named, reason)
    asked = dict.fromkeys(d.gate for d in kept if d.gate not in NEVER_OVERRIDDEN)
    if unknown := sorted(named - asked.keys()):
        raise RegistryError(f"no gate {unknown[0]!r} was asked; there are: {', '.join(asked)}")
    return [replace(d, override=reason) if d.gate in named and not d.passed else d for d in kept]
