"""digests: is every file as it was when the bundle was sealed?"""

from __future__ import annotations

from collections.abc import Iterable

from registry.promotion.decision import Decision
from registry.promotion.findings import Findings

ORDER = 10


def decide(found: Findings) -> Iterable[Decision]:
    """Always passes: an altered bundle cannot be opened, so it never comes here; see `altered`."""
    detail = "every file has the digest it was sealed with"
    yield Decision("digests", True, "all match", "all match", detail)


def altered(why: str) -> Decision:
    """The only decision on a bundle that could not be opened."""
    return Decision("digests", False, "altered", "as sealed", why)
