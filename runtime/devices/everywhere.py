"""One model wherever its data is: a session for each device, opened at the first event there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.errors import RunError
from engines.processes import Lock
from runtime.session import Binding, Collections, Origin, Session, data_device, layout_of
from soa.layout import Layout
from soa.memory import Collection, Device
from soa.signature import Signature


class MultiDeviceSession:
    """Binds and runs where the collections lie: any number of GPUs, and the CPU, at once.

    `open_on(device)` is called once for a device, by the thread with the first event there; other
    threads of that device wait for it, and other devices go on. What it raises reaches that event,
    and the next one there tries again.
    """

    def __init__(
        self,
        signature: Signature,
        open_on: Callable[[torch.device], Session],
        origin: Origin | None = None,
    ) -> None:
        self.signature = signature
        self.origin = origin
        self._open_on = open_on
        self._lock = Lock()
        self._places: dict[torch.device, _Place] = {}
        self._closed = False

    def on(self, device: torch.device | str) -> Session:
        """The session of a device, deployed there now if it is not yet."""
        where = _indexed(torch.device(device))
        with self._lock:
            if self._closed:
                raise RunError("the session is closed")
            place = self._places.setdefault(where, _Place())
        return place.session(lambda: self._open_on(where))

    @property
    def devices(self) -> list[torch.device]:
        """Where the model is deployed so far."""
        with self._lock:
            return [device for device, place in self._places.items() if place.opened]

    def layout(self, collection: str) -> Layout:
        """The layout of one of the model's collections."""
        return layout_of(self.signature, collection)

    def collection(
        self, name: str, n: int, device: torch.device | str = "cpu", capacity: int | None = None
    ) -> Collection:
        """A new, zeroed collection of the model's layout."""
        return Collection(self.layout(name), n, device, capacity=capacity)

    def bind(self, inputs: Collections, outputs: Collections, *, graph: bool = False) -> Binding:
        """Bind where the memory lies. Raises BindError where it lies on several devices."""
        return self.on(data_device(inputs, outputs)).bind(inputs, outputs, graph=graph)

    def run(self, inputs: Collections, outputs: Collections, *, stream: Any = None) -> None:
        """Bind and run once."""
        self.bind(inputs, outputs)(stream=stream)

    def run_many(
        self, bindings: Sequence[Binding], threads: int = 1, *, stream: Any = None
    ) -> None:
        """As `Session.run_many`, device by device."""
        groups: dict[Device, list[Binding]] = {}
        for binding in bindings:
            groups.setdefault(binding.device, []).append(binding)
        for device, group in groups.items():
            self.on(device).run_many(group, threads, stream=stream)

    def close(self) -> None:
        """Release every device's artifact once running calls have ended."""
        with self._lock:
            self._closed = True
            places = list(self._places.values())
        for place in places:
            place.close()


class _Place:
    """A device's session, opened once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.opened: Session | None = None

    def session(self, make: Callable[[], Session]) -> Session:
        if self.opened is None:
            with self._lock:
                if self.opened is None:
                    self.opened = make()
        return self.opened

    def close(self) -> None:
        with self._lock:
            if self.opened is not None:
                self.opened.close()


def _indexed(device: torch.device) -> torch.device:
    """`cuda` is the current GPU: a device has one name here."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(
        device.type, torch.cuda.current_device() if device.index is None else device.index
    )
