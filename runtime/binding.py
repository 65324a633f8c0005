"""Binding: a model tied to the caller's buffers. Everything is checked here, once.

An artifact checks nothing when it runs: a wrong dtype, a missing column or too large an n is
garbage or heap corruption, without an error. So all of it is checked when memory is bound, and a
call afterwards checks nothing but n.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from engines.engine import Executable, Prepared
from engines.errors import RunError
from runtime.errors import BindError
from runtime.streams import raw_stream, torch_stream
from soa.arguments import argument_tensors, carrier
from soa.collection import Collection
from soa.layout import Layout
from soa.signature import Signature

Collections = Collection | Mapping[str, Collection]
Rows = SupportsIndex | Mapping[str, SupportsIndex]


class Binding:
    """A callable that runs the model on the bound memory; made by `Session.bind`.

    `binding()` runs on the rows bound; `binding(n)` on the first n of them (a mapping where there
    are several row dimensions), up to the collection's capacity and the compiled maximum. On a GPU
    it runs on `stream=` (torch's current one by default), synchronises nothing, and the outputs
    are ready in stream order. It borrows the memory and keeps the collections alive. One thread at
    a time may use a binding; different bindings of one session may run at once.
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
        device: torch.device,
    ) -> None:
        self.signature = signature
        self._device = device
        self._executable = executable
        self._alone = _Alone()
        tied = _tie(signature, inputs, outputs, device)
        self._arguments = list(tied.arguments)
        prepare = getattr(executable, "prepare", None)
        self.prepared: Prepared | None = prepare(self._arguments) if prepare else None
        """The engine's own call behind this binding, where it has one."""
        self._take(tied)

    def _take(self, tied: _Tied) -> None:
        self._tied = tied
        self.inputs = tied.inputs
        self.outputs = tied.outputs
        self.rows = tied.rows
        self.writes = _writes(self.signature, tied.rows)
        """Whether there is an output element at all; where there is none, a call does nothing."""

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        """Run. Raises BindError if a new n lies outside the compiled range or the buffers.

        `stream`: a torch or CuPy stream of the model's GPU, or a raw handle.
        """
        if rows is not None:
            with self._alone:
                self._resize(rows)
                self._launch(stream)
            return
        self._launch(stream)

    def _launch(self, stream: Any) -> None:
        if stream is not None or self._device.type != "cpu":
            self._run_on(raw_stream(stream, self._device))
        elif self.writes:
            if self.prepared:
                self.prepared.run()
            else:
                self._executable(self._arguments)

    def _run_on(self, handle: int) -> None:
        if not self.writes:
            return
        if self.prepared:
            self.prepared.run(handle)
            return
        with torch.cuda.stream(torch_stream(handle, self._device)):
            self._executable(self._arguments)

    def resize(self, rows: Rows) -> None:
        """Use another n of the same memory: O(1), nothing else is checked again."""
        with self._alone:
            self._resize(rows)

    def _resize(self, rows: Rows) -> None:
        wanted = _row_counts(rows, self.rows)
        if wanted == self.rows:
            return
        if wanted.keys() != self.rows.keys():
            raise BindError(f"rows for {sorted(wanted)}, this model has {sorted(self.rows)}")
        for dim, n in wanted.items():
            low, high = self.signature.ranges[dim].min, self._tied.limits[dim]
            if not low <= n <= high:
                raise BindError(
                    f"{dim} = {n} is outside {low} … {high} (compiled for up to "
                    f"{self.signature.ranges[dim].max}, and the bound memory holds {high})"
                )
        self._replace(
            {
                i: carrier(wanted[dim], self._device)
                if whole is None
                else whole.narrow(0, 0, wanted[dim])
                for i, dim, whole in self._tied.by_rows
            }
        )
        self.rows = wanted
        self.writes = _writes(self.signature, wanted)

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Other collections of the same layouts, checked as `Session.bind` checks them: O(1) in n.

        Raises BindError, and the binding is then what it was. The memory bound before is let go.
        """
        with self._alone:
            tied = _tie(
                self.signature,
                by_name(inputs, self.signature.input_collections, "input"),
                by_name(outputs, self.signature.output_collections, "output"),
                self._device,
            )
            self._replace(dict(enumerate(tied.arguments)))
            self._take(tied)

    def _replace(self, changes: Mapping[int, torch.Tensor]) -> None:
        if self.prepared:
            self.prepared.replace(changes)
        for i, argument in changes.items():
            self._arguments[i] = argument


@dataclass(frozen=True)
class _Tied:
    """Collections that passed every check, and what follows from them."""

    inputs: dict[str, Collection]
    outputs: dict[str, Collection]
    rows: dict[str, int]
    limits: dict[str, int]
    arguments: list[torch.Tensor]
    by_rows: list[tuple[int, str, torch.Tensor | None]]
    """Arguments whose shape is n itself, with the whole memory behind each; None for a carrier."""


def _tie(
    signature: Signature,
    inputs: Mapping[str, Collection],
    outputs: Mapping[str, Collection],
    device: torch.device,
) -> _Tied:
    check_collections(signature, inputs, outputs, device)
    every = {**inputs, **outputs}
    rows = _common_rows(signature, every)
    check_rows(signature, rows)
    limits = {dim: signature.ranges[dim].max for dim in signature.dims}
    for name, collection in every.items():
        dim = signature.rows_of[name]
        limits[dim] = min(limits[dim], collection.capacity)
    by_rows = [
        (
            i,
            a.rows,
            None if a.kind == "carrier" else every[a.collection].component(a.column, a.component),
        )
        for i, a in enumerate(signature.arguments)
        if a.kind in ("carrier", "column")
    ]
    arguments = argument_tensors(signature, every, rows)
    return _Tied(dict(inputs), dict(outputs), rows, limits, arguments, by_rows)


class _Alone:
    """Refuses a second thread, where waiting would hide that two share one binding."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RunError("another thread is using this binding: give each thread its own")

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _writes(signature: Signature, rows: Mapping[str, int]) -> bool:
    return any(bound.plan.kind == "scalars" or rows[bound.rows] for bound in signature.outputs)


