"""The arrays of requests in a server: NumPy arrays on the CPU, torch tensors on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serving.wire import WireTensor
from soa.dtypes import torch_dtype


class Arrays:
    """The operations on arrays that the backend needs, here for NumPy arrays on the CPU."""

    library: Any = np

    def views(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """Return the arguments of an artifact as arrays that share their memory."""
        return [argument.numpy() for argument in arguments]

    def on_device(self, values: Any) -> Any:
        """Return the values on this device. They are copied only if they are on another one."""
        return values

    def dtype(self, tensor: WireTensor) -> Any:
        """Return the dtype of a tensor, as the library has it."""
        return tensor.dtype

    def copy(self, values: Any) -> Any:
        """Return a contiguous copy in new memory."""
        return np.array(values, order="C")

    def wait(self) -> None:
        """Wait until another process can read what was written. On a CPU it can at once."""


class Tensors(Arrays):
    """The same operations for torch tensors on one device, which may be the CPU.

    Copies are made in the order of the current stream. Triton cannot wait for that stream, so call
    `wait` before it gets an answer.
    """

    library = torch

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def views(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        return list(arguments)

    def on_device(self, values: Any) -> Any:
        return values.to(self._device)

    def dtype(self, tensor: WireTensor) -> torch.dtype:
        return torch_dtype(tensor.column_dtype)

    def copy(self, values: Any) -> Any:
        return values.clone(memory_format=torch.contiguous_format)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
