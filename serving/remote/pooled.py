"""A session with threads of its own, which keep several requests on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from engines.base import Executable
from engines.errors import RunError
from engines.processes import OwnProcess
from runtime.session import Binding, Collections, Origin, Session, raw_stream
from soa.memory import Collection
from soa.signature import Signature


class PooledSession(Session):
    """Runs where waiting is most of the work. Any number of threads may run."""

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        in_flight: int,
        origin: Origin | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(signature, executable, device, origin)
        self._pool = ThreadPoolExecutor(in_flight, "soa-remote")
        self._process = OwnProcess()

    def run_async(
        self, inputs: Collections, outputs: Collections
    ) -> Future[Mapping[str, Collection]]:
        """Bind now, send as soon as fewer than `in_flight` requests are on their way.

        The future gives the output collections once they are written, or raises what `run` would.
        Until then the memory belongs to the request. Futures taken in the order of the calls give
        the answers in that order, whichever comes first from the server. On a GPU it runs on the
        stream that is the caller's current one now.
        """
        return self._send(self.bind(inputs, outputs), self._on(None))

    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Send all, `in_flight` at a time, and wait; raises the error of the first that failed."""
        handle = self._on(stream)
        sent: list[Future[Mapping[str, Collection]]] = []
        try:
            for binding in bindings:
                sent.append(self._send(binding, handle))
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

    def _send(self, binding: Binding, stream: int | None) -> Future[Mapping[str, Collection]]:
        self._process.require()
        try:
            return self._pool.submit(_run, binding, stream)
        except RuntimeError:  # the pool's word for it
            raise RunError("the session is closed") from None

    def _on(self, stream: Any) -> int | None:
        """The stream as any thread may name it; a CPU has none."""
        on_gpu = stream is not None or self.device.type != "cpu"
        return raw_stream(stream, self.device) if on_gpu else None


def _run(binding: Binding, stream: int | None) -> Mapping[str, Collection]:
    binding(stream=stream)
    return binding.outputs
