"""Who acts, and when, as the registry's records say it. Nobody's identity is proven here."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import UTC, datetime


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def who() -> str:
    return f"{user()}@{socket.gethostname()}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
