"""A session with threads of its own, which keep several requests on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from engines.engine import Executable
from engines.errors import RunError
from runtime.binding import Binding
from runtime.memory_rules import Collections
from runtime.session import Origin, Session
from serving.own_process import OwnProcess
from soa.collection import Collection
from soa.signature import Signature


class PooledSession(Session):
    """Runs CPU collections where waiting is most of the work. Any number of threads may run."""

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        in_flight: int,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(signature, executable, "cpu", origin)
        self._pool = ThreadPoolExecutor(in_flight, "soa-remote")
        self._process = OwnProcess()

    def run_async(
        self, inputs: Collections, outputs: Collections
    ) -> Future[Mapping[str, Collection]]:
        """Bind now, send as soon as fewer than `in_flight` requests are on their way.

        The future gives the output collections once they are written, or raises what `run` would.
        Until then the memory belongs to the request. Futures taken in the order of the calls give
        the answers in that order, whichever comes first from the server.
        """
        return self._send(self.bind(inputs, outputs))

    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Send all, `in_flight` at a time, and wait; raises the error of the first that failed."""
        sent: list[Future[Mapping[str, Collection]]] = []
        try:
            for binding in bindings:
                sent.append(self._send(binding))
            wait(sent)
        finally:  # also after Ctrl-C, every request has ended before the caller has its memory back
            for future in sent:
                future.cancel()
            wait(sent)
        for future in sent:
            future.result()

    def close(self) -> None:
        """Wait for the requests in flight and close what they went through."""
        if self._process.here():
            self._pool.shutdown()
            super().close()

    def _send(self, binding: Binding) -> Future[Mapping[str, Collection]]:
        self._process.require()
        try:
            return self._pool.submit(_run, binding)
        except RuntimeError:  # the pool's word for it
            raise RunError("the session is closed") from None


def _run(binding: Binding) -> Mapping[str, Collection]:
    binding()
    return binding.outputs
