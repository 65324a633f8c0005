"""The native runner from Python: one call without the GIL, nothing allocated per event.

See soa_runner.h for what it promises; this file ties memory to it and keeps it alive.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import Executable
from engines.errors import RunError
from engines.native import _native
from engines.processes import Lock
from soa.memory import Span, span_of

if TYPE_CHECKING:
    import torch

_native.set_error(RunError)

SHIM = Path(_native.__file__).parent / "libsoa_shim.so"
"""What runs in place of torch, for artifacts built so; on x86-64 alone."""


class NativeExecutable(Executable):
    """An opened library, its weights held once for any number of threads.

    `instances` is how many threads run at the same moment (more wait): by default one a core. With
    0, one runs at a time and a run may be recorded into a CUDA graph.
    `threads` is how many OpenMP threads one run may use; with 1, every thread gets the same bits,
    whatever torch is set to there.
    """

    def __init__(
        self,
        library: Path,
        device: str | torch.device,
        instances: int | None = None,
        threads: int = 1,
    ) -> None:
        self._open = partial(NativeExecutable, library, device, 0, threads)
        self._recordable: NativeExecutable | None = None
        self._lock = Lock()
        self._tiles: tuple[str, int, int] | None = None
        self._whole: NativeExecutable | None = None
        self._model = _native.Model(
            str(library),
            str(device),
            str(library.parent),
            (os.cpu_count() or 1) if instances is None else instances,
            threads,
        )

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(a) for a in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> PreparedCall:
        """Tie arguments to the artifact, to run again and again."""
        call = self._model.prepare([a[:3] for a in arguments])
        if self._tiles is not None:
            call.tile(*self._tiles)
        return PreparedCall(call, arguments)

    def in_tiles(self, kinds: str, rows: int, threads: int = 1) -> NativeExecutable:
        """The same opened library, whose calls run on `rows` rows at a time, on `threads` threads.

        That is where a call has twice as many; see soa_call_tile in soa_runner.h, also for `kinds`.
        With 0 rows: on all at once.
        """
        made = copy.copy(self)
        made._tiles = (kinds, rows, threads)
        made._whole = self  # with whom a cache's files stay in use
        return made

    def recordable(self) -> NativeExecutable:
        """The same artifact, opened once more so that its runs may be recorded into CUDA graphs.

        On a GPU that holds the weights a second time.
        """
        with self._lock:
            if self._recordable is None:
                self._recordable = self._open()
            return self._recordable

    def close(self) -> None:
        """Let running calls end; refuse later ones with RunError."""
        with self._lock:
            if self._recordable is not None:
                self._recordable.close()
        self._model.close()


class PreparedCall:
    """Arguments tied to an artifact. `run(stream)` is the native call itself.

    It keeps the memory alive. Two threads may not run one prepared call at once: RunError.
    """

    def __init__(self, call: _native.Call, arguments: Sequence[Span]) -> None:
        self.call = call
        self._arguments = list(arguments)
        self.run: Callable[..., None] = call.run

    @property
    def current(self) -> PreparedCall:
        return self

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Other memory of the same kind, by argument: another n, or address. All or none."""
        self.call.update([(i, span[:3]) for i, span in changes.items()])
        for i, span in changes.items():
            self._arguments[i] = span


def gpus() -> list[int]:
    """The architecture of each NVIDIA GPU that the driver sees, as 90 of sm_90; RunError without a
    driver. No torch is asked."""
    return _native.gpus()


def run_many(calls: Sequence[PreparedCall], threads: int, stream: int = 0) -> None:
    """Run prepared calls on `threads` native threads in one call without the GIL."""
    _native.run_many([prepared.call for prepared in calls], threads, stream)
