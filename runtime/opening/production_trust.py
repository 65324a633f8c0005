"""What production requires of a version before any use: promotion and signatures.

No function here asks a registry, and the only files read are keys: all else is fetched before.
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
    """The promotion that lets the version into `alias` (`Version.let_in`); else LoadError."""
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
    """The targets built later that production may use, and why it may not use the others.

    `signed`: a signature is required. No signature covers a target that was built later.
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
    """Raise LoadError unless the note of a pulled folder belongs to its bundle."""
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
    """Groups of keys; one key of each group must have signed. The groups: the host's keys, the
    given keys, and the keys of each policy in `signers`. Empty if no signature is required."""
    host = host_keys()
    groups = [] if host is None else [host]
    if given is not None:
        groups.append(trusted_keys(given))
    groups += [
        tuple(parse_trusted(pem, origin) for pem in keys) for origin, keys in signers.items()
    ]
    return groups
