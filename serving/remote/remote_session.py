"""A session whose model runs in a Triton server. Its memory is SoA, as that of a local session.

The server replaces an opened artifact. When memory is bound, all checks of a local session are made
here too. Test mode compares the server's answers with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from engines.base import Executable
from engines.errors import RunError
from engines.processes import OwnProcess
from runtime.checked import CheckedSession
from runtime.loader import open_checked_session
from runtime.opening import Opened
from runtime.session import Binding, Collections, Origin, Session, raw_stream, takes_bindings
from serving.client import RemoteOptions
from serving.remote.remote_model import open_model
from soa.memory import Collection
from soa.signature import Signature


class RemoteSession(Session):
    """Runs one model in a server, on CPU collections.

    Any number of threads may bind and run. The session's own threads keep up to `in_flight`
    requests of `run_async` and `run_many` in progress.

    Examples
    --------
    >>> options = pipeline.RemoteOptions(deadline_s=20)
    >>> url = "triton://host:8001"
    >>> served = pipeline.load("jet-tagger@production", device=url, remote=options)
    >>> served.run(jets, tags)
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        in_flight: int,
        origin: Origin | None = None,
    ) -> None:
        # Windows may begin at any row, because the rows are copied.
        super().__init__(signature, executable, "cpu", origin, any_start=True)
        self._pool = ThreadPoolExecutor(in_flight, "soa-remote")
        self._process = OwnProcess()

    def run_async(
        self, inputs: Collections, outputs: Collections
    ) -> Future[Mapping[str, Collection]]:
        """Bind now, and send as soon as fewer than `in_flight` requests are in progress.

        The future gives the output collections once they are written, or raises the errors of
        `run`. Until then do not use the memory. Each future belongs to its own call; requests may
        finish in another order.

        Examples
        --------
        >>> served = pipeline.load("jet-tagger@production", device="triton://host:8001")
        >>> list(served.run_async(jets, tags).result())
        ['tags']
        """
        return self.send(self.bind(inputs, outputs))

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Send the requests of all bindings, at most `in_flight` at a time, and wait for them.

        `threads` is ignored. Raises the first error.
        """
        if stream is not None:
            raw_stream(stream, self.device)  # raises: a CPU has no streams
        sent: list[Future[Mapping[str, Collection]]] = []
        try:
            for binding in bindings:
                sent.append(self.send(binding))
            wait(sent)
        finally:  # after Ctrl-C, too, all requests must end before the caller uses the memory again
            for future in sent:
                future.cancel()
            wait(sent)
        for future in sent:
            future.result()

    def close(self) -> None:
        """Wait for the requests in progress, then close the connection and the shared memory."""
        if self._process.here():
            self._pool.shutdown()
            super().close()

    def send(self, binding: Binding, **options: Any) -> Future[Mapping[str, Collection]]:
        """Send a binding's request as `run_async` does. `options`: those of the binding's call."""
        self._process.require()
        try:
            return self._pool.submit(_run_binding, binding, options)
        except RuntimeError:  # raised by a closed thread pool
            raise RunError("the session is closed") from None


def _run_binding(binding: Binding, options: Mapping[str, Any]) -> Mapping[str, Collection]:
    """Run a binding, and return its output collections. A thread of the pool calls this."""
    binding(**options)
    return binding.outputs


def connect(opened: Opened, address: str, options: RemoteOptions) -> RemoteSession | CheckedSession:
    """Open a session of a version that runs in the server at `address`, a `host:port`.

    The server must have the model with the registry's name, number and bundle. This is checked now,
    and by the server for every request. `mode="test"` gives a session that also runs the reference
    program in this process and compares.

    Raises RemoteError or ServingError.
    """
    model = open_model(opened, address, options)
    try:
        model.update_form()
    except BaseException:
        model.close()
        raise
    origin = opened.origin(model.target, f"triton at {address}")
    if not opened.production:
        return open_checked_session(opened, model, torch.device("cpu"), origin, any_start=True)
    return RemoteSession(opened.signature, model, options.in_flight, origin)
