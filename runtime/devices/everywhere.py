"""One model on every device with data: each has a session, opened at the first event there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from engines.base import Executable
from engines.errors import RunError
from engines.processes import Lock
from runtime.session import Binding, Collections, Session, common_device, takes_bindings
from soa.memory import Collection, Device, torch_drives_gpus
from soa.signature import Signature

if TYPE_CHECKING:
    import torch


class MultiDeviceSession(Session):
    """Binds and runs on the device of the collections: any number of GPUs, and the CPU, at once.

    `open_on(device)` is called once for each device, by the thread with the first event there.
    Other threads with events there wait; events on other devices do not. If it raises, this event
    gets the error, and the next event on that device tries again.

    Examples
    --------
    >>> everywhere = pipeline.load("jet-tagger@production", device="auto")
    >>> everywhere.run(jets, tags)
    >>> [str(device) for device in everywhere.devices]
    ['cpu']
    """

    def __init__(self, signature: Signature, open_on: Callable[[torch.device], Session]) -> None:
        self.signature = signature
        self.origin = None
        self._open_on = open_on
        self._lock = Lock()
        self._by_device: dict[torch.device, _OnDevice] = {}

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Raises RunError: each event has a device of its own."""
        raise RunError("the session runs on every device: ask a binding or `on(device)`")

    @property
    def executable(self) -> Executable:
        """Raises RunError: each device has an artifact of its own."""
        raise RunError("this session has an artifact for each device: use `on(device)`")

    def on(self, device: torch.device | str) -> Session:
        """Return the session of a device. If the model is not open there yet, it is opened now."""
        indexed = _with_index(device)
        with self._lock:
            self._require_open()
            deployed = self._by_device.setdefault(indexed, _OnDevice())
        with deployed.lock:
            if deployed.session is None:
                self._require_open()  # `close` may have come while this thread waited
                deployed.session = self._open_on(indexed)
            return deployed.session

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which the model is open so far."""
        with self._lock:
            return [device for device, deployed in self._by_device.items() if deployed.session]

    def collection(
        self,
        name: str,
        n: int,
        capacity: int | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Collection:
        """Make a zeroed collection of the model's layout, on any device."""
        return Collection(self.layout(name), n, device, capacity=capacity)

    def bind(self, inputs: Collections, outputs: Collections, *, graph: bool = False) -> Binding:
        """Bind on the device that all collections lie on. Raises BindError if there are several."""
        return self.on(common_device(inputs, outputs)).bind(inputs, outputs, graph=graph)

    @takes_bindings
    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """Run bindings as `Session.run_many` does, one device after the other.

        If an error names a binding by its number, it counts those of one device only.
        """
        groups: dict[Device, list[Binding]] = {}
        for binding in bindings:
            groups.setdefault(binding.device, []).append(binding)
        for device, group in groups.items():
            self.on(device).run_many(group, threads, stream=stream)

    def _require_open(self) -> None:
        """Raise RunError if the session is closed."""
        if self.closed:
            raise RunError("the session is closed")

    def close(self) -> None:
        """Close the session of every device. One that is just being opened is closed then."""
        with self._lock:
            self.closed = True
            all_deployed = list(self._by_device.values())
        for deployed in all_deployed:
            with deployed.lock:
                if deployed.session is not None:
                    deployed.session.close()


class _OnDevice:
    """The session of one device; None until it is opened. Hold `lock` to read or set it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.session: Session | None = None


def _with_index(device: torch.device | str) -> torch.device:
    """Return the device with its index. `cuda` without one becomes the current GPU."""
    if not torch_drives_gpus():
        return cast("torch.device", Device(device))  # torch accepts it
    import torch

    parsed = torch.device(device)
    if parsed.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    return torch.device(parsed.type, index)
