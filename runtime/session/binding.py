"""Binding: a model tied to the caller's buffers. `binding_checks.py` checks the buffers once.

An artifact checks nothing when it runs: a wrong dtype, a missing column or too large an n gives
wrong values or a corrupted heap, without an error. So everything is checked when memory is bound.
A later call checks only n.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, SupportsIndex

from engines.base import Executable
from engines.errors import RunError
from engines.native import PreparedCall
from engines.processes import OwnProcess
from runtime.errors import BindError
from runtime.session.binding_checks import Collections, check_memory, name_collections
from runtime.session.streams import raw_stream
from runtime.session.telemetry import telemetry
from soa.memory import Collection, Device, Span, argument_spans, carrier
from soa.options import COUNT, Accepted, takes
from soa.signature import Signature

if TYPE_CHECKING:
    from runtime.session.origin import Origin

P = ParamSpec("P")
Rows = SupportsIndex | Mapping[str, SupportsIndex]


class Runs(Protocol):
    """The part of a session that a binding uses."""

    signature: Signature

    @property
    def device(self) -> Device: ...
    @property
    def origin(self) -> Origin | None: ...
    @property
    def executable(self) -> Executable: ...
    @property
    def any_start(self) -> bool: ...
    @property
    def watcher(self) -> CountsCalls | None: ...


class CountsCalls(Protocol):
    """Counts calls after they have run; runtime/watch/sampling.py has the implementation."""

    def count_calls(self, run: Callable[P, object], binding: Binding) -> Callable[P, None]:
        """Wrap `run`, the call of a binding, so that it is also counted."""


class Binding:
    """A callable that runs the model on the bound memory; made by `Session.bind`.

    `binding()` runs on all rows that were bound. `binding(n)` runs once on the first n rows, up to
    the collection's capacity and the compiled maximum; with several row dimensions n is a mapping.
    `resize(n)` binds n rows from then on. On a GPU it runs on `stream=` (by default torch's current
    stream) without synchronisation, and the outputs are ready in stream order. The binding borrows
    the memory and keeps the collections alive. Only one thread at a time may use a binding;
    different bindings of one session may run at once.

    Examples
    --------
    >>> binding = session.bind(jets, tags)
    >>> binding()
    >>> binding(3)  # the first three rows only
    >>> binding.rows
    {'n': 3}
    """

    def __init__(
        self,
        session: Runs,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
    ) -> None:
        """Check the memory, and prepare the call. Raises BindError."""
        self.signature = session.signature
        self.device = session.device
        self.origin = session.origin
        self._any_start = session.any_start
        self._executable = session.executable
        self._alone = Alone()
        self._telemetry = telemetry()
        self._watcher = session.watcher
        self._process = OwnProcess()
        checked = self._check(inputs, outputs)
        self._arguments = list(checked.arguments)
        self.prepared = self._executable.prepare(self._arguments)
        """The engine's call that this binding makes."""
        self._on_cpu = self.device.type == "cpu"
        self._adopt(checked)

    def _adopt(self, checked: _Checked) -> None:
        """Take over collections that were checked. The prepared call already has their memory."""
        self._checked = checked
        self.inputs = checked.inputs
        self.outputs = checked.outputs
        self.bound = checked.rows
        """The row counts of a call without an argument."""
        self._set_rows(checked.rows)

    def _set_rows(self, rows: dict[str, int]) -> None:
        """Note for how many rows the prepared call is, and what follows from that."""
        self.rows = rows
        """The rows of the last or the running call; before the first call, the bound rows."""
        self.writes = _has_output(self.signature, rows)
        """Whether the outputs have an element at these rows. If not, a call does nothing."""
        self._native = self._make_native_call() if rows == self.bound else None

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        """Run on all bound rows, or on the first `rows` of them.

        Raises BindError if a new n lies outside the compiled range or the buffers. `stream`: a
        torch or CuPy stream of the model's GPU, or a raw handle.
        """
        if rows is None and stream is None and self._native is not None:
            self._native()
            return
        self._instrument(self._run)(rows, stream)

    def _run(self, rows: Rows | None, stream: Any) -> None:
        """Run on `rows`, or on all bound rows for None.

        Raises RunError if another thread is using the binding.
        """
        with self._alone:
            self._use_rows(rows)
            self._launch(stream)

    def _launch(self, stream: Any) -> None:
        """Run on the current rows. On a GPU the run is only queued, in `stream`."""
        if stream is None and self._on_cpu:
            if self.writes:
                self.prepared.run()
            return
        self._process.require()  # CUDA does not work in the child of a fork
        handle = raw_stream(stream, self.device)
        if self.writes:
            self._run_on(handle)

    def _run_on(self, handle: int) -> None:
        """Run on the GPU stream with this raw handle."""
        self.prepared.run(handle)

    def _make_native_call(self) -> Callable[[], object] | None:
        """Return the native call that runs the bound rows. It refuses a second thread by itself.

        Returns None if the engine has no native call, and on a GPU, where a call needs a stream.
        """
        native = self.prepared.current
        if not self._on_cpu or not isinstance(native, PreparedCall):
            return None
        return self._instrument(native.run) if self.writes else _do_nothing

    def _instrument(self, run: Callable[P, None]) -> Callable[P, None]:
        """Wrap a call so that telemetry and the watcher see it. Without both, return `run`."""
        if self._watcher is not None:
            run = self._watcher.count_calls(run, self)
        if self._telemetry is None:
            return run
        return self._telemetry.time_calls(run, self.origin, lambda: sum(self.rows.values()))

    def require_idle(self) -> None:
        """Raise RunError while another thread is using the binding."""
        with self._alone:
            self._replace_arguments({})  # raises while the prepared call runs

    def resize(self, rows: Rows) -> None:
        """Bind n rows of the same memory, in constant time: only n is checked.

        Examples
        --------
        >>> binding = session.bind(jets, tags)
        >>> binding.resize(3)
        >>> binding.bound
        {'n': 3}
        """
        with self._alone:
            self._use_rows(rows)
            self.bound = self.rows
            self._set_rows(self.rows)  # again: these rows are the bound ones now

    def use_all(self) -> None:
        """Prepare the call for all bound rows again, for callers that run `prepared` themselves."""
        if self.rows != self.bound:
            with self._alone:
                self._use_rows(None)

    def _use_rows(self, rows: Rows | None) -> None:
        """Give the prepared call the arguments for these rows; None: for the bound rows.

        The caller holds `_alone`. Raises BindError, without any change, for rows that do not fit.
        """
        wanted = self.bound if rows is None else _parse_rows(rows, self.bound)
        if wanted == self.rows:
            return
        self._require_rows(wanted)
        changes = {}
        for argument in self._checked.by_rows:
            n = wanted[argument.dim]
            if argument.column is None:
                changes[argument.position] = carrier(n, self.device)
            else:
                changes[argument.position] = argument.column.first(n)
        self._replace_arguments(changes)
        self._set_rows(wanted)

    def _require_rows(self, wanted: Mapping[str, int]) -> None:
        """Raise BindError if these rows by dimension are not those of the model, or do not fit."""
        if wanted.keys() != self.rows.keys():
            raise BindError(
                f"rows for {sorted(map(str, wanted))}, this model has {sorted(self.rows)}",
                code="bind-rows",
            )
        for dim, n in wanted.items():
            low, high = self.signature.ranges[dim].min, self._checked.limits[dim]
            if not low <= n <= high:
                raise BindError(
                    f"{dim} = {n} is outside {low} … {high} (compiled for up to "
                    f"{self.signature.ranges[dim].max}, and the bound memory holds {high})",
                    code="bind-rows",
                )

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Bind other collections of the same layouts, checked as in `Session.bind`.

        The time does not depend on n. If it raises BindError, the binding is not changed. Otherwise
        it releases the memory that was bound before.

        Examples
        --------
        >>> binding = session.bind(jets, tags)
        >>> binding.rebind(session.collection("jets", 7), session.collection("tags", 7))
        >>> binding.bound
        {'n': 7}
        """
        with self._alone:
            checked = self._check(*name_collections(self.signature, inputs, outputs))
            self._replace_arguments(dict(enumerate(checked.arguments)))
            self._adopt(checked)

    def _check(
        self, inputs: Mapping[str, Collection], outputs: Mapping[str, Collection]
    ) -> _Checked:
        """Check collections, and derive what a call on them needs. Raises BindError.

        A call may have as many rows as all collections of a dimension have room for.
        """
        signature, collections = self.signature, {**inputs, **outputs}
        for name, collection in collections.items():
            if collection.device != self.device:
                raise BindError(
                    f"collection {name!r} lies on {collection.device}, the session runs on "
                    f"{self.device}: load the model on the device where the data is",
                    code="bind-device",
                )
        rows = check_memory(signature, inputs, outputs, self._any_start)
        limits = {dim: signature.ranges[dim].limit for dim in signature.dims}
        for name, collection in collections.items():
            dim = signature.rows_of[name]
            limits[dim] = min(limits[dim], collection.capacity)
        by_rows = []
        for position, argument in enumerate(signature.arguments):
            if argument.kind == "carrier":
                by_rows.append(_RowArgument(position, argument.rows))
            elif argument.kind == "column":
                column = collections[argument.collection].span(argument.column, argument.component)
                by_rows.append(_RowArgument(position, argument.rows, column))
        arguments = argument_spans(signature, collections, rows)
        return _Checked(dict(inputs), dict(outputs), rows, limits, arguments, by_rows)

    def __repr__(self) -> str:
        rows = ", ".join(f"{dim}={n}" for dim, n in self.bound.items())
        names = f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"
        return f"Binding of {self.origin or 'an artifact'} on {self.device}: {names}, {rows}"

    def _replace_arguments(self, changes: Mapping[int, Span]) -> None:
        """Give the prepared call other arguments, by their positions.

        Raises RunError, without any change, while a thread is running the call.
        """
        self.prepared.replace(changes)
        for i, argument in changes.items():
            self._arguments[i] = argument


class WrappedBinding(Binding):
    """The base of bindings that add something to another binding, `inner`; they define the call.

    The attributes (rows, inputs, …) are those of `inner`.
    """

    inner: Binding

    def __init__(self, inner: Binding) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not bound yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def require_idle(self) -> None:
        self.inner.require_idle()

    def use_all(self) -> None:
        self.inner.use_all()

    def resize(self, rows: Rows) -> None:
        self.inner.resize(rows)

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        self.inner.rebind(inputs, outputs)


takes_bindings = takes(
    BindError,
    bindings=Accepted(
        "a list of bindings that session.bind made",
        lambda value: (
            isinstance(value, Sequence)
            and all(issubclass(kind, Binding) for kind in set(map(type, value)))
        ),
    ),
    threads=COUNT,
)
"""Decorates `run_many` of every kind of session."""


class _RowArgument(NamedTuple):
    """An argument whose shape depends on the rows of `dim`: a column, or a row carrier.

    `position`: its index among the arguments. `column`: the column's whole memory; None for a row
    carrier, an empty array whose shape tells the artifact the number of rows.
    """

    position: int
    dim: str
    column: Span | None = None


@dataclass(frozen=True)
class _Checked:
    """Collections that passed every check, and what a call on them needs."""

    inputs: dict[str, Collection]
    outputs: dict[str, Collection]
    rows: dict[str, int]
    limits: dict[str, int]
    """By row dimension: the most rows of a call, limited by the compiled range and the memory."""
    arguments: list[Span]
    """The artifact's arguments, in its order, for `rows`."""
    by_rows: list[_RowArgument]
    """The arguments that a call with other rows replaces."""


