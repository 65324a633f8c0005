"""Staging: run on another device than that of the data, by copies through reused memory.

Between host and GPU the copies go through pinned memory, in one transfer for each collection. Only
the columns that the model reads are copied in, and only the output rows are copied back, so the
caller's other columns and padding do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.session import Collections, Session, check_memory, name_collections
from soa.memory import CPU, Collection, Device, Span, allocate, span_of
from soa.signature import BoundBlock

if TYPE_CHECKING:
    import torch


class Staging:
    """Runs a session on collections of any device, for one thread at a time.

    It owns its staging memory, on the session's device and pinned on the host. This memory is as
    large as the largest event so far.

    Examples
    --------
    >>> from runtime import Staging
    >>> Staging(session).run(jets, tags)
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._separate: dict[tuple[str, Device], Collection] = {}
        self._buffers: dict[tuple[str, Device], Span] = {}

    def run(self, inputs: Collections, outputs: Collections) -> None:
        """Copy in, run, copy out; the outputs are ready when this returns.

        Raises BindError as `Session.bind` does.
        """
        signature = self.session.signature
        read, written = name_collections(signature, inputs, outputs)
        rows = check_memory(signature, read, written, any_start=True)
        staged = {
            name: self._staging_collection(name, rows[signature.rows_of[name]], self.session.device)
            for name in {**read, **written}
        }
        for name, theirs in read.items():
            self._copy_in(name, theirs, staged[name])
        self.session.run(
            {name: staged[name] for name in read}, {name: staged[name] for name in written}
        )
        for name, theirs in written.items():
            self._copy_out(name, staged[name], theirs)

    def _copy_in(self, name: str, theirs: Collection, staged: Collection) -> None:
        """Copy what the model reads of the caller's collection, `theirs`, into staging memory.

        A transfer from pinned memory may end after this returns, but it ends before the run, which
        comes after it in the stream.
        """
        pinned = self._find_pinned(theirs, staged, name)
        _copy_blocks(self.session.signature.inputs, name, theirs, pinned or staged)
        if pinned is None:
            _wait_for_copies(theirs, staged)
        else:
            _buffer_of(staged).copy_(_buffer_of(pinned), non_blocking=True)

    def _copy_out(self, name: str, staged: Collection, theirs: Collection) -> None:
        """Copy the output rows into the caller's collection, `theirs`, and wait for the copies."""
        pinned = self._find_pinned(theirs, staged, name)
        if pinned is not None:
            _buffer_of(pinned).copy_(_buffer_of(staged), non_blocking=True)
            _wait_for_copies(staged)
        _copy_blocks(self.session.signature.outputs, name, pinned or staged, theirs)
        _wait_for_copies(staged, theirs)

    def _find_pinned(self, theirs: Collection, staged: Collection, name: str) -> Collection | None:
        """Return the pinned memory through which a collection is copied in one transfer.

        None unless the copy is between the host and a GPU, and the columns are in one buffer.
        """
        to_or_from_gpu = theirs.device.type == "cpu" and staged.device.type != "cpu"
        if not to_or_from_gpu or staged.layout.storage != "buffer":
            return None
        return self._staging_collection(name, staged.n, CPU)

    def _staging_collection(self, name: str, n: int, device: Device) -> Collection:
        """Return staging memory for the collection `name` on a device, of exactly n rows.

        So only n rows are transferred. The memory is kept, and replaced if an event needs more.
        """
        layout, key = self.session.layout(name), (name, device)
        if layout.storage != "buffer":
            separate = self._separate.get(key)
            if separate is None or separate.capacity < n:
                separate = self._separate[key] = Collection(layout, n, device)
            return separate.rows(n)
        nbytes = layout.nbytes(n)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[key] = _allocate(nbytes, layout.alignment, device)
        return Collection.wrap(layout, buffer.first(nbytes).tensor(), n)


def _allocate(nbytes: int, alignment: int, device: Device) -> Span:
    """Allocate memory. On a host with a GPU, CPU memory is pinned, which makes transfers faster."""
    import torch

    if device.type == "cpu" and torch.cuda.is_available():
        return span_of(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True))
    return allocate(nbytes, alignment, device)


def _copy_blocks(
    blocks: tuple[BoundBlock, ...], name: str, source: Collection, into: Collection
) -> None:
    """Copy the columns that `blocks` have of the collection `name`."""
    for bound in blocks:
        if bound.block.collection == name:
            into.copy_from(source, bound.plan.components)


def _buffer_of(collection: Collection) -> torch.Tensor:
    """Return the whole memory of a collection, which must have the storage "buffer"."""
    assert collection.buffer is not None
    return collection.buffer


def _wait_for_copies(*collections: Collection) -> None:
    """Wait until the copies between collections are complete. On a CPU they already are."""
    devices = {collection.device for collection in collections if collection.device.type != "cpu"}
    for device in devices:
        import torch

        torch.cuda.current_stream(device).synchronize()