def _row_counts(rows: Rows, dims: Mapping[str, int]) -> dict[str, int]:
    """Row counts by dimension as plain ints, also from NumPy's integers."""
    if type(rows) is int:
        return dict.fromkeys(dims, rows)
    given = rows if isinstance(rows, Mapping) else dict.fromkeys(dims, rows)
    try:
        if any(isinstance(n, bool) for n in given.values()):
            raise TypeError
        return {dim: operator.index(n) for dim, n in given.items()}
    except TypeError:
        raise BindError(f"rows are an integer, or integers by dimension; found {rows!r}") from None


def by_name(given: Collections, names: tuple[str, ...], role: str) -> dict[str, Collection]:
    """One collection, or several by name, as a dict; raises BindError if they are not those."""
    if isinstance(given, Collection):
        if len(names) != 1:
            raise BindError(f"the model has {role} collections {', '.join(names)}: give a dict")
        return {names[0]: given}
    if not isinstance(given, Mapping):
        raise BindError(
            f"{role} is a {type(given).__name__}: give a Collection, or a dict of them by name"
        )
    if set(given) != set(names):
        raise BindError(
            f"{role} collections {', '.join(sorted(given)) or 'none'} given, "
            f"the model has {', '.join(names)}"
        )
    return dict(given)


def check_collections(
    signature: Signature,
    inputs: Mapping[str, Collection],
    outputs: Mapping[str, Collection],
    device: torch.device,
) -> None:
    """Type, layout, device, writability and overlap of every collection. Raises BindError."""
    for name, collection in {**inputs, **outputs}.items():
        if not isinstance(collection, Collection):
            raise BindError(f"{name!r} is a {type(collection).__name__}, not a Collection")
        _check_layout(name, collection.layout, signature.layouts[name])
        if collection.device != device and not _same_device(collection.device, device):
            raise BindError(
                f"collection {name!r} lies on {collection.device}, the session runs on {device}: "
                "load the model on the device where the data is"
            )
    for name, collection in outputs.items():
        if inputs.get(name, collection) is not collection:
            raise BindError(
                f"the model reads and writes collection {name!r}: give the same one as input and "
                "as output"
            )
        if collection.readonly:
            raise BindError(f"output collection {name!r} is read-only memory")
    _check_overlap(inputs, outputs)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _check_layout(name: str, found: Layout, wanted: Layout) -> None:
    if found == wanted:
        return
    where = f"collection {name!r}"
    for column in wanted.columns:
        have = found.by_name.get(column.name)
        if have is None:
            raise BindError(f"{where} has no column {column.name!r}")
        if have.dtype != column.dtype:
            raise BindError(
                f"{where}: column {column.name!r} is {have.dtype}, "
                f"the model was compiled for {column.dtype}"
            )
        if (have.kind, have.shape) != (column.kind, column.shape):
            raise BindError(
                f"{where}: column {column.name!r} is {have.kind} {list(have.shape)}, "
                f"the model was compiled for {column.kind} {list(column.shape)}"
            )
    extra = [c.name for c in found.columns if c.name not in wanted.by_name]
    if extra:
        raise BindError(f"{where} has a column {extra[0]!r} that the model's layout does not have")
    if [c.name for c in found.columns] != [c.name for c in wanted.columns]:
        raise BindError(
            f"{where} has its columns in another order: "
            f"{', '.join(c.name for c in found.columns)}; the model was compiled for "
            f"{', '.join(c.name for c in wanted.columns)}"
        )
    if found.storage == wanted.storage == "columns" and found.alignment >= wanted.alignment:
        return  # separate columns that are aligned better than needed
    if found.alignment != wanted.alignment:
        raise BindError(
            f"{where} is aligned to {found.alignment} bytes, "
            f"the model was compiled for {wanted.alignment}"
        )
    raise BindError(
        f"{where} is stored as {found.storage!r}, the model was compiled for {wanted.storage!r}"
    )


