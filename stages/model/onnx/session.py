"""ONNX Runtime as the model: it computes the answers that every artifact is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.errors import EngineError
from engines.onnx import answers_apart, open_session
from stages.errors import CaptureError, SourceError
from stages.model.fronts import InFront
from stages.model.onnx.file import read_onnx, replace_text_and_maps
from stages.model.onnx.graph import OnnxGraph

_FOR_MISSING = ("Imputer", "IsNaN", "TreeEnsembleClassifier", "TreeEnsembleRegressor")


class OnnxModel(torch.nn.Module):
    """A network in an ONNX file, which ONNX Runtime runs with one thread.

    With no rows ONNX Runtime ends the process for some operators (LSTM, GRU, Einsum). So if no
    input has a row, it is run with one row, whose answer is dropped; if only some inputs have none,
    it is run in a separate process. A file for exactly one row is run row by row.

    `notes` are sentences for the user: on a file for one row, and on outputs that are maps or text
    in the file and numbers here. `missing` tells whether the network has a step for missing values
    (NaN). `network` is the file's path or, if the model had to be changed, its bytes. Raises
    SourceError if the file cannot be opened, CaptureError for inputs that do not fit.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.training = False
        self.path = path
        model = read_onnx(path, weights=False)
        self.missing = any(node.op_type in _FOR_MISSING for node in model.graph.node)
        self.notes = tuple(replace_text_and_maps(model, path))
        self.network: Path | bytes = path
        if self.notes:
            changed = read_onnx(path)
            replace_text_and_maps(changed, path)
            self.network = changed.SerializeToString()
        try:
            self.session = open_session(self.network, torch.device("cpu"), 1)
        except EngineError as error:
            raise SourceError(f"{path}: {error}") from error
        self.one_row = all(entry.shape[:1] == [1] for entry in self.session.get_inputs())
        if self.one_row:
            self.notes += ("its file is for one row: each row is asked by itself",)

    def _run_rows(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run the network, row by row if the file is for one row. `feed` has the inputs by name,
        each with at least one row. Returns the outputs in the file's order."""
        count = len(next(iter(feed.values())))
        if not self.one_row or count == 1:
            answers: list[np.ndarray] = self.session.run(None, feed)
            return answers
        rows = [{name: x[i : i + 1] for name, x in feed.items()} for i in range(count)]
        answers_by_row = [self.session.run(None, row) for row in rows]
        return [np.concatenate(output) for output in zip(*answers_by_row, strict=True)]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the network on the blocks, in the order of its inputs. Raises CaptureError if they do
        not fit, or ONNX Runtime fails on them."""
        names = [entry.name for entry in self.session.get_inputs()]
        if len(names) != len(inputs):
            raise CaptureError(
                f"{self.path} has the inputs {', '.join(names)}; found {len(inputs)} blocks"
            )
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        rowless = [len(x) == 0 for x in feed.values()]
        try:
            if all(rowless):
                one_row = {name: np.zeros((1, *x.shape[1:]), x.dtype) for name, x in feed.items()}
                return tuple(torch.from_numpy(x[:0]) for x in self._run_rows(one_row))
            answers = answers_apart(self.network, feed) if any(rowless) else self._run_rows(feed)
            return tuple(map(torch.from_numpy, answers))
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in feed.items())
            raise CaptureError(
                f"{self.path} does not run on {shapes}: {' '.join(str(error).split())}. Its first "
                "dimension has to be free (export it with dynamic_shapes); a block can have dtype: "
                "and shape:, rows min:"
            ) from error


def as_torch(model: torch.nn.Module) -> torch.nn.Module:
    """The model with torch operations in place of ONNX Runtime. A model that does not use it is
    returned as it is. Raises SourceError if an operator has no torch form."""
    if isinstance(model, InFront):
        return model.around(as_torch(model.model))
    return OnnxGraph(model.path) if isinstance(model, OnnxModel) else model
