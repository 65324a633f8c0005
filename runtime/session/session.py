"""Session: an opened artifact that runs on collections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self, cast

from engines.base import Executable
from engines.native import PreparedCall, run_many
from runtime.errors import BindError, LoadError
from runtime.process import torch_runs_on
from runtime.session.binding import Binding, CountsCalls, takes_bindings
from runtime.session.binding_checks import Collections, name_collections
from runtime.session.origin import Origin
from runtime.session.streams import raw_stream
from runtime.session.telemetry import telemetry
from soa.layout import Layout
from soa.memory import Collection, Device
from soa.options import FLAG, takes
from soa.signature import Signature, signature_table

if TYPE_CHECKING:
    import torch


class Session:
    """Runs one model on one device. Any number of threads may bind and run at once.

    It owns the opened artifact and borrows all other memory. `any_start`: validation ran windows
    that begin at any row, so they may be bound. A session is pickled as `reopening`: another
    process opens the same version again.

    Examples
    --------
    >>> session
    Session(jet-tagger/1 (exported, cpu/x86-64-v...), jets[n], tags[n])
    """

    any_start = False
    closed = False
    watcher: CountsCalls | None = None
    """Counts a share of the calls; `load` sets it."""
    reopening: Callable[[], Session] | None = None
    """Opens the version again in another process; `load` sets it. None: it cannot be pickled."""

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        device: str | torch.device = "cpu",
        origin: Origin | None = None,
        any_start: bool = False,
    ) -> None:
        self.signature = signature
        self.device = Device(device)
        self.origin = origin
        self.any_start = any_start
        self._executable = executable

    @property
    def executable(self) -> Executable:
        """The opened artifact; it lives as long as the session is open."""
        return self._executable

    def layout(self, collection: str) -> Layout:
        """Return the layout of one of the model's collections. Raises BindError for another name.

        Examples
        --------
        >>> [column.name for column in session.layout("tags").columns]
        ['p_qcd', 'p_w', 'p_top', 'label']
        """
        try:
            return self.signature.layouts[collection]
        except (KeyError, TypeError):  # TypeError: a list, which is no name
            known = ", ".join(self.signature.layouts)
            raise BindError(
                f"the model has no collection {collection!r}; it has: {known}"
            ) from None

    def collection(self, name: str, n: int, capacity: int | None = None) -> Collection:
        """Make a zeroed collection of the model's layout on the session's device.

        Examples
        --------
        >>> jets = session.collection("jets", 10, capacity=64)
        >>> jets.n, jets.capacity
        (10, 64)
        """
        return Collection(self.layout(name), n, self.device, capacity=capacity)

    @takes(BindError, graph=FLAG)
    def bind(self, inputs: Collections, outputs: Collections, *, graph: bool = False) -> Binding:
        """Check the memory once, and return a binding that runs on it without a copy.

        `graph`: replay a CUDA graph if one can be recorded, see `GraphBinding`. Raises BindError
        with the name of the collection, what was found and what is needed.

        Examples
        --------
        >>> binding = session.bind(jets, tags)
        >>> for energy in (30, 40, 50):
        ...     jets["part_energy"][:] = energy
        ...     binding()
        """
        if not graph:
            return Binding(self, *name_collections(self.signature, inputs, outputs))
        if not torch_runs_on(self.device):
            raise BindError(f"graph=True needs torch, and no torch for {self.device} is here")
        from runtime.session.cuda_graph import GraphBinding  # here: it needs torch

        return GraphBinding(self, *name_collections(self.signature, inputs, outputs))

    def run(self, inputs: Collections, outputs: Collections, *, stream: Any = None) -> None:
        """Bind collections and run once. Outputs are written in place; on a GPU in stream order.

        Examples
        --------
        >>> session.run({"jets": jets}, {"tags": tags})
        """
        active = telemetry()  # counts a failed bind here, and a failed call in the binding
        with nullcontext() if active is None else active.count_failures(self.origin):
            binding = self.bind(inputs, outputs)
        binding(stream=stream)

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Run bindings of this session in one call, each on all its bound rows. Use it for tiny
        events.

        With the native runner this is one call without the GIL, on `threads` native threads. The
        bindings must share no output memory, and no other thread may run one of them. Raises the
        error of the first binding that fails; later ones may not have run.

        Examples
        --------
        >>> def event():
        ...     return session.bind(session.collection("jets", 5), session.collection("tags", 5))
        >>> session.run_many([event() for _ in range(8)], threads=2)
        """
        # With telemetry or a watcher, each call is wrapped, and must run by itself.
        unwrapped = telemetry() is None and self.watcher is None
        if unwrapped and all(type(binding) is Binding for binding in bindings):
            for binding in bindings:
                binding.use_all()
            # None: this binding has no output element, so there is nothing to run.
            calls = [binding.prepared.current if binding.writes else None for binding in bindings]
            if all(call is None or isinstance(call, PreparedCall) for call in calls):
                needs_stream = stream is not None or self.device.type != "cpu"
                handle = raw_stream(stream, self.device) if needs_stream else 0
                run_many(cast(list[PreparedCall | None], calls), threads, handle)
                return
        for binding in bindings:
            binding(stream=stream)

    def close(self) -> None:
        """Release the artifact once running calls have ended; bindings then raise RunError.

        Examples
        --------
        >>> short = pipeline.load("jet-tagger@production")
        >>> short.close()
        >>> short.closed
        True
        """
        self.closed = True
        self._executable.close()

    def __enter__(self) -> Self:
        """Return the session, which is closed when the `with` block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Describe the session and the columns of each collection in HTML, for a notebook."""
        return signature_table(self, self.signature)

    def __reduce__(self) -> tuple[Callable[[], Session], tuple[()]]:
        """Pickle the session as `reopening`. Raises LoadError if it has none."""
        if self.reopening is None:
            raise LoadError(
                f"{self!r} cannot be pickled: only what pipeline.load opened on devices of this "
                "host, without live=True, can be opened again elsewhere"
            )
        return self.reopening, ()

    def __repr__(self) -> str:
        """Name the version, and the collections with their row dimensions."""
        rows_of = self.signature.rows_of
        collections = ", ".join(f"{name}[{rows_of[name]}]" for name in self.signature.layouts)
        return f"{type(self).__name__}({self.origin or 'an artifact'}, {collections})"
