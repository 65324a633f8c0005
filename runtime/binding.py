"""Binding: a model tied to the caller's buffers. Everything is checked here, once.

An artifact checks nothing when it runs: a wrong dtype, a missing column or too large an n is
garbage or heap corruption, without an error. So all of it is checked when memory is bound, and a
call afterwards checks nothing but n.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import SupportsIndex

import torch

from engines.engine import Executable, Prepared
from runtime.errors import BindError
from soa.arguments import argument_tensors, carrier
from soa.collection import Collection
from soa.layout import Layout
from soa.signature import Signature

Collections = Collection | Mapping[str, Collection]
Rows = SupportsIndex | Mapping[str, SupportsIndex]


class Binding:
    """A callable that runs the model on the bound memory; made by `Session.bind`.

    `binding()` runs on the rows bound; `binding(n)` on the first n of them (a mapping where there
    are several row dimensions), up to the collection's capacity and the compiled maximum. It
    borrows the memory and keeps the collections alive. One thread at a time may use a binding;
    different bindings of one session may run at once.
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
        device: torch.device,
    ) -> None:
        check_collections(signature, inputs, outputs, device)
        self.signature = signature
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.rows: dict[str, int] = _common_rows(signature, {**inputs, **outputs})
        self._limits = {
            dim: min(
                signature.ranges[dim].max,
                *(
                    c.capacity
                    for name, c in {**inputs, **outputs}.items()
                    if signature.rows_of[name] == dim
                ),
            )
            for dim in signature.dims
        }
        check_rows(signature, self.rows)
        self._device = device
        self._arguments = argument_tensors(signature, {**inputs, **outputs}, self.rows)
        prepare = getattr(executable, "prepare", None)
        self.prepared: Prepared | None = prepare(self._arguments) if prepare else None
        """The engine's own call behind this binding, where it has one."""
        self._run: Callable[[], None] = partial(executable, self._arguments)
        if self.prepared:
            self._run = self.prepared.run
            if device.type == "cuda":
                self._run = partial(_run_on_current_stream, self.prepared, device)
        # Arguments whose shape is n itself, with the whole memory behind each.
        self._by_rows = [
            (
                i,
                a.rows,
                None if a.kind == "carrier" else self._whole(a.collection, a.column, a.component),
            )
            for i, a in enumerate(signature.arguments)
            if a.kind in ("carrier", "column")
        ]

    def _whole(self, collection: str, column: str, component: int) -> torch.Tensor:
        owner = self.inputs.get(collection) or self.outputs[collection]
        return owner.component(column, component)

    def __call__(self, rows: Rows | None = None) -> None:
        """Run. Raises BindError if a new n lies outside the compiled range or the buffers."""
        if rows is not None:
            self.resize(rows)
        self._run()

    def resize(self, rows: Rows) -> None:
        """Use another n of the same memory: O(1), nothing else is checked again."""
        wanted = _row_counts(rows, self.rows)
        if wanted == self.rows:
            return
        if wanted.keys() != self.rows.keys():
            raise BindError(f"rows for {sorted(wanted)}, this model has {sorted(self.rows)}")
        for dim, n in wanted.items():
            low, high = self.signature.ranges[dim].min, self._limits[dim]
            if not low <= n <= high:
                raise BindError(
                    f"{dim} = {n} is outside {low} … {high} (compiled for up to "
                    f"{self.signature.ranges[dim].max}, and the bound memory holds {high})"
                )
        for i, dim, whole in self._by_rows:
            n = wanted[dim]
            argument = carrier(n, self._device) if whole is None else whole.narrow(0, 0, n)
            self._arguments[i] = argument
            if self.prepared:
                self.prepared.replace(i, argument)
        self.rows = wanted


def _run_on_current_stream(prepared: Prepared, device: torch.device) -> None:
    prepared.run(torch.cuda.current_stream(device).cuda_stream)


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
