"""Bundles, the MLflow registry that keeps them, and the rules of promotion.

Names are resolved on first use: `import registry` loads neither pydantic nor MLflow, and MLflow
itself is loaded only when a `Registry` first talks to its store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from registry.annex import Annex, AnnexRecord
    from registry.bundle import Bundle, seal, write_atomically
    from registry.errors import (
        BundleError,
        NotFoundError,
        PromotionRefused,
        RegistryError,
        RegistryUnavailableError,
        SignatureError,
    )
    from registry.history import Event
    from registry.manifest import (
        SCHEMA_VERSION,
        BenchmarkStats,
        Candidate,
        Capture,
        Manifest,
        Provenance,
        TargetRecord,
        Tolerance,
        Worst,
    )
    from registry.policy import Policy
    from registry.promotion import Decision, SpeedComparison, SpeedPoint, decide
    from registry.reference import Ref, parse_ref
    from registry.store import ModelSummary, Registry
    from registry.version import Promotion, Version

_HOME = {
    "Annex": "annex",
    "AnnexRecord": "annex",
    "Bundle": "bundle",
    "seal": "bundle",
    "write_atomically": "bundle",
    "BundleError": "errors",
    "NotFoundError": "errors",
    "PromotionRefused": "errors",
    "RegistryError": "errors",
    "RegistryUnavailableError": "errors",
    "SignatureError": "errors",
    "Event": "history",
    "SCHEMA_VERSION": "manifest",
    "BenchmarkStats": "manifest",
    "Candidate": "manifest",
    "Capture": "manifest",
    "Manifest": "manifest",
    "Provenance": "manifest",
    "TargetRecord": "manifest",
    "Tolerance": "manifest",
    "Worst": "manifest",
    "Policy": "policy",
    "Decision": "promotion",
    "SpeedComparison": "promotion",
    "SpeedPoint": "promotion",
    "decide": "promotion",
    "Ref": "reference",
    "parse_ref": "reference",
    "ModelSummary": "store",
    "Registry": "store",
    "Promotion": "version",
    "Version": "version",
}

__all__ = [
    "SCHEMA_VERSION",
    "Annex",
    "AnnexRecord",
    "BenchmarkStats",
    "Bundle",
    "BundleError",
    "Candidate",
    "Capture",
    "Decision",
    "Event",
    "Manifest",
    "ModelSummary",
    "NotFoundError",
    "Policy",
    "Promotion",
    "PromotionRefused",
    "Provenance",
    "Ref",
    "Registry",
    "RegistryError",
    "RegistryUnavailableError",
    "SignatureError",
    "SpeedComparison",
    "SpeedPoint",
    "TargetRecord",
    "Tolerance",
    "Version",
    "Worst",
    "decide",
    "parse_ref",
    "seal",
    "write_atomically",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
