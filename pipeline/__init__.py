"""soa-pipeline: trained torch models that run fast and right on Structure-of-Arrays memory.

    import pipeline

    session = pipeline.load("jet-tagger@production")
    jets = pipeline.Collection.wrap(session.layout("jets"), memory, n)
    tags = session.collection("tags", n)
    session.run(jets, tags)

Names are resolved on first use, so that `pipeline --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import soa_pipeline

soa_pipeline.check_origins()

if TYPE_CHECKING:
    from pipeline.config import Config, load_config
    from pipeline.difference import Difference, diff
    from pipeline.loading import load
    from pipeline.promoting import promote
    from pipeline.runner import RunResult, run
    from pipeline.site_file import load_site
    from registry import Registry
    from registry.push import push
    from runtime import (
        BindError,
        Binding,
        CheckedSession,
        DeviationError,
        LiveSession,
        LoadError,
        MultiDeviceSession,
        QueueFullError,
        Scheduler,
        Session,
        Staging,
    )
    from runtime.allocator import keep_freed_memory
    from serving.remote import RemoteSession
    from serving.remote_options import RemoteOptions, Tls
    from serving.site import Site
    from serving.site_session import SiteSession
    from soa import Block, Collection, Layout, Signature, SoaPipelineError, column, eigen, scalar

_HOME = {
    "Config": "pipeline.config",
    "load_config": "pipeline.config",
    "Difference": "pipeline.difference",
    "diff": "pipeline.difference",
    "keep_freed_memory": "runtime.allocator",
    "promote": "pipeline.promoting",
    "RunResult": "pipeline.runner",
    "run": "pipeline.runner",
    "Registry": "registry.store",
    "push": "registry.push",
    "BindError": "runtime.errors",
    "Binding": "runtime.binding",
    "CheckedSession": "runtime.checked",
    "DeviationError": "runtime.errors",
    "LiveSession": "runtime.live",
    "LoadError": "runtime.errors",
    "MultiDeviceSession": "runtime.devices",
    "QueueFullError": "runtime.errors",
    "RemoteOptions": "serving.remote_options",
    "RemoteSession": "serving.remote",
    "Scheduler": "runtime.scheduler",
    "Session": "runtime.session",
    "Site": "serving.site",
    "SiteSession": "serving.site_session",
    "Staging": "runtime.staging",
    "load": "pipeline.loading",
    "load_site": "pipeline.site_file",
    "Block": "soa.block",
    "Collection": "soa.collection",
    "Layout": "soa.layout",
    "Signature": "soa.signature",
    "SoaPipelineError": "soa.errors",
    "Tls": "serving.remote_options",
    "column": "soa.layout",
    "eigen": "soa.layout",
    "scalar": "soa.layout",
}

__all__ = [
    "BindError",
    "Binding",
    "Block",
    "CheckedSession",
    "Collection",
    "Config",
    "DeviationError",
    "Difference",
    "Layout",
    "LiveSession",
    "LoadError",
    "MultiDeviceSession",
    "QueueFullError",
    "Registry",
    "RemoteOptions",
    "RemoteSession",
    "RunResult",
    "Scheduler",
    "Session",
    "Signature",
    "Site",
    "SiteSession",
    "SoaPipelineError",
    "Staging",
    "Tls",
    "column",
    "diff",
    "eigen",
    "keep_freed_memory",
    "load",
    "load_config",
    "load_site",
    "promote",
    "push",
    "run",
    "scalar",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
