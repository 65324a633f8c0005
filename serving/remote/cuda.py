"""A server on this host, for collections in GPU memory: CUDA shared memory, without the host.

Columns are copied into a region on their own GPU, which the server opens, and answers out of it, in
stream order. The server reads and writes in another process, which no stream orders: a call waits
for its copies before it asks, and again before it returns. No GPU has run this; the copies are
tested on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from serving.device_wire import from_wire, to_wire
from serving.errors import AnswerError
from serving.remote.exchange import Exchange, Progress
from serving.remote.model import RemoteModel, all_filled
from serving.wire import WireTensor
from soa.dtypes import is_float, torch_dtype
from soa.signature import Signature

if TYPE_CHECKING:
    from serving.client import Client


class DeviceModel(RemoteModel):
    """Arguments on `device`, and regions of shared memory there, as tensors of bytes."""

    def __init__(
        self, signature: Signature, client: Client, name: str, version: str, digest: str,
        device: torch.device, regions: Any,
    ) -> None:  # fmt: skip
        super().__init__(signature, client, name, version, digest)
        self.device = device
        self._regions = regions

    def _shared_regions(self) -> Any:
        return None  # the caller's

    def _run(self, arguments: Sequence[torch.Tensor]) -> None:
        exchange = self._current()
        rows = Progress(arguments).left(self._signature.dims)
        if all_filled(exchange, rows):
            self._known(lambda: self._ask_on_device(exchange, arguments, rows))
        else:
            self._by_messages(arguments)

    def _ask_on_device(
        self, exchange: Exchange, arguments: Sequence[torch.Tensor], rows: Mapping[str, int]
    ) -> None:
        places = exchange.places(rows)
        request = self._request(exchange, rows)
        with self._regions.taken(places.size) as region:
            parts = {name: region.memory[where] for name, where in places.of.items()}
            places.name_in(request, region.name)
            for t in exchange.wire.inputs:
                to_wire(t, exchange.given[t.name].tensors(arguments), rows[t.rows], parts[t.name])
            self._wait()
            self._check_shapes(exchange, self.client.infer(request, region.doubt), rows)
            self._check_numbers(exchange, parts, rows)
            for t in exchange.wire.outputs:
                columns = exchange.written[t.name].tensors(arguments)
                from_wire(t, columns, rows[t.rows], parts[t.name])
            self._wait()

    def _check_numbers(
        self, exchange: Exchange, parts: Mapping[str, torch.Tensor], rows: Mapping[str, int]
    ) -> None:
        """As `_check_values`, where the answer lies."""
        if self.options.allow_nan:
            return

        def numbers(t: WireTensor) -> torch.Tensor:
            return parts[t.name].view(torch_dtype(t.column_dtype)).view(t.shape(rows[t.rows]))

        for t in exchange.wire.outputs:
            if not is_float(t.column_dtype) or not bool(numbers(t).isnan().any()):
                continue
            given = [numbers(each) for each in exchange.wire.inputs if is_float(each.column_dtype)]
            if all(bool(values.isfinite().all()) for values in given):
                nan = numbers(t).isnan()
                by_row = (nan.T if t.rows_last else nan).reshape(
                    1 if t.scalar else rows[t.rows], -1
                )
                row = int(by_row.any(dim=1).int().argmax())
                raise AnswerError(
                    f"{self}: output {t.name} is NaN at row {row}, and no input is NaN or Inf"
                )

    def _by_messages(self, arguments: Sequence[torch.Tensor]) -> None:
        """Through the host: an array is empty, and the others are hardly large."""
        here = [argument.cpu() for argument in arguments]
        super()._run(here)
        for mine, theirs, argument in zip(here, arguments, self._signature.arguments, strict=True):
            if argument.role == "output":
                theirs.copy_(mine)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def open_cuda_model(
    signature: Signature, client: Client, name: str, version: str, digest: str
) -> DeviceModel:
    """A server that has taken a first region. Raises ServingError, RemoteError."""
    from serving.client import CudaRegions, require_cuda

    device = require_cuda(torch.device(client.options.cuda or "cuda"))
    regions = CudaRegions(client, device)
    with regions.taken(1):
        pass  # refused now rather than by the first event
    return DeviceModel(signature, client, name, version, digest, device, regions)
