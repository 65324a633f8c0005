"""The native runner for Python: a call runs without the GIL and allocates no memory.

soa_runner.h describes its guarantees. This file ties memory to calls and keeps the memory alive.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engines.base import Executable
from engines.errors import RunError
from engines.native import _native
from engines.processes import Lock
from soa.memory import Span, span_of

if TYPE_CHECKING:
    import torch

_native.set_error(RunError)

count_between = _native.count_between
"""Counts how many values fall into each bin: common/counting.h describes the arguments."""

SHIM = Path(_native.__file__).parent / "libsoa_shim.so"
"""The library that replaces torch for artifacts of `aoti-standalone`. It exists only on x86-64."""


class _Tiling(NamedTuple):
    """How a call's rows are cut into tiles: the arguments of soa_call_tile in soa_runner.h."""

    kinds: str
    rows: int
    threads: int


class NativeExecutable(Executable):
    """An opened library. Its weights are held once for any number of threads.

    `instances`: how many threads can run at the same time (others wait); the default is one for
    each core. With 0, only one runs at a time, and a run may be recorded into a CUDA graph.
    `threads`: how many threads may compute one run. With 1, every calling thread gets the same
    bits, whatever its torch settings are.
    """

    def __init__(
        self,
        library: Path,
        device: str | torch.device,
        instances: int | None = None,
        threads: int = 1,
    ) -> None:
        self._open_recordable = partial(NativeExecutable, library, device, 0, threads)
        self._recordable: NativeExecutable | None = None
        self._lock = Lock()
        self._tiling: _Tiling | None = None
        self._untiled: NativeExecutable | None = None
        self._model = _native.Model(
            str(library),
            str(device),
            str(library.parent),
            (os.cpu_count() or 1) if instances is None else instances,
            threads,
        )

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(argument) for argument in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> PreparedCall:
        """Tie arguments to the artifact, so that it can run on them many times.

        Raises RunError if the artifact is closed, or does not take these arguments.
        """
        call = self._model.prepare([span[:3] for span in arguments])  # address, dtype, shape
        if self._tiling is not None:
            call.tile(*self._tiling)
        return PreparedCall(call, arguments)

    def in_tiles(self, kinds: str, rows: int, threads: int = 1) -> NativeExecutable:
        """Return the same opened library, whose calls process `rows` rows at a time.

        Calls with less than twice as many rows are not cut. With `rows` = 0 no call is. The tiles
        of a call run on `threads` threads. `kinds` is `Signature.tile_kinds`. See also
        soa_call_tile in soa_runner.h.
        """
        tiled = copy.copy(self)
        tiled._tiling = _Tiling(kinds, rows, threads)
        tiled._untiled = self  # as long as it exists, its files in a cache count as used
        return tiled

    def recordable(self) -> NativeExecutable:
        """Open the same artifact once more, so that its runs may be recorded into CUDA graphs.

        The weights take GPU memory a second time. Later calls return the same object.
        """
        with self._lock:
            if self._recordable is None:
                self._recordable = self._open_recordable()
            return self._recordable

    def close(self) -> None:
        """Wait for running calls to end; later calls raise RunError."""
        with self._lock:
            if self._recordable is not None:
                self._recordable.close()
        self._model.close()


class PreparedCall:
    """Arguments that are tied to an artifact. Their memory is kept alive.

    `run(stream)` is the native call. It raises RunError if another thread runs the same prepared
    call at this moment.
    """

    def __init__(self, call: _native.Call, arguments: Sequence[Span]) -> None:
        self.call = call
        self._arguments = list(arguments)
        self.run: Callable[..., None] = call.run

    @property
    def current(self) -> PreparedCall:
        return self

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments. `changes` maps the index of each to its new memory.

        Only n and the address may differ. If this fails, all arguments are as before.
        """
        self.call.update([(i, span[:3]) for i, span in changes.items()])
        for i, span in changes.items():
            self._arguments[i] = span


def missing_cpu_features(arch: str) -> str:
    """Return the CPU features that `arch` needs and this host lacks, as `avx2, fma`.

    The names are those of Linux. If `arch` is that of another kind of processor, this is
    "another processor family"; if this host can run its code, it is empty.
    """
    return _native.missing_cpu_features(arch)


def gpus() -> list[int]:
    """Return the architecture of each NVIDIA GPU that the driver sees, such as 90 for sm_90.

    This does not use torch. Raises RunError if there is no driver.
    """
    return _native.gpus()


def run_many(calls: Sequence[PreparedCall | None], threads: int, stream: int = 0) -> None:
    """Run prepared calls on `threads` native threads, all without the GIL.

    None in `calls` is skipped. If a call fails, the text of the RunError has its index in `calls`.
    """
    native = [None if prepared is None else prepared.call for prepared in calls]
    _native.run_many(native, threads, stream)