class Alone:
    """A lock that raises RunError for a second thread, in a `with` block.

    It does not wait, because that would hide that two threads share a binding.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire = partial(lock.acquire, False)  # without blocking
        self._release = lock.release

    def __enter__(self) -> None:
        if not self._acquire():
            raise RunError("another thread is using this binding: give each thread its own")

    def __exit__(self, *error: object) -> None:
        self._release()


def _do_nothing() -> None:
    """Do nothing: the call of a binding whose outputs have no element."""


def _has_output(signature: Signature, rows: Mapping[str, int]) -> bool:
    """Whether the outputs have an element at these rows. Scalars are written at 0 rows, too."""
    return any(bound.plan.kind == "scalars" or rows[bound.rows] for bound in signature.outputs)


def _parse_rows(rows: Rows, dims: Mapping[str, int]) -> dict[str, int]:
    """Convert the rows of a call to plain integers by dimension; one number is for each dimension.

    `dims`: the keys are the model's dimensions. NumPy's integers are accepted. Raises BindError for
    anything else.
    """
    if type(rows) is int:  # the usual case, in a call that should take no time
        return dict.fromkeys(dims, rows)
    by_dim = rows if isinstance(rows, Mapping) else dict.fromkeys(dims, rows)
    if any(isinstance(n, bool) for n in by_dim.values()):  # an int for Python, but surely a mistake
        raise _rows_error(rows)
    try:
        return {dim: operator.index(n) for dim, n in by_dim.items()}
    except TypeError:
        raise _rows_error(rows) from None


def _rows_error(rows: object) -> BindError:
    """Return the error for `rows` that are no number of rows."""
    return BindError(
        f"rows are an integer, or integers by dimension; found {rows!r}", code="bind-rows"
    )
