"""Test whether a run touched memory that it must not touch.

To find writes, a pattern fills the memory before the run; afterwards it must be unchanged. A read
past an end reaches a page without access, and the process is killed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from runtime.session import Session
from soa.dtypes import itemsize
from soa.layout import Layout
from soa.memory import Collection, Span, read_block
from soa.signature import Signature

Side = Literal["front", "back"]

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def make_poisoned(
    layout: Layout,
    n: int,
    capacity: int,
    pattern: int,
    device: torch.device | str = "cpu",
    guard: Side | None = None,
) -> Collection:
    """Make a collection of `n` rows in which every byte, also of the padding, is `pattern`.

    `guard`: which end of the memory, "front" or "back", touches a page without access; for a GPU it
    is ignored.
    """
    if guard and torch.device(device).type == "cpu":
        collection = make_guarded_collection(layout, n, capacity, guard)
    else:
        collection = Collection(layout, n, device, capacity=capacity)
    for span in collection.spans():
        if span.device.type == "cpu":
            ctypes.memset(span.address, pattern, span.nbytes)
        else:
            span.raw().tensor().fill_(pattern)
    return collection


def same_bytes(first: Collection, second: Collection) -> bool:
    """Whether two collections have the same bytes, also in the padding.

    They must have the same layout, capacity and device.
    """
    return all(map(_have_same_bytes, first.spans(), second.spans()))


def _have_same_bytes(first: Span, second: Span) -> bool:
    """Whether two spans of one size, on one device, have the same bytes."""
    if first.device.type == "cpu":
        return bool(_libc.memcmp(first.address, second.address, first.nbytes) == 0)
    return torch.equal(first.raw().tensor(), second.raw().tensor())


def wrote_outside(signature: Signature, name: str, before: Collection, after: Collection) -> bool:
    """Whether a run changed a collection outside the rows and columns that it must write.

    `name`: the collection's name. `before`: a copy of the whole collection from before the run.
    `after`: the collection or the window that the run got; its rows of the output columns may have
    changed.
    """
    expected = before.to(before.device)
    rows = expected.window(after.start, after.start + after.n)
    for bound in signature.outputs:
        if bound.block.collection == name:
            rows.copy_from(after, bound.plan.components)
    return not same_bytes(expected, after.whole)


def find_memory_faults(
    signature: Signature,
    inputs: Mapping[str, Collection],
    written: Mapping[str, Collection],
    before: Mapping[str, Collection],
) -> Iterator[str]:
    """Yield a message for each collection in which a run changed what it must not change.

    `written`: the output collections. `before`: copies of the whole collections, from before the
    run.
    """
    for name, collection in inputs.items():
        if name not in written and not same_bytes(before[name], collection.whole):
            yield f"the artifact changed its input collection {name!r}"
    for name, collection in written.items():
        if wrote_outside(signature, name, before[name], collection):
            yield f"the artifact wrote outside its columns or rows in collection {name!r}"


@dataclass(frozen=True)
class PoisonedRun:
    """The values of each output of a run, and the messages of `find_memory_faults` about it."""

    outputs: dict[str, torch.Tensor]
    faults: list[str]


def run_poisoned(
    session: Session,
    inputs: Mapping[str, Mapping[str, torch.Tensor]],
    case: Mapping[str, int],
    pad: int,
    poison: int,
    spare: int = 0,
    guard: Side | None = None,
    moved: bool = False,
) -> PoisonedRun:
    """Run once in new memory whose inputs are padded with `pad`, and whose outputs are `poison`.

    `case`: the number of rows by dimension. `inputs`: values by collection and column, of at least
    so many rows. `spare`: how many rows of capacity there are beyond them. `guard`: as in
    `make_poisoned`.

    `moved`: run on windows that begin at different odd rows of larger collections. Separate
    columns then begin an odd number of elements after a page boundary. In a buffer the padding of
    the last column reaches into a page without access.
    """
    signature = session.signature
    # The first row of each window: 1, 3, 5, …
    starts = {name: 2 * i + 1 if moved else 0 for i, name in enumerate(signature.layouts)}

    def allocate(name: str, pattern: int, device: str) -> Collection:
        """Make a collection with room for the rows before the window and the rows of the case."""
        layout, n = signature.layouts[name], starts[name] + case[signature.rows_of[name]]
        side = guard
        if moved:
            side = "back" if layout.storage == "buffer" else "front"
        return make_poisoned(layout, n, n + spare, pattern, device, side)

    def window(name: str, whole: Collection) -> Collection:
        """Return the part of a collection that the run gets."""
        return whole.window(starts[name], whole.n) if moved else whole

    read: dict[str, Collection] = {}
    for name in signature.input_collections:
        whole = allocate(name, pad, "cpu")
        for column in whole.layout.numbers:
            window(name, whole).fill(column.name, inputs[name][column.name])
        _poison_outputs(signature, name, whole, poison)
        if session.device.type != "cpu":
            whole = whole.to(session.device)
        read[name] = window(name, whole)
    written = {
        name: read.get(name) or window(name, allocate(name, poison, session.device))
        for name in signature.output_collections
    }
    faults = _run_and_find_faults(session, read, written)
    outputs = {
        output.name: read_block(output, written[output.block.collection])
        for output in signature.outputs
    }
    return PoisonedRun(outputs, faults)


def _run_and_find_faults(
    session: Session, inputs: Mapping[str, Collection], written: Mapping[str, Collection]
) -> list[str]:
    """Run the session, wait until it has ended, and return the messages of `find_memory_faults`."""
    bound = {**inputs, **written}
    before = {name: collection.whole.to(collection.device) for name, collection in bound.items()}
    session.run(inputs, written)
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return list(find_memory_faults(session.signature, inputs, written, before))


def _poison_outputs(signature: Signature, name: str, collection: Collection, pattern: int) -> None:
    """Fill the output columns of an input collection that the model also writes with `pattern`."""
    for bound in signature.outputs:
        if bound.block.collection == name:
            for column, k in bound.plan.components:
                collection.span(column, k).raw().tensor().fill_(pattern)


def same_answers(first: PoisonedRun, second: PoisonedRun) -> bool:
    """Whether two runs gave the same bits, also in NaN."""
    return all(
        torch.equal(
            first.outputs[name].contiguous().view(torch.uint8),
            second.outputs[name].contiguous().view(torch.uint8),
        )
        for name in first.outputs
    )


def make_guarded_collection(layout: Layout, n: int, capacity: int, side: Side) -> Collection:
    """Make a collection in CPU memory of which one side touches a page without access.

    `side`: "front" for the start of the memory, "back" for its end. Separate columns each have such
    a page. At the back, a gap smaller than the alignment may remain before the page.
    """
    if layout.storage == "buffer":
        memory = allocate_guarded(layout.nbytes(capacity), layout.alignment, side)
        return Collection.wrap(layout, memory, n, capacity=capacity)
    columns: dict[str, Span | list[Span]] = {}
    for column in layout.columns:
        rows = 1 if column.kind == "scalar" else capacity
        nbytes, alignment = rows * itemsize(column.dtype), layout.alignment_of(column.name)
        components = [
            allocate_guarded(nbytes, alignment, side).at(0, column.dtype, rows)
            for _ in range(column.components)
        ]
        columns[column.name] = components if column.kind == "eigen" else components[0]
    return Collection.from_columns(layout, columns, n)


def allocate_guarded(nbytes: int, alignment: int, side: Side) -> Span:
    """Allocate zeroed bytes between two pages without access, one of which they touch.

    `side`: "front" if the first byte touches a page, "back" if the last one does. `alignment`: in
    bytes, a divisor of the page size; at the back a smaller gap may remain.
    """
    pages = -(-nbytes // _PAGE)  # rounded up
    mapping = mmap.mmap(-1, (pages + 2) * _PAGE)
    front_page = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for address in (front_page, front_page + (1 + pages) * _PAGE):
        if _libc.mprotect(address, _PAGE, _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    unused = pages * _PAGE - nbytes if side == "back" else 0
    start = front_page + _PAGE + unused // alignment * alignment
    return Span(start, "uint8", (nbytes,), owner=mapping)
