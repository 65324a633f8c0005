"""The source of our packages, parsed once for all tests that read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from soa_pipeline import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Each module of our packages: its path in the checkout, and its syntax."""
    paths = (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))
    return tuple((p.relative_to(ROOT).as_posix(), ast.parse(p.read_text())) for p in paths)


def dotted(node: ast.AST) -> str:
    """The source of an expression; faster than `unparse` for names and their attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)
