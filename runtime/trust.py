"""Which signatures production asks for before it uses anything of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from registry.bundle import Bundle
from registry.resolved import Signers
from registry.signing import Trusted, require_signature, trusted
from registry.signing import trusted_keys as keys_of

Check = Callable[[Bundle, Sequence[Trusted]], Trusted]


def require_trusted(
    bundle: Bundle,
    signers: Sequence[Signers],
    trusted_keys: Sequence[str | Path] | None,
    check: Check = require_signature,
) -> frozenset[str]:
    """SignatureError unless the bundle is signed as the host and the registry's policies ask.

    Each asks for one of its own keys. A folder has no registry: there the host alone asks. Returns
    the targets that no signature covers where one is asked for: those of annexes, which came later.
    """
    own = keys_of(trusted_keys)
    asked = [] if own is None else [own]
    for policy in signers:
        asked.append(tuple(trusted(pem, policy.origin) for pem in policy.keys))
    for keys in asked:
        check(bundle, keys)
    return frozenset(bundle.annexes if asked else ())
