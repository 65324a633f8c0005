"""A canary: a second version that answers a share of production's calls.

The canary writes into the memory that is bound to production. Where it fails, production answers
the same call over whatever the canary wrote, so the caller sees no error. Which calls it gets
depends only on their numbers, or on the keys that the caller gives.
"""

from __future__ import annotations

import heapq
import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, SupportsIndex

from engines.errors import RunError
from engines.processes import Lock
from runtime.errors import BindError, LoadError
from runtime.session import (
    Alone,
    Binding,
    Collections,
    Rows,
    Session,
    WrappedBinding,
    takes_bindings,
)
from runtime.versions.second import SecondSession
from soa.options import NUMBER, Accepted, at_least, check_fields
from soa.text import logger, microseconds, number

if TYPE_CHECKING:
    from runtime.versions.second import Results
    from soa.memory import Collection

log = logger("soa-pipeline")
_WINDOW = 1000  # the calls of each version over which p99 is taken
_ABOVE_P99 = _WINDOW // 100 + 1  # p99 is the time of this rank, from the longest one on
_P99_CHECKS = 0.1  # the share of the canary's calls after which p99 is looked at
_SPREAD = 40503  # 2**16 over the golden ratio: D. E. Knuth, TAOCP 3, section 6.4
Key = SupportsIndex | bytes


@dataclass(frozen=True, kw_only=True)
class CanaryLimits:
    """The limits beyond which a canary is withdrawn: then production answers all later calls.

    `max_errors`: in how many calls the canary may fail. `max_slowdown`: the canary's p99 may be at
    most so many times production's, each over its last 1,000 calls. `compare`: the share of the
    canary's calls that production runs too, before it; this takes the time of both.
    `max_abs`, `max_rel`: the largest differences of an output in such a call, as in
    `gates: shadow`; the caller of a call beyond them gets production's answer.

    Raises LoadError for a value that is no limit.

    Examples
    --------
    >>> limits = pipeline.CanaryLimits(max_slowdown=2, compare=0.1, max_abs=1e-3)
    """

    max_errors: int = 0
    max_slowdown: float | None = None
    compare: float = 0.0
    max_abs: float | None = None
    max_rel: float | None = None

    def __post_init__(self) -> None:
        check_fields(LoadError, "CanaryLimits", self, _KINDS)
        if (self.max_abs is not None or self.max_rel is not None) and not self.compare:
            raise LoadError("CanaryLimits: max_abs or max_rel without compare: say which share")


