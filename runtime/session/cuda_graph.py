"""CUDA graphs: the launches of one binding recorded once, and replayed as one.

For small events on memory that stays, where launching costs more than computing. A graph holds
addresses and sizes, so it belongs to one binding at one n; everything else runs without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engines.tensors import torch_stream
from runtime.session.binding import Binding
from runtime.session.memory_checks import Collections
from runtime.session.session import Session
from soa.memory import Collection

_WARM_UP_RUNS = 3  # what libraries allocate on first use must not fall into the recording


class GraphBinding(Binding):
    """A binding that records its launches at the first call, for the rows and memory bound then.

    Another n runs without the graph; `rebind` drops it, and the next call records anew. Recording
    synchronises the device and writes the outputs several times. Where a graph cannot be had the
    binding runs as any other does, and `graph` says why.
    """

    def __init__(
        self,
        session: Session,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
    ) -> None:
        super().__init__(session, inputs, outputs)
        self._recorded: tuple[torch.cuda.CUDAGraph, dict[str, int]] | None = None
        self._tried = self.device.type == "cpu"
        self.graph = "not recorded: the model runs on the CPU" if self._tried else "not yet"
        """What became of the graph: "recorded at n=10", or "not recorded: …" with the reason."""

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        super().rebind(inputs, outputs)
        if self.device.type != "cpu":
            self._recorded, self._tried, self.graph = None, False, "not yet"

    def _run_on(self, handle: int) -> None:
        if not self._tried:
            self._tried = True
            self._record(handle)
        if self._recorded is None or self._recorded[1] != self.rows:
            super()._run_on(handle)
            return
        with torch.cuda.stream(torch_stream(handle, self.device)):
            self._recorded[0].replay()

    def _record(self, handle: int) -> None:
        caller = torch_stream(handle, self.device)
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(caller)
            run = self._recordable()
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_RUNS):
                    run(side.cuda_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                run(side.cuda_stream)
            caller.wait_stream(side)
        except Exception as error:  # whatever the model or its libraries do not let be recorded
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.graph = f"not recorded: {reason}"
            return
        self._recorded = (graph, dict(self.rows))
        self.graph = f"recorded at {', '.join(f'{dim}={n}' for dim, n in self.rows.items())}"

    def _recordable(self) -> Any:
        """The artifact as a function of a raw stream that is also torch's current one."""
        other = self._executable.recordable()
        prepared = self.prepared if other is self._executable else other.prepare(self._arguments)
        return prepared.run