def _check_overlap(inputs: Mapping[str, Collection], outputs: Mapping[str, Collection]) -> None:
    """An output may share no byte with any other bound memory."""
    spans = [
        (piece.data_ptr(), piece.data_ptr() + piece.nbytes, name, name in outputs)
        for name, collection in {**inputs, **outputs}.items()
        for piece in collection.memory()
        if piece.nbytes
    ]
    spans.sort()
    reach, holder, holder_out = 0, "", False
    for start, end, name, is_output in spans:
        if start < reach and (is_output or holder_out):
            raise BindError(f"collections {holder!r} and {name!r} overlap in memory")
        if end > reach:
            reach, holder, holder_out = end, name, is_output


def _common_rows(signature: Signature, collections: Mapping[str, Collection]) -> dict[str, int]:
    rows: dict[str, int] = {}
    by: dict[str, str] = {}
    for name, collection in collections.items():
        dim = signature.rows_of[name]
        if rows.setdefault(dim, collection.n) != collection.n:
            raise BindError(
                f"collection {name!r} has {collection.n} rows, {by[dim]!r} has {rows[dim]}: "
                f"both are rows of {dim!r}"
            )
        by.setdefault(dim, name)
    return {dim: rows[dim] for dim in signature.dims}


def check_rows(signature: Signature, rows: Mapping[str, int]) -> None:
    """Raise BindError if a row count lies outside the compiled range."""
    for dim, n in rows.items():
        low, high = signature.ranges[dim].min, signature.ranges[dim].max
        if not low <= n <= high:
            raise BindError(
                f"{dim} = {n} is outside the compiled range {low} … {high}: "
                "split the batch, or build the model with a larger rows: max"
            )
