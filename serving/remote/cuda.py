"""GPU collections and a server on this host, by CUDA shared memory. No GPU has run this.

The codec's arrays are tensors on that GPU: columns are copied into a region there, which the server
opens, and answers out of it, in stream order. The server works in another process, which no stream
orders: a call waits for its copies before it asks, and again before it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from runtime.opening import Opened
from serving.client import Client, CudaRegions, require_cuda
from serving.device_wire import Columns, from_wire, to_wire
from serving.remote.codec import Codec
from serving.remote.model import RemoteModel
from serving.wire import Form, WireTensor
from soa.dtypes import torch_dtype
from soa.signature import Signature


class DeviceCodec(Codec):
    """As `Codec`, for arguments on one device, which may be the CPU."""

    library = torch

    def __init__(self, signature: Signature, form: Form, merge: bool, device: torch.device) -> None:
        super().__init__(signature, form, merge)
        self._device = device

    def encode(
        self, arguments: Sequence[torch.Tensor], at: int, rows: Mapping[str, int]
    ) -> dict[str, Any]:
        made = {}
        for t in self.wire.inputs:
            n = rows[t.rows]
            memory = torch.empty(t.nbytes(n), dtype=torch.uint8, device=self._device)
            to_wire(t, self._from_row(t, arguments, at), n, memory)
            made[t.name] = self.view(t, memory, n)
        return made

    def decode(self, arguments: Sequence[torch.Tensor], at: int, found: Mapping[str, Any]) -> None:
        for t in self.wire.outputs:
            values = found[t.name]
            n = t.rows_in(values.shape)
            memory = values.reshape(-1).view(torch.uint8)
            from_wire(t, self._from_row(t, arguments, at), n, memory)
        self.wait()

    def view(self, t: WireTensor, memory: Any, n: int) -> Any:
        return memory.view(torch_dtype(t.column_dtype)).view(t.shape(n))

    def copy(self, values: Any) -> Any:
        return values.clone()

    def to_bytes(self, values: Any) -> bytes:
        return bytes(values.cpu().numpy().tobytes())

    def from_bytes(self, t: WireTensor, raw: bytes, n: int) -> Any:
        memory = torch.empty(len(raw), dtype=torch.uint8, device=self._device)
        memory.copy_(torch.from_numpy(np.frombuffer(raw, np.uint8).copy()))
        return self.view(t, memory, n)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _from_row(self, t: WireTensor, arguments: Sequence[torch.Tensor], at: int) -> Columns:
        matrix, each = self._columns[t.name].tensors(arguments)
        if at == 0:
            return matrix, each
        return None if matrix is None else matrix[:, at:], [column[at:] for column in each]


def open_on_gpu(opened: Opened, client: Client) -> RemoteModel:
    """A server that has taken a first region. Raises ServingError, RemoteError."""
    device = require_cuda(torch.device(client.options.cuda or "cuda"))
    regions = CudaRegions(client, device)
    with regions.taken(1):
        pass  # refused now rather than by the first event
    return on_device(opened, client, regions, device)


def on_device(opened: Opened, client: Client, regions: Any, device: torch.device) -> RemoteModel:
    """Arguments on `device`, and regions of shared memory there, as tensors of bytes."""

    def codec(signature: Signature, form: Form, merge: bool) -> Codec:
        return DeviceCodec(signature, form, merge, device)

    return RemoteModel(opened, client, regions, device, codec)
