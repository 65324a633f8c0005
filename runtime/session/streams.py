"""Streams: convert the caller's `stream=` to the raw handle that an artifact takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from runtime.errors import BindError
from soa.memory import Device, torch_drives_gpus

if TYPE_CHECKING:
    import torch


def raw_stream(stream: Any, device: Device | torch.device) -> int:
    """Return the raw handle of `stream` on the GPU `device`; None means torch's current stream.

    Takes a torch stream, a CuPy stream, any object with `__cuda_stream__` (cuda-python's protocol),
    or a raw handle, as alpaka's queues give it; the device of a raw handle cannot be checked.
    Raises BindError for anything else, and for a stream of another device.
    """
    if device.type == "cpu":
        raise BindError("stream= was given, but the model runs on the CPU, which has no streams")
    if stream is None:
        return _current_stream(device)
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise BindError(f"stream {stream} is no raw handle: give the address as it is")
        return stream
    torch = sys.modules.get("torch")  # if it is not imported, there is no torch stream
    if torch is not None and isinstance(stream, torch.cuda.Stream):
        _require_device(stream.device, device)
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])  # (version of the protocol, handle)
    if hasattr(stream, "ptr") and hasattr(stream, "device_id"):  # CuPy without the protocol
        if stream.device_id >= 0:  # -1: the null stream, which exists on every device
            _require_device(Device(f"cuda:{stream.device_id}"), device)
        return int(stream.ptr)
    raise BindError(
        f"stream is a {type(stream).__name__}: give a torch or CuPy stream, or a raw handle"
    )


def _current_stream(device: Device | torch.device) -> int:
    """Return the handle of torch's current stream. Raises BindError without a torch for GPUs."""
    if not torch_drives_gpus():
        raise BindError(
            "stream= is missing: by default it is torch's current stream, and no torch that is "
            "built for GPUs is here: give a stream, or its raw handle"
        )
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def _require_device(stream_device: Device | torch.device, device: Device | torch.device) -> None:
    """Raise BindError if a stream is of another device than the model's."""
    if Device(stream_device) != Device(device):
        raise BindError(
            f"the stream is of {stream_device}, the model runs on {device}", code="bind-device"
        )
