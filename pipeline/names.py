"""Packages and names from other folders that `import pipeline` offers as well."""

import registry as registry
import runtime as runtime
import serving as serving
from engines.errors import EngineError, RunError, TargetError
from registry import Policy, Registry, Version
from registry.errors import BundleError, RegistryError, TrustError
from registry.promotion import PromotionRefused
from runtime import BindError, Binding, LoadError, Session
from serving import RemoteOptions, Site
from serving.errors import RemoteError
from soa import (
    Collection,
    CollectionError,
    Layout,
    LayoutError,
    SoaPipelineError,
    column,
    eigen,
    opaque,
    scalar,
)
from soa.memory import as_collection, from_jagged, to_arrow, to_awkward, to_numpy

__all__ = [
    "BindError",
    "Binding",
    "BundleError",
    "Collection",
    "CollectionError",
    "EngineError",
    "Layout",
    "LayoutError",
    "LoadError",
    "Policy",
    "PromotionRefused",
    "Registry",
    "RegistryError",
    "RemoteError",
    "RemoteOptions",
    "RunError",
    "Session",
    "Site",
    "SoaPipelineError",
    "TargetError",
    "TrustError",
    "Version",
    "as_collection",
    "column",
    "eigen",
    "from_jagged",
    "opaque",
    "registry",
    "runtime",
    "scalar",
    "serving",
    "to_arrow",
    "to_awkward",
    "to_numpy",
]
