"""The common part of shadow and canary: the session, and the results of the second version."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from engines.errors import first_line
from engines.processes import Lock, OwnProcess
from runtime.session import Session
from soa.errors import SoaPipelineError
from soa.text import logger

if TYPE_CHECKING:
    from registry.shadow_record import ShadowRecord

log = logger("soa-pipeline")
_COUNTED = ("dropped", "canary_calls", "production_calls")


class SecondSession(Session):
    """Production's session, `inner`, with a second version. Any number of threads may use it.

    `end`: saves the last results. It is called by `close`, or at the end of the process, or when
    the session is deleted.
    """

    def __init__(self, inner: Session, results: Results, end: Callable[[], None]) -> None:
        super().__init__(
            inner.signature, inner.executable, inner.device, inner.origin, inner.any_start
        )
        self.inner = inner
        self._results = results
        self._end = weakref.finalize(self, end)

    @property
    def seen(self) -> ShadowRecord:
        """What the second version has shown since the last `flush`."""
        return self._results.record

    def flush(self) -> None:
        """Add the results to the record.

        Raises the errors of the registry or the file; the results are then saved the next time.
        """
        self._results.save()

    def close(self) -> None:
        """Save the results, and close both versions."""
        try:
            self.inner.close()  # waits for calls in progress, which are counted
        finally:
            self._end()
            self.closed = True


class Results:
    """The results of a shadow or a canary since the last `save`.

    Any number of threads may add to it. It belongs to the process that made it. `begun`: an empty
    record, which names both versions. `keep`: adds a record to those kept before. `dropped`,
    `canary_calls` and `production_calls` are counted without a lock.
    """

    def __init__(self, begun: ShadowRecord, keep: Callable[[ShadowRecord], None]) -> None:
        self.begun = begun
        self._keep = keep
        self._unsaved = begun
        self._lock, self._saving = Lock(), Lock()
        self._process = OwnProcess()
        self.dropped, self.canary_calls, self.production_calls = _Count(), _Count(), _Count()

    @property
    def record(self) -> ShadowRecord:
        """The results since the last `save`."""
        with self._lock:
            return self._add_counts()

    def _add_counts(self) -> ShadowRecord:
        """Move the counts into the unsaved record, and return it. The caller holds `_lock`."""
        counted: dict[str, Any] = {name: getattr(self, name).take_new() for name in _COUNTED}
        self._unsaved = self._unsaved.plus([replace(self.begun, **counted)])
        return self._unsaved

    def add(self, **seen: Any) -> None:
        """Add to the results. `seen`: fields of `ShadowRecord` with what to add, as `events=1`."""
        with self._lock:
            self._unsaved = self._unsaved.plus([replace(self.begun, **seen)])

    def add_failure(self, error: Exception) -> str:
        """Add a failed run to the results. Returns the error as one line of text."""
        ours = isinstance(error, SoaPipelineError)
        message = str(error) if ours else f"{type(error).__name__}: {first_line(error)}"
        self.add(errors=1, error=message)
        return message

    def save(self) -> None:
        """Save each event exactly once, even if other threads save or run at the same time.

        Raises the errors of the registry or the file; the results are then saved the next time.
        """
        self._process.require()
        with self._saving:
            with self._lock:
                unsaved, self._unsaved = self._add_counts(), self.begun
            if unsaved == self.begun:
                return
            try:
                self._keep(unsaved)
            except BaseException:
                with self._lock:
                    self._unsaved = unsaved.plus([self._unsaved])
                raise

    def end(self) -> None:
        """Save the unsaved results, and only log an error. The garbage collector may call this."""
        if not self._process.here():
            return
        try:
            self.save()
        except Exception as error:  # without the record production still ends normally
            log.warning("the record of %s is not saved: %s", self.begun.version, str(error))


class _Count:
    """A counter without a lock: `add` is a step of `itertools.count`, which is atomic."""

    def __init__(self) -> None:
        self.add = count().__next__
        self._before = 0

    def take_new(self) -> int:
        """Return the count since the last call of this. Only one thread at a time may call it."""
        now = self.add()  # the only way to read the counter; the next difference leaves it out
        difference, self._before = now - self._before, now + 1
        return difference
