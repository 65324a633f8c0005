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

_TIME_LIMIT_S = 600.0


def answers_apart(network: Path | bytes, feed: Mapping[str, Any]) -> list[Any]:
    """Run a network in a child process, and return its outputs in order.

    `network` is an ONNX file or the content of one, and `feed` maps the names of its inputs to
    arrays. Raises EngineError if the run fails or the child process crashes.
    """
    with TemporaryDirectory(prefix="soa-onnx-") as folder:
        inputs, answers = Path(folder) / "inputs.npz", Path(folder) / "answers.npz"
        np.savez(inputs, *feed.values())
        if isinstance(network, bytes):
            path = Path(folder) / "network.onnx"
            path.write_bytes(network)
        else:
            path = network.resolve()
        files = {"path": str(path), "inputs": str(inputs), "answers": str(answers)}
        payload = {**files, "names": [*feed]}
        outcome = run_isolated(f"{__name__}:answer", payload, Path(folder), _TIME_LIMIT_S)
        if not outcome.ok:
            raise EngineError(f"ONNX Runtime, in a process of its own: {outcome.error}")
        return _read_arrays(answers)


def answer(path: str, names: list[str], inputs: str, answers: str) -> None:
    """Run the network in the file `path`, and write its outputs to the file `answers`. The child
    calls this. The arrays in the file `inputs` are its inputs, in the order of `names`."""
    session = open_session(Path(path), torch.device("cpu"), threads=1)
    feed = dict(zip(names, _read_arrays(Path(inputs)), strict=True))
    np.savez(answers, *session.run(None, feed))  # None: all outputs


def _read_arrays(path: Path) -> list[Any]:
    """Read the arrays that `np.savez` wrote without names, in the order in which they were
    given."""
    with np.load(path) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
