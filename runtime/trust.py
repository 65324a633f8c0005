"""Which signatures production asks for before it uses anything of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from registry.bundle import Bundle
from registry.signing import require_signature, trusted
from registry.signing import trusted_keys as keys_of
from registry.store import Registry
from registry.version import Version


def require_trusted(
    bundle: Bundle,
    version: Version | None,
    registry: Registry | str | None,
    trusted_keys: Sequence[str | Path] | None,
) -> frozenset[str]:
    """SignatureError unless the bundle is signed as the host and the registry's policies ask.

    Each asks for one of its own keys. A folder has no registry: there the host alone asks. Returns
    the targets that no signature covers where one is asked for: those of annexes, which came later.
    """
    own = keys_of(trusted_keys)
    asked = [] if own is None else [own]
    if version is None:
        for keys in asked:
            require_signature(bundle, keys)
        return frozenset(bundle.annexes if asked else ())
    store = registry if isinstance(registry, Registry) else Registry(registry)
    for policy in store.policies(version.name):
        if policy.policy.signed_by:
            asked.append(tuple(trusted(pem, policy.origin) for pem in policy.policy.signed_by))
    for keys in asked:
        store.require_signature(version, bundle, keys)
    return frozenset(bundle.annexes if asked else ())
