"""Packages and names from other folders that `import pipeline` offers as well."""

import registry as registry
import runtime as runtime
import serving as serving
from registry import Registry
from runtime import BindError, LoadError, Session
from serving import RemoteOptions, Site
from soa import Collection, Layout, SoaPipelineError, column, eigen, scalar

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
    "column",
    "eigen",
    "registry",
    "runtime",
    "scalar",
    "serving",
]
