"""The runtime: load a version, bind it to memory, run it."""

from __future__ import annotations

from runtime.binding import Binding
from runtime.checked import CheckedSession, CheckReport
from runtime.compare import Deviation, Tolerance
from runtime.errors import BindError, DeviationError, LoadError
from runtime.loader import load
from runtime.session import Origin, Session

__all__ = [
    "BindError",
    "Binding",
    "CheckReport",
    "CheckedSession",
    "Deviation",
    "DeviationError",
    "LoadError",
    "Origin",
    "Session",
    "Tolerance",
    "load",
]
