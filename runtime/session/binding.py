"""Binding: a model tied to the caller's buffers. Everything is checked here, once.

An artifact checks nothing when it runs: a wrong dtype, a missing column or too large an n is
garbage or heap corruption, without an error. So all of it is checked when memory is bound, and a
call afterwards checks nothing but n.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsIndex

import torch

from engines.base import Executable, Prepared
from engines.errors import RunError
from engines.native import PreparedCall
from engines.processes import OwnProcess
from runtime.errors import BindError
from runtime.session.rules import Collections, by_name, check_memory, require_device
from runtime.session.streams import raw_stream, torch_stream
from soa.memory import Collection, argument_tensors, carrier
from soa.signature import Signature

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
        self.device = device
        self._executable = executable
        self._alone = _Alone()
        self._process = OwnProcess()
        tied = _tie(signature, inputs, outputs, device)
        self._arguments = list(tied.arguments)
        prepare = getattr(executable, "prepare", None)
        self.prepared: Prepared | None = prepare(self._arguments) if prepare else None
        """The engine's own call behind this binding, where it has one."""
        self._on_cpu = device.type == "cpu"
        plain = partial(executable, self._arguments)
        self._run: Callable[[], object] = self.prepared.run if self.prepared else plain
        self._take(tied)

    def _take(self, tied: _Tied) -> None:
        self._tied = tied
        self.inputs = tied.inputs
        self.outputs = tied.outputs
        self.rows = tied.rows
        self.writes = _writes(self.signature, tied.rows)
        """Whether there is an output element at all; where there is none, a call does nothing."""
        self._native = self._native_call()

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        """Run. Raises BindError if a new n lies outside the compiled range or the buffers.

        `stream`: a torch or CuPy stream of the model's GPU, or a raw handle.
        """
        if rows is None and stream is None and self._native is not None:
            self._native()
            return
        with self._alone:
            if rows is not None:
                self._resize(rows)
            self._launch(stream)

    def _launch(self, stream: Any) -> None:
        if stream is None and self._on_cpu:
            if self.writes:
                self._run()
            return
        self._process.require()  # CUDA does not come through a fork
        handle = raw_stream(stream, self.device)
        if self.writes:
            self._run_on(handle)

    def _run_on(self, handle: int) -> None:
        if self.prepared:
            self.prepared.run(handle)
            return
        with torch.cuda.stream(torch_stream(handle, self.device)):
            self._executable(self._arguments)

    def _native_call(self) -> Callable[[], object] | None:
        """All that a call does, where that is one native call: it refuses a second thread itself.

        None on a GPU, which asks for a stream.
        """
        call = getattr(self.prepared, "current", self.prepared)
        if not self._on_cpu or not isinstance(call, PreparedCall):
            return None
        return call.run if self.writes else _nothing

    def require_idle(self) -> None:
        """Raise RunError while another thread is using the binding."""
        with self._alone:
            self._replace({})

    def resize(self, rows: Rows) -> None:
        """Use another n of the same memory: O(1), nothing else is checked again."""
        with self._alone:
            self._resize(rows)

    def _resize(self, rows: Rows) -> None:
        wanted = _row_counts(rows, self.rows)
        if wanted == self.rows:
            return
        if wanted.keys() != self.rows.keys():
            raise BindError(
                f"rows for {sorted(map(str, wanted))}, this model has {sorted(self.rows)}"
            )
        for dim, n in wanted.items():
            low, high = self.signature.ranges[dim].min, self._tied.limits[dim]
            if not low <= n <= high:
                raise BindError(
                    f"{dim} = {n} is outside {low} … {high} (compiled for up to "
                    f"{self.signature.ranges[dim].max}, and the bound memory holds {high})"
                )
        self._replace(
            {
                i: carrier(wanted[dim], self.device)
                if whole is None
                else whole.narrow(0, 0, wanted[dim])
                for i, dim, whole in self._tied.by_rows
            }
        )
        self.rows = wanted
        self.writes = _writes(self.signature, wanted)
        self._native = self._native_call()

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Other collections of the same layouts, checked as `Session.bind` checks them: O(1) in n.

        Raises BindError, and the binding is then what it was. The memory bound before is let go.
        """
        with self._alone:
            tied = _tie(
                self.signature,
                by_name(inputs, self.signature.input_collections, "input"),
                by_name(outputs, self.signature.output_collections, "output"),
                self.device,
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
    every = {**inputs, **outputs}
    require_device(every, device)
    rows = check_memory(signature, inputs, outputs)
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
        lock = threading.Lock()
        self._acquire = partial(lock.acquire, blocking=False)
        self._release = lock.release

    def __enter__(self) -> None:
        if not self._acquire():
            raise RunError("another thread is using this binding: give each thread its own")

    def __exit__(self, *error: object) -> None:
        self._release()


def _nothing() -> None:
    """A call where there is no output element."""


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
