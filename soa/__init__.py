"""Structure-of-Arrays memory: layouts, collections, blocks, and the signature of a model."""

from __future__ import annotations

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
