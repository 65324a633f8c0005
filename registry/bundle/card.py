"""The card of an artifact: `arguments.txt`, the lines that programs without Python read.

It is written when the artifact is packaged. Whenever the digests of a bundle are checked, as when
it is packaged, registered, imported or pushed, Python proves here that the card says what the
manifest says. C++ checks the digests and reads the lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from registry.bundle.digests import read_sealed
from registry.bundle.manifest import Candidate, TargetRecord
from registry.errors import BundleError
from soa.signature import Signature
from soa.signature_lines import describe

CARD = "arguments.txt"


def require_cards(
    root: Path,
    files: Collection[str],
    signature: dict[str, Any],
    record: TargetRecord,
    prefix: str = "",
) -> None:
    """Raise BundleError if an artifact's card is not that of its manifest.

    `files` are those in the sealed folder `root`; `signature` is the manifest's. `prefix` begins
    the names of an annex's files in its record.
    """
    candidates = {}
    for candidate in record.candidates.values():
        for first_file in candidate.files[:1]:  # none: the candidate has no artifact
            card = f"{first_file.removeprefix(prefix).rpartition('/')[0]}/{CARD}"
            if card in files:  # else the artifact has no card
                candidates[card] = candidate
    if not candidates:
        return
    contract = Signature.from_dict(signature)
    for card, candidate in candidates.items():
        lines = _sorted_lines(read_sealed(root, card).decode(errors="replace"))
        if lines not in _possible_cards(contract, candidate):
            raise BundleError(
                f"{root}: {card} says something else than the manifest: it was altered after it "
                "was packaged; build the version again, or take it from its registry"
            )


def _possible_cards(signature: Signature, candidate: Candidate) -> Iterator[list[str]]:
    """Yield the lines of each card that is true: it may leave out the tile and the windows."""
    for tile in {None, candidate.tile}:
        for windows in {False, candidate.windows}:
            yield _sorted_lines(describe(signature, tile, windows))


def _sorted_lines(card: str) -> list[str]:
    """Sort the lines of a card by kind and collection, so that cards can be compared.

    A manifest may have its collections in another order than the card. The order of arguments
    counts: they stay in their order, as sorting is stable.
    """

    def kind_and_collection(line: str) -> tuple[str, str]:
        """Return the line's first word, and its collection; an empty one for an argument."""
        word, _, rest = line.partition(" ")
        return word, "" if word == "argument" else rest.partition(" ")[0]

    return sorted(card.splitlines(), key=kind_and_collection)
