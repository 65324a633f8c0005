"""Packages and names from other folders that `import pipeline` offers as well."""

import registry as registry
import runtime as runtime
import serving as serving
from registry import Registry
from runtime import BindError, LoadError, Session
from serving import RemoteOptions, Site
from soa import Collection, Layout, SoaPipelineError, column, eigen, scalar
from soa.memory import as_collection, from_jagged, to_arrow, to_awkward, to_numpy

__all__ = [
    "BindError",
    "Collection",
    "Layout",
    "LoadError",
    "Registry",
    "RemoteOptions",
    "Session",
    "Site",
    "SoaPipelineError",
    "as_collection",
    "column",
    "eigen",
    "from_jagged",
    "registry",
    "runtime",
    "scalar",
    "serving",
    "to_arrow",
    "to_awkward",
    "to_numpy",
]
