"""The runtime: load a version, bind it to memory, run it."""

from __future__ import annotations

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
