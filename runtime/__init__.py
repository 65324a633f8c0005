"""The runtime: load a version, bind it to memory, run it.

Names are resolved on first use, so that a process that only validates imports no registry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.binding import Binding
    from runtime.checked import CheckedSession, CheckReport
    from runtime.compare import Deviation, Tolerance
    from runtime.devices import MultiDeviceSession
    from runtime.errors import BindError, DeviationError, LoadError, QueueFullError
    from runtime.live import LiveBinding, LiveSession
    from runtime.loader import load
    from runtime.scheduler import Scheduler
    from runtime.session import Origin, Session
    from runtime.staging import Staging

_HOME = {
    "BindError": "runtime.errors",
    "Binding": "runtime.binding",
    "CheckReport": "runtime.checked",
    "CheckedSession": "runtime.checked",
    "Deviation": "runtime.compare",
    "DeviationError": "runtime.errors",
    "LiveBinding": "runtime.live",
    "LiveSession": "runtime.live",
    "LoadError": "runtime.errors",
    "MultiDeviceSession": "runtime.devices",
    "Origin": "runtime.session",
    "QueueFullError": "runtime.errors",
    "Scheduler": "runtime.scheduler",
    "Session": "runtime.session",
    "Staging": "runtime.staging",
    "Tolerance": "runtime.compare",
    "load": "runtime.loader",
}

__all__ = [
    "BindError",
    "Binding",
    "CheckReport",
    "CheckedSession",
    "Deviation",
    "DeviationError",
    "LiveBinding",
    "LiveSession",
    "LoadError",
    "MultiDeviceSession",
    "Origin",
    "QueueFullError",
    "Scheduler",
    "Session",
    "Staging",
    "Tolerance",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
