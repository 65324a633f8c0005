"""Run an artifact in tiles: on a fixed number of rows at a time, in the same bound memory.

The arguments of a tile are those of the run, moved to the tile's first row. A matrix (F, S) keeps
its pitch S, so its last column ends beyond the memory. A run reads only its n rows, not beyond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engines.base import Executable, Prepared
from engines.native import NativeExecutable
from soa.dtypes import itemsize
from soa.memory import Span, span_of
from soa.signature import Signature

if TYPE_CHECKING:
    import torch


def in_tiles(
    executable: Executable, signature: Signature, rows: int, threads: int = 1
) -> Executable:
    """Return an executable that runs `executable` on tiles of `rows` rows each.

    Fewer than two tiles of rows are run at once. If `rows` is 0, or the signature allows no tiles,
    `executable` itself is returned. No row's answer may depend on other rows. With the native
    runner `threads` threads share the tiles, and the answers are the same bits. Other engines use
    threads inside each run.
    """
    kinds = signature.tile_kinds
    if not rows or kinds is None:
        return executable
    if isinstance(executable, NativeExecutable):
        return executable.in_tiles(kinds, rows, threads)
    return _Tiled(executable, kinds, rows)


class _Tiled(Executable):
    """Runs `executable` on tiles of `rows` rows. `kinds`: see `Signature.tile_kinds`."""

    def __init__(self, executable: Executable, kinds: str, rows: int) -> None:
        self._executable = executable
        self._kinds = kinds
        self._rows = rows

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(argument) for argument in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> Prepared:
        return _TiledCall(self, arguments)

    def prepare_tiles(self, arguments: Sequence[Span]) -> list[Prepared]:
        """Prepare the calls of a run, one for each tile.

        The first argument is the row carrier: its shape says how many rows there are.
        """
        n = arguments[0].shape[0]
        if n == 0:
            return [self._executable.prepare(arguments)]
        size = self._rows if n >= 2 * self._rows else n
        starts = range(0, n, size)
        return [self._prepare_tile(arguments, start, min(size, n - start)) for start in starts]

    def _prepare_tile(self, arguments: Sequence[Span], begin: int, n: int) -> Prepared:
        """Prepare the call of a tile: the n rows from row `begin` on."""
        kinds = zip(self._kinds, arguments, strict=True)
        return self._executable.prepare([_cut_span(span, kind, begin, n) for kind, span in kinds])

    def recordable(self) -> Executable:
        return _Tiled(self._executable.recordable(), self._kinds, self._rows)

    def close(self) -> None:
        self._executable.close()


class _TiledCall(Prepared):
    """A call that runs the engine's calls of all tiles. These refuse a second thread themselves."""

    def __init__(self, executable: _Tiled, arguments: Sequence[Span]) -> None:
        self._executable = executable
        self._arguments = list(arguments)
        self._calls = executable.prepare_tiles(arguments)

    def run(self, stream: int = 0, /) -> None:
        for call in self._calls:
            call.run(stream)

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace arguments as `Prepared.replace` does; the calls of all tiles are made anew."""
        for call in self._calls:
            call.replace({})  # raises while a thread is running it
        arguments = [changes.get(i, span) for i, span in enumerate(self._arguments)]
        self._arguments, self._calls = arguments, self._executable.prepare_tiles(arguments)


def _cut_span(span: Span, kind: str, begin: int, n: int) -> Span:
    """Return an argument of a tile, which has the n rows from row `begin` on.

    `span`: the argument of the whole run. `kind`: its letter in `Signature.tile_kinds`.
    """
    if kind == "-":  # all rows share it
        return span
    # The row carrier ("n") has no elements, so it stays where it is.
    address = span.address if kind == "n" else span.address + begin * itemsize(span.dtype)
    # A matrix ("m") keeps its shape, which has the pitch; the row carrier has its row count.
    shape = span.shape if kind == "m" else (n, *span.shape[1:])
    return span._replace(address=address, shape=shape)
