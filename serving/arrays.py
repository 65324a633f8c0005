"""The arrays of requests and answers: NumPy arrays on the CPU, torch tensors on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serving.wire import WireTensor
from soa.dtypes import torch_dtype


class Arrays:
    """NumPy arrays over CPU memory."""

    library: Any = np
    """The library that has `isnan` and `isfinite` for these arrays."""

    device = torch.device("cpu")

    def of(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments of an artifact as arrays that share their memory."""
        return [argument.numpy() for argument in arguments]

    def here(self, values: Any) -> Any:
        """The values as an array on this device."""
        return values

    def dtype(self, t: WireTensor) -> Any:
        return t.dtype

    def view(self, t: WireTensor, memory: Any, n: int) -> Any:
        """Bytes as an array of the wire's dtype and shape."""
        return memory.view(self.dtype(t)).reshape(t.shape(n))

    def copy(self, values: Any) -> Any:
        """A contiguous copy in new memory."""
        return np.array(values, order="C")

    def to_bytes(self, values: Any) -> bytes:
        return bytes(values.tobytes())

    def from_bytes(self, raw: bytes) -> Any:
        return np.frombuffer(raw, np.uint8)

    def wait(self) -> None:
        """Wait until another process can read the written arrays."""


class Tensors(Arrays):
    """Torch tensors on one device, which may be the CPU.

    Copies are made in the order of the current stream. Another process cannot wait for that stream,
    so call `wait` before a request tells it to use the memory, and before a caller gets an answer.
    """

    library = torch

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def of(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        return list(arguments)

    def here(self, values: Any) -> Any:
        return values.to(self.device)

    def dtype(self, t: WireTensor) -> torch.dtype:
        return torch_dtype(t.column_dtype)

    def copy(self, values: Any) -> Any:
        return values.clone(memory_format=torch.contiguous_format)

    def to_bytes(self, values: Any) -> bytes:
        return bytes(values.cpu().numpy().tobytes())

    def from_bytes(self, raw: bytes) -> Any:
        memory = torch.empty(len(raw), dtype=torch.uint8, device=self.device)
        return memory.copy_(torch.from_numpy(np.frombuffer(raw, np.uint8).copy()))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
