"""Versions of one model whose answers differ, made without compiling: other weights, same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from registry.version import Version
from tests.models.project import PASSED, resealed


def negated(bundle: Bundle, folder: Path) -> Bundle:
    """The `aoti` artifact runs on the weights with the opposite sign."""

    def edit(copy: Path, _: dict[str, Any]) -> None:
        (weights,) = copy.glob("targets/*/*/aoti/weights.bin")
        content = np.frombuffer(weights.read_bytes(), np.float32)
        weights.write_bytes((-content).tobytes())

    return resealed(bundle, folder, edit)


def promoted(registry: Registry, bundle: Bundle) -> Version:
    return registry.promote(registry.register(bundle), "production", PASSED)
