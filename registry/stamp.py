"""The user and the time that the registry writes into its records. Neither proves an identity."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import UTC, datetime


def user() -> str:
    """Return the name of this process's user, or the user's number if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def user_at_host() -> str:
    """Return this process's user and the name of this host, such as `ada@worker-3`."""
    return f"{user()}@{socket.gethostname()}"


def time_of(milliseconds: int) -> datetime:
    """Convert MLflow's milliseconds since 1970 to a time (UTC)."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds(time: datetime) -> int:
    """Convert a time to MLflow's milliseconds since 1970; smaller parts of a second are cut off."""
    return int(time.timestamp() * 1000)


def now() -> str:
    """Return the current time in UTC as text: ISO 8601 in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
