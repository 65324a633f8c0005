"""A live session: one that moves to a newly promoted version between events.

At every moment one version is in place. A call uses the version that was in place when the call
began, so no event mixes two versions. All bindings read the same `current`, so a thread that has
seen the new version never sees the old one again. A binding moves at its first call after the swap,
in the thread that uses it: nothing waits and nothing is locked. The old version is closed when the
last binding has left it.

A new version is put in place only after it has passed every check of a load, and after every
binding in use has been tried on it. If anything fails, the old version stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from engines.base import Executable
from engines.processes import Lock, OwnProcess
from registry.store import Lookup
from runtime.devices import MultiDeviceSession
from runtime.errors import LoadError
from runtime.opening import Name, Opened
from runtime.session import (
    Binding,
    Collections,
    Origin,
    Rows,
    Session,
    WrappedBinding,
    takes_bindings,
)
from soa.errors import SoaPipelineError
from soa.memory import Collection, Device
from soa.signature import Signature
from soa.text import logger

log = logger("soa-pipeline")


class LiveSession(Session):
    """A session that follows a name. Any number of threads may bind and run while it moves.

    `open_`: opens a session of a version that was found by `name`. `current` is the session in
    place, with its report. Everything else is as in any session.

    Examples
    --------
    >>> live = pipeline.load("jet-tagger@production", live=True)
    >>> live.run(jets, tags)
    >>> live.ref
    'jet-tagger/1'
    """

    def __init__(self, name: Name, open_: Callable[[Opened], Session]) -> None:
        """Open the version that the name means now. Raises the errors of `load`."""
        self._name = name
        self._open = open_
        self._process = OwnProcess()
        self._refreshing = Lock()
        self._listing = Lock()
        self._bindings: weakref.WeakSet[LiveBinding] = weakref.WeakSet()
        self._watchers: list[Watcher] = []
        self._closed = False
        opened = name.open(name.find())
        self._current_lookup = _lookup_of(opened)
        self.current: Session = open_(opened)
        """The session in place. Only `refresh` sets it, at once for all bindings."""
        self.signature = self.current.signature

    @property
    def ref(self) -> str:
        """The version in place: `name/3`."""
        return self._current_lookup.version.ref

    @property
    def origin(self) -> Origin | None:  # type: ignore[override]
        """The origin of the session in place; None with `device="auto"`."""
        return self.current.origin

    @property
    def device(self) -> Device:  # type: ignore[override]
        """The device. Raises RunError with `device="auto"`, where each event has its own device."""
        return self.current.device

    @property
    def executable(self) -> Executable:
        return self.current.executable

    def refresh(self) -> bool:
        """Move to the version that the name means now. Returns True if it is another version.

        The registry is asked as `lookup` of the session says. Raises the errors of `load`, and
        LoadError for a version with other columns; then the version in place goes on serving. After
        a fork raises RunError: the child stays at the version that was in place.

        Examples
        --------
        >>> live = pipeline.load("jet-tagger@production", live=True)
        >>> version = registry.rollback("jet-tagger")
        >>> live.refresh(), live.ref
        (True, 'jet-tagger/3')
        """
        self._process.require()
        with self._refreshing:
            if self._closed:
                return False
            looked_up = self._name.find(now=True)
            if not self._is_newer(looked_up):
                return False
            opened = self._name.open(looked_up)
            # If its files are missing, a recorded version was opened.
            if not self._is_newer(_lookup_of(opened)):
                return False
            coming = self._open(opened)
            try:
                self._require_fits(opened, coming)
            except BaseException:
                coming.close()
                raise
            log.info("%s: %s takes the place of %s", self._name.ref, opened.label, self.ref)
            self._current_lookup = _lookup_of(opened)
            self.current = coming
            return True

    def watch(self, every_s: float = 60.0) -> Watcher:
        """Refresh again and again in a thread, until the end of a `with` block or `close`.

        Errors are logged, and the version in place goes on serving. Raises RunError after a fork.

        Examples
        --------
        >>> live = pipeline.load("jet-tagger@production", live=True)
        >>> with live.watch(every_s=30):
        ...     live.run(jets, tags)
        """
        self._process.require()
        watcher = Watcher(self, every_s)
        with self._listing:
            self._watchers.append(watcher)
        return watcher

    def collection(self, name: str, n: int, capacity: int | None = None) -> Collection:
        return self.current.collection(name, n, capacity)

    def bind(
        self, inputs: Collections, outputs: Collections, *, graph: bool = False
    ) -> LiveBinding:
        """Bind as `Session.bind` does; the binding moves with the session."""
        binding = LiveBinding(self, inputs, outputs, graph)
        with self._listing:
            self._bindings.add(binding)
        return binding

    def run(self, inputs: Collections, outputs: Collections, *, stream: Any = None) -> None:
        self.current.run(inputs, outputs, stream=stream)

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Run as `Session.run_many` does, all bindings on one version."""
        current = self.current  # read once: another thread may replace it
        on_current = [b.on(current) if isinstance(b, LiveBinding) else b for b in bindings]
        current.run_many(on_current, threads, stream=stream)

    def close(self) -> None:
        """End the watchers, and release the artifact once running calls have ended."""
        with self._listing:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.close()
        with self._refreshing:
            self._closed = True
            self.current.close()

    def _is_newer(self, lookup: Lookup) -> bool:
        """Whether a lookup found another version than the one in place, by an answer not older."""
        current = self._current_lookup
        same_ref = lookup.version.ref == current.version.ref
        same_version = same_ref and lookup.version.digest == current.version.digest
        return not same_version and lookup.at >= current.at

    def _require_fits(self, opened: Opened, coming: Session) -> None:
        """Check that the version of `coming` can take the place of the current one.

        Its signature must allow the same calls. It is opened on all devices in use, and every
        binding in use is tried. Raises LoadError, or the error of a device or binding.
        """
        if not can_replace(coming.signature, self.signature):
            ours, theirs = self.signature.layouts, coming.signature.layouts
            changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            difference = f" (collection {changed[0]!r} differs)" if changed else ""
            raise LoadError(
                f"{opened.label} has another signature than {self.ref}, which goes on "
                f"serving{difference}: load it anew"
            )
        if isinstance(coming, MultiDeviceSession) and isinstance(self.current, MultiDeviceSession):
            for device in self.current.devices:
                coming.on(device)
        with self._listing:
            bindings = list(self._bindings)
        for binding in bindings:
            binding.bind_on(coming)


