"""What production requires of a version before any use: promotion and signatures.

No function here asks a registry, and only keys are read from files: the caller fetches all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from registry.bundle import Bundle, PulledNote
from registry.errors import NotPromotedError
from registry.trust import Trusted, host_keys, parse_trusted, trusted_keys
from runtime.errors import LoadError

if TYPE_CHECKING:  # opening a folder does not import the registry
    from registry.version import Promotion, Version

NOT_SIGNED = (
    "was built after the version was signed, and no signature covers it: sign a version that has "
    "it, or load another target"
)


def require_promoted(
    version: Version, history: Sequence[Promotion] | None, alias: str = "production"
) -> Promotion:
    """Return the promotion that lets the version into `alias`, see `Version.let_in`.

    `history`: the promotions in the registry. Raises LoadError if there is no such promotion.
    """
    try:
        return version.let_in(alias, history)
    except NotPromotedError as error:
        raise LoadError(
            f"{error}: run `pipeline promote {version.ref} --to {alias}`, or load it with "
            "mode='test'",
            code="load-not-promoted",
        ) from error


def usable_annexes(
    version: Version, promotion: Promotion, signed: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the annexes that production may use, and by target why it may not use the others.

    An annex is a target that was built later than the version. The promotion must name it with its
    digest. `signed`: a signature is required, and since none covers an annex, none may be used.
    """
    passed = [t for t, digest in version.annexes.items() if promotion.annexes.get(t) == digest]
    withheld = dict.fromkeys(passed, NOT_SIGNED) if signed else {}
    not_promoted = (
        f"was built after the promotion: to allow it, run `pipeline promote {version.ref} --to "
        f"{promotion.alias}` on a host that can run this target"
    )
    withheld |= {target: not_promoted for target in version.annexes if target not in passed}
    return [target for target in passed if target not in withheld], withheld


def require_vouched(ref: str | Path, note: PulledNote | None, bundle: Bundle) -> None:
    """Raise LoadError unless a folder has the note of a promotion, of this same bundle.

    `ref`: the folder, for the message. `note`: None if the folder has none.
    """
    if note is None:
        raise LoadError(
            f"{ref} is a folder that no promotion vouches for: make one with "
            "`pipeline pull NAME@production DIR`, or load it with mode='test'",
            code="load-not-promoted",
        )
    if note.digest != bundle.digest:
        raise LoadError(
            f"{ref} is not the bundle that was promoted as {note.ref}: its digest is "
            f"{bundle.digest[:12]}, promoted was {note.digest[:12]}",
            code="load-altered",
        )


def read_required_keys(
    signers: Mapping[str, Sequence[str]], given: str | Path | Sequence[str | Path] | None
) -> list[tuple[Trusted, ...]]:
    """Read the groups of keys of which one key each must have signed the version.

    The groups are the host's keys, the keys in the files `given`, and the keys of each policy in
    `signers`, as PEM texts. The list is empty if no signature is required.
    """
    host = host_keys()
    groups = [] if host is None else [host]
    if given is not None:
        groups.append(trusted_keys(given))
    groups += [
        tuple(parse_trusted(pem, origin) for pem in keys) for origin, keys in signers.items()
    ]
    return groups
