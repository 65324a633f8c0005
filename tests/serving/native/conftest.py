from __future__ import annotations

from pathlib import Path

import pytest

from engines import Portable, Target, engine
from registry.bundle.bundle import Bundle
from tests.models import served
from tests.models.shared import made_once


@pytest.fixture(scope="session")
def event(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A version with several row dimensions, and scalars."""
    return served.shared(tmp_path_factory, "event", served.Event(), served.EVENT)


@pytest.fixture(scope="session")
def event_onnx(tmp_path_factory: pytest.TempPathFactory, event: Bundle) -> Path:
    """The ONNX file of `event`."""

    def make(folder: Path) -> None:
        source = Portable(event.file(event.manifest.program), None)
        engine("onnxruntime").compile(source, Target.parse("cpu"), {}, folder)

    return made_once(tmp_path_factory, "event-onnx", make) / "model.onnx"
