"""A live session: one that moves to a newly promoted version between events.

At every moment one version is in place. A call that begins takes that version for the whole of
itself, so an event is one version's; and since the place is one for all bindings, no thread sees
the old version again after it has seen the new one. A binding moves at its first call after the
swap, in the thread that uses it, so nothing waits and nothing is locked. What is not in place any
more is closed when the last binding has left it.

The version that is to come has passed every gate and check of a load, and every binding in use has
been tried on it, before it is put in place. Where anything of that fails, the old one stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from engines.errors import RunError
from engines.processes import Lock, OwnProcess
from registry.store import Lookup
from runtime.devices.everywhere import MultiDeviceSession
from runtime.errors import LoadError
from runtime.opening import Name, Opened, open_found
from runtime.session import Binding, Collections, Origin, Rows, Session, layout_of
from soa.errors import SoaPipelineError
from soa.layout import Layout
from soa.memory import Collection, Device
from soa.signature import Signature
from soa.text import logger

AnySession = Session | MultiDeviceSession

log = logger("soa-pipeline")


class LiveSession:
    """A session that follows a name. Any number of threads may bind and run while it moves.

    It has a session's methods; `current` is the session in place, with its origin and its report.
    """

    def __init__(self, name: Name, open_: Callable[[Opened], AnySession]) -> None:
        self._name = name
        self._open = open_
        self._process = OwnProcess()
        self._refreshing = Lock()
        self._listing = Lock()
        self._bindings: weakref.WeakSet[LiveBinding] = weakref.WeakSet()
        self._watchers: list[Watcher] = []
        self._closed = False
        opened = open_found(name, name.find())
        self._found = _lookup(opened)
        self.current: AnySession = open_(opened)
        """Set by `refresh` alone, at once for all bindings."""
        self.signature = self.current.signature

    @property
    def ref(self) -> str:
        """The version in place: `name/3`."""
        return self._found.version.ref

    @property
    def origin(self) -> Origin | None:
        """What the session in place runs; None with `device="auto"`."""
        return self.current.origin

    @property
    def device(self) -> Device:
        """RunError with `device="auto"`, which runs wherever the data is."""
        if isinstance(self.current, MultiDeviceSession):
            raise RunError("a session for every device has none of its own")
        return self.current.device

    def refresh(self) -> bool:
        """Move to what the name means now; whether that is another version.

        The registry is asked, as far as the session's lookup has it so. Raises what `load` would,
        and LoadError for a version of another signature; the version in place then goes on serving.
        RunError after a fork: the child stays at the version that was in place.
        """
        self._process.require()
        with self._refreshing:
            if self._closed:
                return False
            found = self._name.find(now=True)
            if not self._is_news(found):
                return False
            opened = open_found(self._name, found)
            if not self._is_news(_lookup(opened)):  # its files could not be had
                return False
            coming = self._open(opened)
            try:
                self._require_fits(opened, coming)
            except BaseException:
                coming.close()
                raise
            log.info("%s: %s takes the place of %s", self._name.ref, opened.label, self.ref)
            self._found = _lookup(opened)
            self.current = coming
            return True

    def watch(self, every_s: float = 60.0) -> Watcher:
        """Refresh again and again in a thread, until the end of a `with` block or `close`.

        What goes wrong is logged, and the version in place goes on serving. RunError after a fork.
        """
        self._process.require()
        watcher = Watcher(self, every_s)
        with self._listing:
            self._watchers.append(watcher)
        return watcher

    def layout(self, collection: str) -> Layout:
        """The layout of one of the model's collections."""
        return layout_of(self.signature, collection)

    def collection(self, name: str, n: int, capacity: int | None = None) -> Collection:
        """A new, zeroed collection of the model's layout, on the session's device or the CPU."""
        return self.current.collection(name, n, capacity=capacity)

    def bind(
        self, inputs: Collections, outputs: Collections, *, graph: bool = False
    ) -> LiveBinding:
        """As `Session.bind`; the binding moves with the session."""
        binding = LiveBinding(self, inputs, outputs, graph)
        with self._listing:
            self._bindings.add(binding)
        return binding

    def run(self, inputs: Collections, outputs: Collections, *, stream: Any = None) -> None:
        """Bind and run once."""
        self.current.run(inputs, outputs, stream=stream)

    def run_many(
        self, bindings: Sequence[LiveBinding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """As `Session.run_many`, all on one version."""
        now = self.current
        now.run_many([each.on(now) for each in bindings], threads, stream=stream)

    def close(self) -> None:
        """End the watchers and release the artifact once running calls have ended."""
        with self._listing:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.close()
        with self._refreshing:
            self._closed = True
            self.current.close()

    def _is_news(self, found: Lookup) -> bool:
        """Another version, and not one known from before the one in place was asked for."""
        now = self._found
        same = (found.version.ref, found.version.digest) == (now.version.ref, now.version.digest)
        return not same and found.at >= now.at

    def _require_fits(self, opened: Opened, coming: AnySession) -> None:
        """The same signature; deployed where the old one is; and every binding binds there too."""
        if _contract(coming.signature) != _contract(self.signature):
            raise LoadError(
                f"{opened.label} has another signature than {self.ref}, which goes on "
                f"serving{_difference(self, coming)}: load it anew"
            )
        if isinstance(coming, MultiDeviceSession) and isinstance(self.current, MultiDeviceSession):
            for device in self.current.devices:
                coming.on(device)
        with self._listing:
            bindings = list(self._bindings)
        for binding in bindings:
            binding.bound_on(coming)


class LiveBinding:
    """A callable that runs the version in place on the bound memory; made by `LiveSession.bind`.

    As a `Binding`: one thread at a time, and it borrows the memory. `inner` is the binding to the
    version that the last call ran.
    """

    def __init__(
        self, live: LiveSession, inputs: Collections, outputs: Collections, graph: bool
    ) -> None:
        self._live = live
        self._graph = graph
        self._memory = (inputs, outputs)
        self._at = live.current
        self.inner: Binding = self.bound_on(self._at)

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        """Run. Raises BindError if a new n lies outside the compiled range or the buffers."""
        now = self._live.current
        if self._at is not now:
            self.on(now)
        self.inner(rows, stream=stream)

    @property
    def rows(self) -> dict[str, int]:
        return self.inner.rows

    def resize(self, rows: Rows) -> None:
        """As `Binding.resize`."""
        self.inner.resize(rows)

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """As `Binding.rebind`."""
        self.inner.rebind(inputs, outputs)
        self._memory = (inputs, outputs)

    def on(self, session: AnySession) -> Binding:
        """The binding to this version of the session, where it moves if it is not there yet."""
        if self._at is session:
            return self.inner
        left = self.inner
        left.require_idle()  # one that another thread is running is not left
        moved = self.bound_on(session)
        moved.resize(left.rows)
        if left.device.type != "cpu":
            torch.cuda.synchronize(left.device)  # before the old artifact may go
        self.inner, self._at = moved, session
        return moved

    def bound_on(self, session: AnySession) -> Binding:
        """The memory bound to that version, checked as it was the first time."""
        return session.bind(*self._memory, graph=self._graph)


class Watcher:
    """Refreshes a session every so many seconds, in a thread of its own."""

    def __init__(self, session: LiveSession, every_s: float) -> None:
        if not every_s > 0:
            raise ValueError(f"every_s={every_s}: a time in seconds is needed")
        self.error: str | None = None
        """What the last refresh failed with, if it did."""
        self._session = session
        self._every_s = every_s
        self._process = OwnProcess()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soa-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; a refresh in progress is waited for."""
        if self._process.here():
            self._end.set()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                self._session.refresh()
            except Exception as error:  # whatever it is, the old version can still serve
                # As text: with the error come the frames it passed, and the artifacts in them.
                ours = isinstance(error, SoaPipelineError)
                self.error = str(error) if ours else f"{type(error).__name__}: {error}"
                log.warning("not refreshed, %s goes on serving: %s", self._session.ref, self.error)
            else:
                self.error = None


def _lookup(opened: Opened) -> Lookup:
    assert opened.lookup is not None  # it has come by a name
    return opened.lookup


def _contract(signature: Signature) -> dict[str, Any]:
    """All of it but the sizes that are worth timing."""
    said = signature.to_dict()
    said["rows"] = {dim: (r.min, r.max) for dim, r in signature.ranges.items()}
    return said


def _difference(live: LiveSession, coming: AnySession) -> str:
    ours, theirs = live.signature.layouts, coming.signature.layouts
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return f" (collection {changed[0]!r} differs)" if changed else ""
