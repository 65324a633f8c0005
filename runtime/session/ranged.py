"""One model with several artifacts: at a small n another one may be faster than at a large n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from engines.base import Executable, Prepared
from engines.errors import RunError
from soa.memory import Span

if TYPE_CHECKING:
    import torch


class RangedExecutable(Executable):
    """Runs each n on the artifact chosen for it; for signatures with one row dimension.

    `below` holds `(rows, executable)` with `rows` ascending. The first one whose `rows` is greater
    than n runs; if there is none, `otherwise` runs.
    """

    def __init__(self, below: Sequence[tuple[int, Executable]], otherwise: Executable) -> None:
        self._below = list(below)
        self._otherwise = otherwise

    def at(self, n: int) -> Executable:
        """Return the artifact that runs n rows."""
        return next((artifact for rows, artifact in self._below if n < rows), self._otherwise)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.at(_row_count(arguments[0]))(arguments)

    def prepare(self, arguments: Sequence[Span]) -> Prepared:
        return _RangedCall(self, arguments)

    def recordable(self) -> RangedExecutable:
        """Return the same artifacts, opened so that their runs can be recorded into CUDA graphs."""
        below = [(rows, artifact.recordable()) for rows, artifact in self._below]
        return RangedExecutable(below, self._otherwise.recordable())

    def close(self) -> None:
        """Close every artifact, even if closing one fails; then the last error is raised."""
        with ExitStack() as artifacts:
            artifacts.callback(self._otherwise.close)
            for _, artifact in reversed(self._below):
                artifacts.callback(artifact.close)


class _RangedCall(Prepared):
    """One set of arguments, prepared for each artifact that the number of rows needed so far."""

    def __init__(self, executable: RangedExecutable, arguments: Sequence[Span]) -> None:
        self._executable = executable
        self._arguments = list(arguments)
        self._calls: dict[int, Prepared] = {}  # by id of the artifact, which `executable` keeps
        self._current = self._prepared_call()

    @property
    def current(self) -> Prepared:
        """The prepared call for the current number of rows."""
        return self._current

    def run(self, stream: int = 0, /) -> None:
        self._current.run(stream)

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace arguments as `Prepared.replace` does; the call for the new row count is used."""
        self._current.replace(changes)  # raises, without any change, while a thread is running it
        for i, span in changes.items():
            self._arguments[i] = span
        for key, call in list(self._calls.items()):
            if call is not self._current:
                try:
                    call.replace(changes)
                except RunError:
                    del self._calls[key]  # it is made again when an n needs it
        self._current = self._prepared_call()

    def _prepared_call(self) -> Prepared:
        """Return the prepared call for the row count of the arguments; it is made if necessary."""
        chosen = self._executable.at(_row_count(self._arguments[0]))
        if id(chosen) not in self._calls:
            self._calls[id(chosen)] = chosen.prepare(self._arguments)
        return self._calls[id(chosen)]


def _row_count(carrier: Span | torch.Tensor) -> int:
    """Return the row count of a call from its first argument, whose shape carries it."""
    return carrier.shape[0]
