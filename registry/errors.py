"""What can go wrong with bundles and the registry, as exceptions of one clear line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soa.errors import SoaPipelineError

if TYPE_CHECKING:
    from registry.promotion import Decision


class RegistryError(SoaPipelineError):
    """The registry, or what was asked of it, is not in order."""


class BundleError(RegistryError):
    """A bundle folder that is not whole, not what it was, or cannot be written."""


class NotCachedError(BundleError):
    """The files are not in the cache, and nothing may be fetched."""


class TrustError(RegistryError):
    """A signature that is asked for is missing, wrong or not trusted, or a key cannot be used."""


class NotFoundError(RegistryError):
    """No such model, version or alias; the text says which there are."""


class NotPromotedError(RegistryError):
    """No gate let this version pass to that alias, by its tag and the history of its model."""


class RegistryUnavailableError(RegistryError):
    """The registry cannot be used now: locked by another process, not reachable, or full."""


class PromotionRefused(RegistryError):
    """At least one gate did not pass; nothing has been changed."""

    def __init__(self, what: str, decisions: Sequence[Decision]) -> None:
        self.decisions = tuple(decisions)
        refused = [decision for decision in self.decisions if not decision.lets_pass]
        why = "; ".join(f"{d.gate}: {d.detail}" for d in refused) or "no gate was evaluated"
        super().__init__(f"{what} refused: {why}")