class LiveBinding(WrappedBinding):
    """A callable that runs the version in place on the bound memory; made by `LiveSession.bind`.

    `inner` is the binding to the version that the last call ran, `_at` the session of that version.
    """

    def __init__(
        self, live: LiveSession, inputs: Collections, outputs: Collections, graph: bool
    ) -> None:
        """Bind the memory to the version in place. Raises BindError."""
        self._live = live
        self._graph = graph
        self._memory = (inputs, outputs)
        self._at = live.current
        super().__init__(self.bind_on(self._at))

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        current = self._live.current
        if self._at is not current:
            self.on(current)
        self.inner(rows, stream=stream)

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Bind other memory, which moves with the session from then on."""
        super().rebind(inputs, outputs)
        self._memory = (inputs, outputs)

    def on(self, session: Session) -> Binding:
        """Move to `session`, one version of the live session, and return the binding to it.

        Does nothing if it is there already. Raises RunError while another thread is running it.
        """
        if self._at is session:
            return self.inner
        old = self.inner
        old.require_idle()
        new = self.bind_on(session)
        new.resize(old.bound)
        if old.device.type != "cpu":
            import torch

            torch.cuda.synchronize(old.device)  # before the old artifact may be closed
        self.inner, self._at = new, session
        return new

    def bind_on(self, session: Session) -> Binding:
        """Bind this memory to another session, with all checks, and return the new binding."""
        return session.bind(*self._memory, graph=self._graph)


class Watcher:
    """Refreshes a session at a fixed interval, in a thread of its own."""

    def __init__(self, session: LiveSession, every_s: float) -> None:
        """Start the thread. Raises ValueError unless `every_s` is above 0."""
        if not every_s > 0:
            raise ValueError(f"every_s={every_s}: a time in seconds is needed")
        self.error: str | None = None
        """The error of the last refresh; None if it succeeded."""
        self._session = session
        self._every_s = every_s
        self._process = OwnProcess()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soa-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; waits for a refresh in progress."""
        if self._process.here():
            self._end.set()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        """Refresh the session regularly until `close`, and keep the text of the last failure."""
        while not self._end.wait(self._every_s):
            try:
                self._session.refresh()
            except Exception as error:  # after any error the old version can still serve
                # As text: the error itself would keep its frames, and the artifacts in them, alive.
                ours = isinstance(error, SoaPipelineError)
                self.error = str(error) if ours else f"{type(error).__name__}: {error}"
                log.warning("not refreshed, %s goes on serving: %s", self._session.ref, self.error)
            else:
                self.error = None


def _lookup_of(opened: Opened) -> Lookup:
    """Return the lookup of a version, which must have been opened by its name."""
    assert opened.lookup is not None
    return opened.lookup


def can_replace(new: Signature, old: Signature) -> bool:
    """Whether every call that fits the signature `old` fits `new`, too.

    The typical sizes need not be equal, and the rows may become unbounded.
    """
    if _contract(new) != _contract(old):
        return False
    return all(new.ranges[dim].limit >= rows.limit for dim, rows in old.ranges.items())


def _contract(signature: Signature) -> dict[str, Any]:
    """Return the part of a signature that calls depend on, as data.

    Of the rows it has only the least and the largest number by dimension.
    """
    data = signature.to_dict()
    data["rows"] = {dim: (rows.min, rows.max) for dim, rows in signature.ranges.items()}
    return data
