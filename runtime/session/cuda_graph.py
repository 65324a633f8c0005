"""CUDA graphs: the launches of one binding are recorded once and replayed as one launch.

A graph helps for small events on fixed memory, where launches cost more time than computing. It
holds addresses and sizes, so it belongs to one binding at one n; other calls run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engines.errors import first_line
from engines.tensors import torch_stream
from runtime.session.binding import Binding, Runs
from runtime.session.binding_checks import Collections
from soa.memory import Collection

_WARM_UP_RUNS = 3  # libraries allocate on first use, which must not be recorded


class GraphBinding(Binding):
    """A binding that records its launches at the first call, and replays them from then on.

    The graph is for the rows and memory of the first call. Calls with another n run without it.
    `rebind` drops it, and the next call records again.
    Recording synchronises the device and writes the outputs several times. If no graph can be
    recorded, the binding runs as any other does, and `graph` says why.
    """

    def __init__(
        self,
        session: Runs,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
    ) -> None:
        """Check the memory, and prepare the call. Nothing is recorded yet. Raises BindError."""
        super().__init__(session, inputs, outputs)
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._recorded_rows: dict[str, int] = {}
        self._tried = self.device.type == "cpu"
        self.graph = "not recorded: the model runs on the CPU" if self._tried else "not yet"
        """The state of the graph: "recorded at n=10", or "not recorded: …" with the reason."""

    def rebind(self, inputs: Collections, outputs: Collections) -> None:
        """Bind as `Binding.rebind` does, and drop the graph, which holds the old addresses."""
        super().rebind(inputs, outputs)
        if self.device.type != "cpu":
            self._recorded, self._tried, self.graph = None, False, "not yet"

    def _run_on(self, handle: int) -> None:
        """Replay the graph if it was recorded for the current rows, else run without it.

        The first call records it.
        """
        if not self._tried:
            self._tried = True
            self._record(handle)
        if self._recorded is None or self._recorded_rows != self.rows:
            super()._run_on(handle)
            return
        with torch.cuda.stream(torch_stream(handle, self.device)):
            self._recorded.replay()

    def _record(self, handle: int) -> None:
        """Record a graph for the current rows, or note in `graph` why there is none."""
        caller = torch_stream(handle, self.device)
        try:
            side = torch.cuda.Stream(self.device)  # the default stream cannot be recorded
            side.wait_stream(caller)
            run = self._recordable()
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_RUNS):
                    run(side.cuda_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                run(side.cuda_stream)
            caller.wait_stream(side)
        except Exception as error:  # the model or its libraries may do what cannot be recorded
            self.graph = f"not recorded: {first_line(error)}"
            return
        self._recorded, self._recorded_rows = graph, dict(self.rows)
        self.graph = f"recorded at {', '.join(f'{dim}={n}' for dim, n in self.rows.items())}"

    def _recordable(self) -> Any:
        """Return the function to record: it runs the artifact on the raw stream it is given.

        Engines that need it open the artifact again for this. The function also makes the stream
        torch's current one.
        """
        recordable = self._executable.recordable()
        if recordable is self._executable:
            return self.prepared.run
        return recordable.prepare(self._arguments).run
