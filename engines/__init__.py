"""Engines: how a captured program is compiled for a target, and how an artifact is opened."""

from __future__ import annotations

from engines.base import DEFAULT_ENGINES, ENGINES, Engine, Executable, Portable, engine
from engines.errors import EngineError, TargetError
from engines.target import Target, check_host_runs, choose_target, host_cpu_levels, host_runs

__all__ = [
    "DEFAULT_ENGINES",
    "ENGINES",
    "Engine",
    "EngineError",
    "Executable",
    "Portable",
    "Target",
    "TargetError",
    "check_host_runs",
    "choose_target",
    "engine",
    "host_cpu_levels",
    "host_runs",
]