class CanarySession(SecondSession):
    """Production's session, `inner`, with a canary. Any number of threads may use it.

    `share`: the share of calls that the canary answers, from 0 to 1.

    `close` saves the record of both versions' calls; `flush` saves it at any time.

    Examples
    --------
    >>> both = pipeline.load("jet-tagger@production", canary="@staging", share=0.5)
    >>> both.run(jets, tags, key=4711)
    >>> both.seen.canary_calls + both.seen.production_calls
    1
    >>> both.close()
    """

    def __init__(
        self, inner: Session, canary: Session, share: float, limits: CanaryLimits, results: Results
    ) -> None:
        """Prepare to decide which calls the canary gets, and when it is withdrawn."""
        super().__init__(inner, results, results.end)
        self.canary = canary
        self.withdrawn = ""
        """Why the canary gets no more calls; empty while it gets some."""
        self._limits = limits
        # Each decides about one call: does the canary get it, is it compared, is p99 checked.
        self._gives: Callable[[Key | None], bool] = Share(share, results.begun.digest).takes
        self._compares = Share(limits.compare).takes
        self._checks_p99 = Share(0 if limits.max_slowdown is None else _P99_CHECKS).takes
        # The seconds of the last calls: of the canary (ours), and of production (theirs).
        self._ours, self._theirs = deque[float](maxlen=_WINDOW), deque[float](maxlen=_WINDOW)
        self._next_failure = count().__next__  # one step, so that no two threads get one number
        self._lock = Lock()
        self._send: Callable[..., Future[Mapping[str, Collection]]] | None
        self._send = getattr(inner, "send", None)  # of a RemoteSession

    def bind(
        self, inputs: Collections, outputs: Collections, *, graph: bool = False
    ) -> CanaryBinding:
        """Bind production now, and the canary at the first call that it gets."""
        return CanaryBinding(self, self.inner.bind(inputs, outputs, graph=graph))

    def run(
        self, inputs: Collections, outputs: Collections, *, stream: Any = None,
        key: Key | None = None,
    ) -> None:  # fmt: skip
        """Run as `Session.run` does; `key` as in a call of `CanaryBinding`."""
        self.bind(inputs, outputs)(stream=stream, key=key)

    def run_async(
        self, inputs: Collections, outputs: Collections, *, key: Key | None = None
    ) -> Future[Mapping[str, Collection]]:
        """Run as `RemoteSession.run_async` does, in production at a server or a site; elsewhere
        raises RunError. `key` as in a call of `CanaryBinding`."""
        if self._send is None:
            raise RunError("run_async is for production at a server or a site: use run")
        return self._send(self.bind(inputs, outputs), key=key)

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Run each binding as its call does. At a server or a site several run at a time: as many
        as its `in_flight` says, whatever `threads` is."""
        if self._send is None:
            super().run_many(bindings, threads, stream=stream)
        else:
            self.inner.run_many(bindings, threads, stream=stream)

    def close(self) -> None:
        """Close production, save the results, and close the canary."""
        super().close()
        self.canary.close()

    def _count_answer(self, seconds: float) -> None:
        """Count a call that the canary answered, and withdraw the canary if its p99 is too long."""
        self._results.canary_calls.add()
        self._ours.append(seconds)
        if not self._checks_p99() or len(self._theirs) < _WINDOW:
            return
        ours, theirs, limit = _p99(self._ours), _p99(self._theirs), self._limits.max_slowdown
        if limit is not None and ours > limit * theirs:
            times = f"{microseconds(ours * 1e6)} against {microseconds(theirs * 1e6)}"
            self._withdraw(f"p99 of a call is {times}, limit {number(limit)} times")

    def _compare_answer(self, event: Binding, expected: dict[str, Collection]) -> bool:
        """Compare an answer of the canary with production's, `expected`, and record the difference.

        Returns whether it is within the limits. If it is not, the canary is withdrawn.
        """
        from runtime.versions.shadow import measure_differences  # it needs torch

        deviations = measure_differences(event.signature, event.outputs, expected, event.rows)
        self._results.add(events=1, **deviations)
        limits = {"max_abs": self._limits.max_abs, "max_rel": self._limits.max_rel}
        for measure, limit in limits.items():
            largest = max(deviations[measure].values(), default=0.0)
            if limit is not None and largest > limit:
                self._withdraw(f"{measure} is {number(largest)}, limit {number(limit)}")
                return False
        return True

    def _count_failure(self, error: Exception) -> None:
        """Count a call in which the canary failed and production did not; maybe withdraw it."""
        reason = self._results.add_failure(error)
        if self._next_failure() >= self._limits.max_errors:
            self._withdraw(reason)

    def _withdraw(self, reason: str) -> None:
        """Give all later calls to production, log the reason, and save it."""
        with self._lock:
            if self.withdrawn:
                return
            self.withdrawn, self._gives = reason, lambda key: False
        begun = self._results.begun
        message = "the canary %s is withdrawn, and %s answers all calls: %s"
        log.warning(message, begun.version, begun.production, reason)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._results.add(withdrawals=1, withdrawn=f"{now}: {reason}")
        # In a thread: no call waits for the registry. It holds this session, so that the garbage
        # collector does not end it while the results are locked.
        with suppress(RuntimeError):  # the process can start no more threads: `close` saves it
            threading.Thread(target=lambda: self._results.end(), daemon=True).start()


class CanaryBinding(WrappedBinding):
    """A callable that runs one of the two versions on the bound memory.

    `inner` is the binding to the version that answered the last call: `binding.origin.version`. The
    canary is bound at the first call that it gets.

    Examples
    --------
    >>> both = pipeline.load("jet-tagger@production", canary="@staging", share=0.5)
    >>> binding = both.bind(jets, tags)
    >>> binding(3, key=4711)  # the first three rows; this key always gets the same version
    """

    def __init__(self, session: CanarySession, production: Binding) -> None:
        super().__init__(production)
        self._session = session
        self._production = production
        self._canary: Binding | None = None
        self._alone = Alone()

    def __call__(
        self, rows: Rows | None = None, *, stream: Any = None, key: Key | None = None
    ) -> None:
        """Run as `Binding` does. `key`: a whole number, or bytes, for example the event's number;
        calls with one key get one version, in each run and process. Without a key, the number of
        the call decides."""
        with_canary = self._session._gives(key)
        with self._alone:
            if not with_canary or not self._try_canary(rows, stream):
                self._run_production(rows, stream)

    def _run_production(self, rows: Rows | None, stream: Any) -> None:
        """Run production. If it does not fail, count the call and its time."""
        self.inner, session = self._production, self._session
        start = perf_counter()
        self.inner(rows, stream=stream)
        session._theirs.append(perf_counter() - start)
        session._results.production_calls.add()

    def _try_canary(self, rows: Rows | None, stream: Any) -> bool:
        """Let the canary answer a call, and production if the canary fails.

        Returns False if the canary's answer differs too much from production's: then the caller
        must not get it.
        """
        session = self._session
        expected = self._run_and_copy_production(rows, stream) if session._compares() else {}
        start = perf_counter()
        try:
            self.inner = self._bind_canary()
            self.inner(rows, stream=stream)
            seconds = perf_counter() - start
            agrees = not expected or session._compare_answer(self.inner, expected)
        except Exception as error:
            self._run_production(rows, stream)  # raises if the fault is the caller's
            session._count_failure(error)
            return True
        if agrees:
            session._count_answer(seconds)
        return agrees

    def _run_and_copy_production(self, rows: Rows | None, stream: Any) -> dict[str, Collection]:
        """Run production, and return a copy of its answer; empty if the answer has no element."""
        production, rows_of = self._production, self.signature.rows_of
        production(rows, stream=stream)
        if not production.writes:
            return {}
        return {
            name: output.rows(production.rows[rows_of[name]]).to("cpu")
            for name, output in production.outputs.items()
        }

    def _bind_canary(self) -> Binding:
        """Return the canary's binding to production's memory and rows; it is made if necessary."""
        if self._canary is None:
            production = self._production
            binding = self._session.canary.bind(production.inputs, production.outputs)
            binding.resize(production.bound)
            self._canary = binding
        return self._canary

    def resize(self, rows: Rows) -> None:
        """Bind other rows to production, and to the canary at its next call."""
        self.inner, self._canary = self._production, None
        self.inner.resize(rows)

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Bind other memory to production, and to the canary at its next call."""
        self.inner, self._canary = self._production, None
        self.inner.rebind(inputs, outputs)


