"""What production asks of a version before it uses anything of it: promotion and signatures.

Nothing here asks a registry, and no file is read but those of keys: all has been fetched before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from registry.bundle import Bundle, PulledNote
from registry.errors import NotPromotedError
from registry.trust import Trusted, host_keys, trusted, trusted_keys
from runtime.errors import LoadError

if TYPE_CHECKING:  # opening a folder asks no registry
    from registry.version import Promotion, Version

NOT_SIGNED = (
    "was built after the version was signed, and no signature covers it: sign a version that has "
    "it, or load another target"
)


def require_promoted(version: Version, history: Sequence[Promotion] | None) -> Promotion:
    """As `Version.let_in` says, for production; LoadError."""
    from registry.history import PRODUCTION

    try:
        return version.let_in(PRODUCTION, history)
    except NotPromotedError as error:
        raise LoadError(
            f"{error}: run `pipeline promote {version.ref} --to {PRODUCTION}`, or load it with "
            "mode='test'",
            code="load-not-promoted",
        ) from error


def usable_annexes(
    version: Version, promotion: Promotion, signed: bool
) -> tuple[list[str], dict[str, str]]:
    """Which of the targets that were built later production may use, and why not the others.

    `signed`: a signature is asked for. None covers what was built later.
    """
    from registry.history import PRODUCTION

    passed = [t for t, digest in version.annexes.items() if promotion.annexes.get(t) == digest]
    withheld = dict.fromkeys(passed, NOT_SIGNED) if signed else {}
    why = (
        f"was built since it was promoted: run `pipeline promote {version.ref} --to {PRODUCTION}` "
        "on such a host to let it in"
    )
    withheld |= {target: why for target in version.annexes if target not in passed}
    return [target for target in passed if target not in withheld], withheld


def require_vouched(ref: str | Path, note: PulledNote | None, bundle: Bundle) -> None:
    """LoadError unless the note of a pulled folder is of its bundle."""
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


def keys_asked_for(
    signers: Mapping[str, Sequence[str]], given: str | Path | Sequence[str | Path] | None
) -> list[tuple[Trusted, ...]]:
    """Groups of keys; of each group, one key must have signed: the host's, those given, and those
    of each policy in `signers`. Empty where no signature is asked for."""
    host = host_keys()
    asked = [] if host is None else [host]
    if given is not None:
        asked.append(trusted_keys(given))
    asked += [tuple(trusted(pem, origin) for pem in keys) for origin, keys in signers.items()]
    return asked
