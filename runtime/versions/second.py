"""What a shadow and a canary share: the session, and what the second version has shown."""

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
    """Production's session, `inner`, with a second version. Any number of threads may use it, as
    any other session."""

    def __init__(self, inner: Session, results: Results, end: Callable[[], None]) -> None:
        super().__init__(
            inner.signature, inner.executable, inner.device, inner.origin, inner.any_start
        )
        self.inner = inner
        self._results = results
        # Also called at the end of the process, if the session is still open.
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
    """The record of a shadow or a canary since the last `save`. Any number of threads may add to
    it. It belongs to the process that made it.

    `dropped`, `canary_calls` and `production_calls` are counted without a lock. `begun`: an empty
    record, which names both versions. `keep`: adds a record to those kept before.
    """

    def __init__(self, begun: ShadowRecord, keep: Callable[[ShadowRecord], None]) -> None:
        self.begun = begun
        self._keep = keep
        self._unsaved = begun
        self._lock, self._saving = Lock(), Lock()
        self._process = OwnProcess()
        self.dropped, self.canary_calls, self.production_calls = (
            _LockFreeCount(),
            _LockFreeCount(),
            _LockFreeCount(),
        )

    @property
    def record(self) -> ShadowRecord:
        """The results since the last `save`."""
        with self._lock:
            return self._with_counts()

    def _with_counts(self) -> ShadowRecord:
        """Move the counts into the unsaved record, and return it. The caller holds `_lock`."""
        counted: dict[str, Any] = {name: getattr(self, name).take_new() for name in _COUNTED}
        self._unsaved = self._unsaved.plus([replace(self.begun, **counted)])
        return self._unsaved

    def add(self, **seen: Any) -> None:
        """Add to the results; `seen`: fields of a `ShadowRecord`, as `events=1`."""
        with self._lock:
            self._unsaved = self._unsaved.plus([replace(self.begun, **seen)])

    def add_failure(self, error: Exception) -> str:
        """Add a failed run. Returns the error as one line."""
        ours = isinstance(error, SoaPipelineError)
        text = str(error) if ours else f"{type(error).__name__}: {first_line(error)}"
        self.add(errors=1, error=text)
        return text

    def save(self) -> None:
        """Save each event exactly once, even if other threads save or run at the same time.

        Raises the errors of the registry or the file; the results are then saved the next time.
        """
        self._process.require()
        with self._saving:
            with self._lock:
                unsaved, self._unsaved = self._with_counts(), self.begun
            if unsaved == self.begun:
                return
            try:
                self._keep(unsaved)
            except BaseException:
                with self._lock:
                    self._unsaved = unsaved.plus([self._unsaved])
                raise

    def end(self) -> None:
        """Save what is left; an error is logged. The garbage collector may call this."""
        if not self._process.here():
            return
        try:
            self.save()
        except Exception as error:  # without the record production still ends normally
            log.warning("the record of %s is not saved: %s", self.begun.version, str(error))


class _LockFreeCount:
    """Counts without a lock: a step of `itertools.count` is atomic."""

    def __init__(self) -> None:
        self.add = count().__next__
        self._before = 0

    def take_new(self) -> int:
        """The count since the last time it was asked for. Only one thread at a time may ask."""
        now = self.add()  # the only way to read it; this step itself does not count
        difference, self._before = now - self._before, now + 1
        return difference
