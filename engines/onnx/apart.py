"""Runs ONNX Runtime in a child process, for models that may make it crash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from engines.errors import EngineError
from engines.onnx.engine import open_session
from engines.processes import run_isolated

_LIMIT_S = 600.0


def answers_apart(network: Path | bytes, feed: Mapping[str, Any]) -> list[Any]:
    """The outputs of a network, a file or its content; `feed` maps the names of its inputs to
    arrays. Raises EngineError, also if the child process crashes."""
    with TemporaryDirectory(prefix="soa-onnx-") as folder:
        given, answers = Path(folder) / "given.npz", Path(folder) / "answers.npz"
        np.savez(given, *(feed.values()))
        if isinstance(network, bytes):
            path = Path(folder) / "network.onnx"
            path.write_bytes(network)
        else:
            path = network.resolve()
        payload = {
            "path": str(path),
            "names": [*feed],
            "given": str(given),
            "answers": str(answers),
        }
        outcome = run_isolated(f"{__name__}:answer", payload, Path(folder), _LIMIT_S)
        if not outcome.ok:
            raise EngineError(f"ONNX Runtime, in a process of its own: {outcome.error}")
        return _read(answers)


def answer(path: str, names: list[str], given: str, answers: str) -> None:
    """Run in the child: reads the inputs from the file `given`, writes the outputs to `answers`."""
    session = open_session(Path(path), torch.device("cpu"), 1)
    np.savez(answers, *session.run(None, dict(zip(names, _read(Path(given)), strict=True))))


def _read(path: Path) -> list[Any]:
    with np.load(path) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
