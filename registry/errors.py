"""The exceptions of bundles and the registry. The message of each is one clear line."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class RegistryError(SoaPipelineError):
    """The registry, or a request to it, is invalid."""

    code = "registry"


class BundleError(RegistryError):
    """A bundle folder is incomplete, was changed, or cannot be written."""

    code = "bundle"


class NotCachedError(BundleError):
    """The files are not in the cache, and the caller forbids fetching them."""

    code = "not-cached"


class TrustError(RegistryError):
    """A required signature is missing, wrong or not trusted, or a key cannot be used."""

    code = "trust"


class NotFoundError(RegistryError):
    """There is no such model, version or alias; the message lists those that exist."""

    code = "not-found"


class NoRegistryError(NotFoundError):
    """There is no registry at a URI: no file, or a database without tables."""

    code = "no-registry"

    @classmethod
    def at(cls, shown: str, why: str) -> NoRegistryError:
        """Return the error for a registry's URI; `shown` has no password, `why` is the reason."""
        return cls(
            f"nothing is registered in {shown}: {why}; `pipeline run CONFIG` makes a registry "
            "there, and --registry or PIPELINE_REGISTRY names another one"
        )


class NotPromotedError(RegistryError):
    """The version was never promoted to the alias: its tag or its model's history says so."""

    code = "not-promoted"


class RegistryUnavailableError(RegistryError):
    """The registry cannot be used now: locked by another process, not reachable, or full."""

    code = "registry-unavailable"
