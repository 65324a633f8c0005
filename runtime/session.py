"""Session: an opened artifact that runs on collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.engine import Executable
from engines.native_runner import PreparedCall, run_many
from runtime.binding import Binding, Collections, by_name
from soa.collection import Collection
from soa.layout import Layout
from soa.signature import Signature


@dataclass(frozen=True)
class Origin:
    """What a session runs: for messages and records."""

    name: str
    version: str | None
    digest: str | None
    target: str
    engine: str

    def __str__(self) -> str:
        version = f"/{self.version}" if self.version else ""
        return f"{self.name}{version} ({self.engine}, {self.target})"


class Session:
    """Runs one model on one device. Any number of threads may bind and run at once.

    It owns the opened artifact and borrows all other memory.
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        device: torch.device | str = "cpu",
        origin: Origin | None = None,
    ) -> None:
        self.signature = signature
        self.device = torch.device(device)
        self.origin = origin
        self._executable = executable

    def layout(self, collection: str) -> Layout:
        """The layout of one of the model's collections."""
        return self.signature.layouts[collection]

    def collection(self, name: str, n: int, capacity: int | None = None) -> Collection:
        """A new, zeroed collection of the model's layout on the session's device."""
        return Collection(self.layout(name), n, self.device, capacity=capacity)

    def bind(self, inputs: Collections, outputs: Collections) -> Binding:
        """Check the memory once; the binding that comes back runs on it without a copy.

        Raises BindError naming the collection, what was found and what is needed.
        """
        return Binding(self.signature, self._executable, *self._named(inputs, outputs), self.device)

    def run(self, inputs: Collections, outputs: Collections) -> None:
        """Bind and run once; the outputs are written in place."""
        self.bind(inputs, outputs)()

    def run_many(self, bindings: Sequence[Binding], threads: int = 1) -> None:
        """Run bindings of this session in one call: for many tiny events.

        With the native runner that is one call without the GIL, on `threads` native threads; the
        bindings must share no output memory, and none may run elsewhere meanwhile. Raises the error
        of the first that fails; later ones may not have run.
        """
        plain = [b.prepared for b in bindings if type(b) is Binding]
        native = [call for call in plain if isinstance(call, PreparedCall)]
        if len(native) == len(bindings):
            run_many(native, threads)
            return
        for binding in bindings:
            binding()

    def close(self) -> None:
        """Release the artifact once running calls have ended; bindings then raise RunError."""
        close = getattr(self._executable, "close", None)
        if close:
            close()

    def _named(
        self, inputs: Collections, outputs: Collections
    ) -> tuple[Mapping[str, Collection], Mapping[str, Collection]]:
        return (
            by_name(inputs, self.signature.input_collections, "input"),
            by_name(outputs, self.signature.output_collections, "output"),
        )
