"""Passes arguments as torch tensors, for artifacts that cannot take plain memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from soa.memory import Device, Span


class TensorCall:
    """Arguments that are tied to an executable as torch tensors. This is a `Prepared`
    (engines/base.py).

    All arguments lie on the device of the first one. The tensors keep the memory alive.
    """

    def __init__(
        self, executable: Callable[[Sequence[torch.Tensor]], None], arguments: Sequence[Span]
    ) -> None:
        self._executable = executable
        self._device = arguments[0].device
        self._tensors = [span.tensor() for span in arguments]

    def run(self, stream: int = 0, /) -> None:
        """Run once; on a GPU, in the stream with the handle `stream`."""
        if self._device.type == "cpu":
            self._executable(self._tensors)
            return
        with torch.cuda.stream(torch_stream(stream, self._device)):
            self._executable(self._tensors)

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments, given by their index."""
        for i, span in changes.items():
            self._tensors[i] = span.tensor()

    @property
    def current(self) -> TensorCall:
        return self


def torch_stream(handle: int, device: Device | torch.device) -> torch.cuda.Stream:
    """The torch stream for a raw stream handle; 0 is the default stream."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)
