"""Versions of one model whose answers differ; they share the code and need no compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registry.bundle import PulledNote, write_note
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from registry.version import Version
from tests.models import registries
from tests.models.project import PASSED, resealed


def negated(bundle: Bundle, folder: Path) -> Bundle:
    """A bundle whose `aoti` artifact has weights with the opposite sign."""

    def edit(copy: Path, _: dict[str, Any]) -> None:
        (weights,) = copy.glob("targets/*/*/aoti/weights.bin")
        content = np.frombuffer(weights.read_bytes(), np.float32)
        weights.write_bytes((-content).tobytes())

    return resealed(bundle, folder, edit)


def store_of(
    factory: pytest.TempPathFactory, database: Path, fill: Callable[[Registry], object]
) -> Path:
    """A folder with a registry that `fill` has filled, to be copied by `copy_of`."""
    folder = factory.mktemp("store")
    shutil.copy(database, folder / "registry.db")
    fill(Registry(f"sqlite:///{folder}/registry.db"))
    return folder


def copy_of(store: Path, folder: Path) -> Registry:
    """A copy of the registry in `store`, with its files, which a test may change or damage."""
    registries.copy(store, folder)
    return Registry(f"sqlite:///{folder}/registry.db")


def promoted(registry: Registry, bundle: Bundle) -> Version:
    """Registers a bundle and promotes it to production."""
    return registry.promote(registry.register(bundle), "production", PASSED)


def vouched(bundle: Bundle) -> Path:
    """The bundle's folder, with the note of a promotion as in a pulled one."""
    write_note(bundle.path, PulledNote("jets/1", bundle.digest, "somebody", "now"))
    return bundle.path