def _p99(times: deque[float]) -> float:
    """Return the time that 1 % of `_WINDOW` times exceed; 0 if there are not so many times."""
    longest = heapq.nlargest(_ABOVE_P99, times.copy())  # a copy: other threads append to it
    return longest[-1] if len(longest) == _ABOVE_P99 else 0.0


class Share:
    """Decides which calls belong to a share of all calls, in every run of a program the same ones.

    Without a key, the number of the call decides: 0.05 takes exactly one call of each 20, but at
    changing places, so that the share is not in step with a loop of the program. With a key, a hash
    of the key and of `salt` decides.
    """

    def __init__(self, share: float, salt: str = "") -> None:
        from fractions import Fraction  # here: most programs have no canary, and it takes 2 ms

        exact = Fraction(str(share))
        self._part, self._whole = exact.numerator, exact.denominator
        self._least = self._whole - self._part
        self._hash = blake2b(salt.encode(), digest_size=8)
        self._next = count().__next__  # one step, so that no two threads get one number

    def takes(self, key: Key | None = None) -> bool:
        """Whether a call belongs to the share. Without `key`, it is counted as the next call.

        Raises BindError for a key that is no whole number and no bytes.
        """
        if key is not None:
            return self._takes_key(key)
        call = self._next()
        # The share is part / whole. Of `whole` calls in a row, exactly `part` calls, evenly spread,
        # have call * part % whole >= whole - part. Each round of `whole` calls is rotated by
        # another offset: the fractional part of round * _SPREAD / 2**16, times `whole`. For
        # successive rounds, these fractions spread evenly over 0 to 1.
        rotated = call + ((call // self._whole * _SPREAD & 65535) * self._whole >> 16)
        return rotated * self._part % self._whole >= self._least

    def _takes_key(self, key: Key) -> bool:
        """Whether the hash of a key, 8 bytes as a fraction of 2**64, is below part / whole.

        Raises BindError for a key of another type.
        """
        hashed = self._hash.copy()
        try:
            hashed.update(key if isinstance(key, bytes) else b"%x" % operator.index(key))
        except TypeError:
            message = f"key is a {type(key).__name__}; give a whole number, or bytes"
            raise BindError(message) from None
        return int.from_bytes(hashed.digest()) * self._whole < self._part << 64


_NOT_NEGATIVE = Accepted("a number from 0 on", lambda value: NUMBER.holds(value) and value >= 0)
_SHARE = Accepted("a number from 0 to 1", lambda value: NUMBER.holds(value) and 0 <= value <= 1)
_KINDS = {"max_errors": at_least(0), "compare": _SHARE} | dict.fromkeys(
    ("max_slowdown", "max_abs", "max_rel"), _NOT_NEGATIVE.or_none
)
