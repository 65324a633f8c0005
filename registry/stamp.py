"""The user and the time that the registry writes into its records. Neither proves an identity."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import UTC, datetime


def user() -> str:
    """The name of this process's user, or the user's number if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def user_at_host() -> str:
    """`ada@worker-3`: this process's user and the name of this host."""
    return f"{user()}@{socket.gethostname()}"


def time_of(milliseconds: int) -> datetime:
    """The time (UTC) of MLflow's milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds(time: datetime) -> int:
    """The inverse of `time_of`; smaller parts of a second are cut off."""
    return int(time.timestamp() * 1000)


def now() -> str:
    """The current time in UTC, as ISO 8601 in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
