"""Test mode: every event also runs on the reference program and is compared.

The reference is the captured program on torch's own kernels. It runs on copies of the inputs with
other memory sizes, so it shares neither the compiled code nor the caller's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engines.base import Executable
from engines.processes import Lock
from runtime.checked import Tolerance
from runtime.checked.comparison import combine, compare
from runtime.checked.deviation import Deviation
from runtime.checked.poison import find_memory_faults, make_poisoned
from runtime.errors import DeviationError
from runtime.session import Binding, Collections, Origin, Rows, Session, name_collections
from soa.memory import Collection, argument_tensors, read_block
from soa.records import as_data
from soa.signature import BoundBlock, Signature
from soa.text import number

_SPARE_ROWS = 33  # rows of capacity beyond the event's, in the memory of the reference
_POISON = 0xFF  # the byte with which that memory is filled; floats of it are NaN


@dataclass
class CheckReport:
    """What test mode has seen so far.

    `total_us` and `slowest_us`: the times of the artifact's runs. `worst`: by output, the worst
    deviation of all events.
    """

    events: int = 0
    total_us: float = 0.0
    slowest_us: float = 0.0
    nonfinite_inputs: int = 0
    nonfinite_outputs: int = 0
    worst: dict[str, Deviation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data. The mean time is None before the first event."""
        return {
            "events": self.events,
            "mean_us": self.total_us / self.events if self.events else None,
            "slowest_us": self.slowest_us,
            "nonfinite_inputs": self.nonfinite_inputs,
            "nonfinite_outputs": self.nonfinite_outputs,
            "worst": as_data(self.worst),
        }


class CheckedSession(Session):
    """A session in test mode. A call raises DeviationError if its answer is out of tolerance.

    `reference`: the portable program. `report` is for all bindings and threads together.
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        reference: Executable,
        tolerances: Mapping[str, Tolerance],
        device: torch.device | str = "cpu",
        origin: Origin | None = None,
        any_start: bool = False,
    ) -> None:
        super().__init__(signature, executable, device, origin, any_start)
        self.reference = reference
        self.tolerances = dict(tolerances)
        self.report = CheckReport()
        self._lock = Lock()

    def bind(self, inputs: Collections, outputs: Collections, *, graph: bool = False) -> Binding:
        """Bind as `Session.bind` does. `graph` is ignored: test mode uses no CUDA graph."""
        return _CheckedBinding(self, *name_collections(self.signature, inputs, outputs))

    def add(
        self, us: float, bad_in: int, bad_out: int, deviations: Mapping[str, Deviation]
    ) -> None:
        """Add an event to the report. `bad_in`, `bad_out`: how many values are NaN or infinite."""
        with self._lock:
            report = self.report
            report.events += 1
            report.total_us += us
            report.slowest_us = max(report.slowest_us, us)
            report.nonfinite_inputs += bad_in
            report.nonfinite_outputs += bad_out
            for name, deviation in deviations.items():
                earlier = [report.worst[name]] if name in report.worst else []
                report.worst[name] = combine([deviation, *earlier])


class _CheckedBinding(Binding):
    """A binding whose call also runs the reference, and compares the two answers."""

    def __init__(
        self,
        session: CheckedSession,
        inputs: Mapping[str, Collection],
        outputs: Mapping[str, Collection],
    ) -> None:
        super().__init__(session, inputs, outputs)
        self._session = session

    def __call__(self, rows: Rows | None = None, *, stream: Any = None) -> None:
        self._instrument(self._checked_call)(rows, stream)

    def _checked_call(self, rows: Rows | None, stream: Any) -> None:
        """Run as `Binding._run` does, and compare. Raises RunError for a second thread."""
        with self._alone:
            self._use_rows(rows)
            self._run_checked(stream)

    def _run_checked(self, stream: Any) -> None:
        """Run the artifact and the reference on the same rows, and add the event to the report.

        Raises DeviationError if the answers differ by more than the tolerances.
        """
        bound = {**self.inputs, **self.outputs}
        rows_of = self.signature.rows_of
        memory = {name: bound[name].rows(self.rows[rows_of[name]]) for name in bound}
        us = self._run_timed(memory, stream)
        answers = _read_blocks(self.signature.outputs, memory)
        expected = _read_blocks(self.signature.outputs, self._run_reference(memory))
        deviations = {
            name: compare(answer, expected[name], self._session.tolerances[name], classifier=False)
            for name, answer in answers.items()
        }
        bad_in = _count_nonfinite(_read_blocks(self.signature.inputs, memory))
        self._session.add(us, bad_in, _count_nonfinite(answers), deviations)
        self._require_within(deviations)

    def _run_timed(self, memory: Mapping[str, Collection], stream: Any) -> float:
        """Run the artifact, and return its time in microseconds.

        `memory`: the rows in use of each collection. Raises DeviationError if the run changed
        anything but its outputs.
        """
        before = {name: rows.whole.to(rows.device) for name, rows in memory.items()}
        start = time.perf_counter()
        self._launch(stream)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        us = (time.perf_counter() - start) * 1e6
        inputs = {name: memory[name] for name in self.inputs}
        outputs = {name: memory[name] for name in self.outputs}
        faults = list(find_memory_faults(self.signature, inputs, outputs, before))
        if faults:
            raise DeviationError(faults[0], code="deviation-memory")
        return us

    def _require_within(self, deviations: Mapping[str, Deviation]) -> None:
        """Raise DeviationError for the first output that is out of its tolerance."""
        for name, deviation in deviations.items():
            allowed = self._session.tolerances[name]
            if deviation.outside > allowed.max_outside:
                raise DeviationError(
                    f"{self._session.origin or 'model'}: output {name!r}, row "
                    f"{deviation.worst_row} of {dict(self.rows)}: max abs deviation "
                    f"{number(deviation.max_abs)} from the reference, {deviation.outside:.2%} of "
                    f"its elements outside atol {allowed.atol:g} + rtol {allowed.rtol:g}"
                )

    def _run_reference(self, memory: Mapping[str, Collection]) -> dict[str, Collection]:
        """Run the portable program in new memory, on copies of the inputs in `memory`.

        Returns its collections by name, with the answers in them.
        """
        fresh: dict[str, Collection] = {}
        for name, collection in memory.items():
            n, layout = collection.n, collection.layout
            fresh[name] = make_poisoned(layout, n, n + _SPARE_ROWS, _POISON, collection.device)
            if name in self.inputs:
                fresh[name].copy_from(collection)
        self._session.reference(argument_tensors(self.signature, fresh, self.rows))
        return fresh


def _read_blocks(
    blocks: Iterable[BoundBlock], collections: Mapping[str, Collection]
) -> dict[str, torch.Tensor]:
    """Read the values of each block from the collections; returns them by the block's name."""
    return {bound.name: read_block(bound, collections[bound.block.collection]) for bound in blocks}


def _count_nonfinite(blocks: Mapping[str, torch.Tensor]) -> int:
    """Count the values that are NaN or infinite."""
    floats = (values for values in blocks.values() if values.is_floating_point())
    return sum(int((~values.isfinite()).sum()) for values in floats)
