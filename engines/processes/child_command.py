"""The command and PYTHONPATH of a child process, so that it imports our code from the same place.

The working folder belongs to the user. It may contain a folder `engines/` or a second checkout, and
Python would search it first for the module of `-m`. So a child starts without the working folder.
If its parent searches that folder, the child searches it last, for the modules of a user's model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules in a child. Its PYTHONPATH must be
    `search_path()`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def search_path() -> str:
    """Make the PYTHONPATH for a child: this process's `sys.path` with the working folder last, and
    with the folder of our code."""
    here = Path.cwd()
    entries = [str(Path(entry).absolute()) for entry in sys.path]
    if here.resolve() != _ROOT:
        entries.sort(key=lambda entry: entry == str(here))
    if str(_ROOT) not in entries:  # e.g. the entry "" found it, before a change of folder
        entries.insert(0, str(_ROOT))
    return os.pathsep.join(entries)
