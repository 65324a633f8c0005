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
        inputs, answers = Path(folder) / "inputs.npz", Path(folder) / "answers.npz"
        np.savez(inputs, *feed.values())
        if isinstance(network, bytes):
            path = Path(folder) / "network.onnx"
            path.write_bytes(network)
        else:
            path = network.resolve()
        payload = {
            "path": str(path),
            "names": [*feed],
            "inputs": str(inputs),
            "answers": str(answers),
        }
        outcome = run_isolated(f"{__name__}:answer", payload, Path(folder), _LIMIT_S)
        if not outcome.ok:
            raise EngineError(f"ONNX Runtime, in a process of its own: {outcome.error}")
        return _read_arrays(answers)


def answer(path: str, names: list[str], inputs: str, answers: str) -> None:
    """Run the network `path` in the child, on the arrays in the file `inputs`, which have `names`.
    Its outputs go to the file `answers`."""
    session = open_session(Path(path), torch.device("cpu"), 1)
    feed = dict(zip(names, _read_arrays(Path(inputs)), strict=True))
    np.savez(answers, *session.run(None, feed))


def _read_arrays(path: Path) -> list[Any]:
    """The arrays that `np.savez` wrote without names, in their order."""
    with np.load(path) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
