"""What runs inside Triton's Python backend where requests come in GPU memory.

As serving/triton/backend.py, with torch tensors for arrays: rows are joined, put into columns and
taken out again on the model's GPU, and answers stay there. Requests whose arrays are on the host go
the other module's way, with one copy of a whole batch. No GPU has run this; the tests are on the
CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.session import Binding, Session
from serving.device_wire import Columns, from_wire, to_wire
from serving.errors import RequestError
from serving.triton.backend import Core, Request, Values, collections_for
from serving.wire import Form, WireTensor, adjacent
from soa.dtypes import torch_dtype
from soa.memory import Collection


class GpuCore:
    """Answers each request where its arrays are: NumPy's on the host, tensors on the GPU."""

    def __init__(
        self, session: Session, *, merge: bool, digest: str | None = None, requests: Form
    ) -> None:
        self._host = Core(session, merge=merge, digest=digest, requests=requests)
        self._there = DeviceCore(session, merge=merge, digest=digest, requests=requests)

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Values] | RequestError]:
        there = [any(isinstance(v, torch.Tensor) for v in r.inputs.values()) for r in requests]
        cores = [self._there if gpu else self._host for gpu in there]
        found = {
            core: iter(core.answer([r for r, c in zip(requests, cores, strict=True) if c is core]))
            for core in (self._host, self._there)
        }
        return [next(found[core]) for core in cores]


class DeviceCore(Core):
    """Arrays are torch tensors on any device; answers are new ones on the session's."""

    def __init__(
        self, session: Session, *, merge: bool, digest: str | None = None, requests: Form
    ) -> None:
        super().__init__(session, merge=merge, digest=digest, requests=requests)
        self._on_device: dict[tuple[int, ...], tuple[dict[str, Columns], Binding]] = {}

    def _together(self, parts: Sequence[Values]) -> Values:
        return torch.cat(list(parts))

    def _dtype(self, t: WireTensor) -> torch.dtype:
        return torch_dtype(t.column_dtype)

    def _run(
        self, pieces: Mapping[str, Sequence[Values]], rows: Mapping[str, int]
    ) -> dict[str, Values]:
        """On return the answers are there."""
        device = self._session.device
        columns, binding = self._bound(rows)
        for t in self.wire.inputs:
            found = [piece.to(device) for piece in pieces[t.name]]
            joined = found[0] if len(found) == 1 else torch.cat(found)
            from_wire(t, columns[t.name], rows[t.rows], joined.contiguous())
        binding(rows)
        answers = {}
        for t in self.wire.outputs:
            shape = t.shape(rows[t.rows])
            answers[t.name] = torch.empty(shape, dtype=self._dtype(t), device=device)
            to_wire(t, columns[t.name], rows[t.rows], answers[t.name])
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return answers

    def _bound(self, rows: Mapping[str, int]) -> tuple[dict[str, Columns], Binding]:
        capacity = self._capacity(rows)
        key = tuple(capacity.values())
        if key not in self._on_device:
            session = self._session
            made = collections_for(session.signature, capacity, session.device)
            columns = {
                t.name: _columns(made[t.collection], t)
                for t in (*self.wire.inputs, *self.wire.outputs)
            }
            inputs, outputs = (
                {name: made[name] for name in names}
                for names in (
                    session.signature.input_collections,
                    session.signature.output_collections,
                )
            )
            self._on_device[key] = (columns, session.bind(inputs, outputs))
        return self._on_device[key]


def _columns(collection: Collection, t: WireTensor) -> Columns:
    matrix = None
    if len(t.components) > 1 and adjacent(collection.layout, t.components):
        matrix = collection.matrix(*t.components[0], len(t.components))
    return matrix, [collection.component(name, k) for name, k in t.components]
