"""Staging: running on a device that the data does not lie on, by copies through reused memory.

For those who must copy. Between host and GPU the copies go through pinned memory, one transfer for
each collection; only the columns that the model reads are taken and only the rows that it answers
are written back, so the caller's other columns and padding stay untouched.
"""

from __future__ import annotations

import torch

from runtime.session import Collections, Session, by_name, check_memory
from soa.layout import Layout
from soa.memory import Collection, Device, allocate
from soa.signature import BoundBlock


class Staging:
    """Runs a session on collections of any device. Serves one thread at a time.

    It owns its staging memory, on the session's device and pinned on the host, as large as the
    largest event so far.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._buffers: dict[tuple[str, str], _Buffer] = {}

    def run(self, inputs: Collections, outputs: Collections) -> None:
        """Copy in, run, copy out; the outputs are ready when this returns.

        Raises BindError as `Session.bind` does.
        """
        signature = self.session.signature
        given = by_name(inputs, signature.input_collections, "input")
        written = by_name(outputs, signature.output_collections, "output")
        every = {**given, **written}
        rows = check_memory(signature, given, written)
        there = {
            name: self._buffer(name, "device").collection(rows[signature.rows_of[name]])
            for name in every
        }
        for name, theirs in every.items():
            if name in given:
                self._copy_in(name, theirs, there[name])
        self.session.run(
            {name: there[name] for name in given}, {name: there[name] for name in written}
        )
        for name, theirs in written.items():
            self._copy_out(name, there[name], theirs)

    def _copy_in(self, name: str, theirs: Collection, mine: Collection) -> None:
        blocks = self.session.signature.inputs
        pinned = self._pinned(name, theirs, mine)
        _copy_blocks(blocks, name, theirs, pinned or mine)
        if pinned is not None:
            _bytes(mine).copy_(_bytes(pinned), non_blocking=True)
        else:
            _wait(theirs, mine)

    def _copy_out(self, name: str, mine: Collection, theirs: Collection) -> None:
        blocks = self.session.signature.outputs
        pinned = self._pinned(name, theirs, mine)
        if pinned is not None:
            _bytes(pinned).copy_(_bytes(mine), non_blocking=True)
            _wait(mine)
        _copy_blocks(blocks, name, pinned or mine, theirs)
        _wait(mine, theirs)

    def _pinned(self, name: str, theirs: Collection, mine: Collection) -> Collection | None:
        """What a copy between host and GPU goes through, in one transfer."""
        one_side = theirs.device.type == "cpu" and mine.device.type != "cpu"
        return (
            self._buffer(name, "pinned").collection(mine.n)
            if one_side and mine.buffer is not None
            else None
        )

    def _buffer(self, name: str, where: str) -> _Buffer:
        key = (name, where)
        if key not in self._buffers:
            layout = self.session.layout(name)
            device = self.session.device if where == "device" else Device()
            pinned = device.type == "cpu" and torch.cuda.is_available()
            self._buffers[key] = _Buffer(layout, device, pinned)
        return self._buffers[key]


class _Buffer:
    """Memory for one collection, made larger when an event needs it."""

    def __init__(self, layout: Layout, device: Device, pinned: bool) -> None:
        self._layout = layout
        self._device = device
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._columns: Collection | None = None

    def collection(self, n: int) -> Collection:
        """A collection of exactly n rows, so that no more than those are transferred."""
        if self._layout.storage != "buffer":
            if self._columns is None or self._columns.capacity < n:
                self._columns = Collection(self._layout, n, self._device)
            return self._columns.rows(n)
        need = self._layout.nbytes(n)
        if self._memory is None or self._memory.numel() < need:
            self._memory = self._allocate(need)
        return Collection.wrap(self._layout, self._memory.narrow(0, 0, need), n)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._pinned:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        return allocate(nbytes, self._layout.alignment, self._device).tensor()


def _copy_blocks(
    blocks: tuple[BoundBlock, ...], name: str, source: Collection, into: Collection
) -> None:
    for bound in blocks:
        if bound.block.collection != name:
            continue
        n = 1 if bound.plan.kind == "scalars" else source.n
        for column, k in bound.plan.components:
            piece = into.component(column, k).narrow(0, 0, n)
            piece.copy_(source.component(column, k).narrow(0, 0, n), non_blocking=True)


def _bytes(collection: Collection) -> torch.Tensor:
    assert collection.buffer is not None
    return collection.buffer


def _wait(*ends: Collection) -> None:
    """Until copies between the collections have arrived; on a CPU they have."""
    for device in {c.device for c in ends if c.device.type != "cpu"}:
        torch.cuda.current_stream(device).synchronize()
