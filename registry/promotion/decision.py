"""The answer of a gate, and how a refusal is overridden by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from registry.errors import RegistryError
from soa.text import plain

# Loading in production checks these two again, so overriding them here would have no use.
NEVER_OVERRIDDEN = frozenset({"digests", "signature"})


@dataclass(frozen=True)
class Decision:
    """A gate's decision. `found` and `limit` are short, for a table; `detail` is a sentence."""

    gate: str
    passed: bool
    found: str
    limit: str
    detail: str
    override: str = ""
    """The reason for which somebody overrode a refusal; empty if nobody did."""

    @property
    def lets_pass(self) -> bool:
        """True if the gate passed, or its refusal was overridden and may be."""
        return self.passed or (self.override != "" and self.gate not in NEVER_OVERRIDDEN)

    @property
    def code(self) -> str:
        """The error code for a refusal by this gate, such as `gate-speed`."""
        return f"gate-{self.gate.replace(' ', '-')}"

    @property
    def answer(self) -> str:
        """The decision in one word, for tables."""
        if self.passed:
            return "passed"
        return "overridden" if self.lets_pass else "REFUSED"


class PromotionRefused(RegistryError):
    """At least one gate refused the promotion; no alias was moved.

    `promotion`: the version and the alias, as `name/3 to @production`. `code` is that of the first
    gate that refused.
    """

    code = "gate"

    def __init__(self, promotion: str, decisions: Sequence[Decision]) -> None:
        super().__init__(promotion, tuple(decisions))
        self.decisions = tuple(decisions)
        self.refused = tuple(decision for decision in decisions if not decision.lets_pass)
        if self.refused:
            self.code = self.refused[0].code

    def __str__(self) -> str:
        why = "; ".join(f"{d.gate}: {d.detail}" for d in self.refused) or "no gate was evaluated"
        return plain(f"{self.args[0]} refused: {why}")


def check_override(gates: Iterable[str], reason: str) -> None:
    """Raise RegistryError for an override without a reason, or of a gate in NEVER_OVERRIDDEN."""
    named = sorted(gates)
    if named and not reason.strip():
        raise RegistryError("overriding a gate takes a reason: --reason '...'")
    if fixed := [gate for gate in named if gate in NEVER_OVERRIDDEN]:
        raise RegistryError(f"the gate {fixed[0]!r} cannot be overridden")


def override(decisions: Iterable[Decision], gates: Iterable[str], reason: str) -> list[Decision]:
    """Return the decisions, in which each refusal of one of `gates` gets `reason` as its override.

    Raises RegistryError if a gate was not asked or cannot be overridden, or if there is no reason.
    """
    overridden, named = list(decisions), set(gates)
    check_override(named, reason)
    gates_asked = dict.fromkeys(decision.gate for decision in overridden)
    known = [gate for gate in gates_asked if gate not in NEVER_OVERRIDDEN]
    if unknown := sorted(named.difference(known)):
        raise RegistryError(f"no gate {unknown[0]!r} was asked; there are: {', '.join(known)}")
    for i, decision in enumerate(overridden):
        if decision.gate in named and not decision.passed:
            overridden[i] = replace(decision, override=reason)
    return overridden
