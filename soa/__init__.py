"""Structure-of-Arrays memory: layouts, collections, blocks, and the signature of a model.

Names are resolved on first use, so that what needs only the errors does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soa.block import Block, Plan
    from soa.collection import Collection
    from soa.errors import (
        BlockError,
        CollectionError,
        LayoutError,
        SignatureError,
        SoaPipelineError,
    )
    from soa.layout import Column, Layout, column, eigen, scalar
    from soa.signature import Argument, BoundBlock, RowRange, Signature

_HOME = {
    "Argument": "signature",
    "Block": "block",
    "BlockError": "errors",
    "BoundBlock": "signature",
    "Collection": "collection",
    "CollectionError": "errors",
    "Column": "layout",
    "Layout": "layout",
    "LayoutError": "errors",
    "Plan": "block",
    "RowRange": "signature",
    "Signature": "signature",
    "SignatureError": "errors",
    "SoaPipelineError": "errors",
    "column": "layout",
    "eigen": "layout",
    "scalar": "layout",
}

__all__ = [
    "Argument",
    "Block",
    "BlockError",
    "BoundBlock",
    "Collection",
    "CollectionError",
    "Column",
    "Layout",
    "LayoutError",
    "Plan",
    "RowRange",
    "Signature",
    "SignatureError",
    "SoaPipelineError",
    "column",
    "eigen",
    "scalar",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'soa' has no attribute {name!r}")
    return getattr(import_module(f"soa.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
