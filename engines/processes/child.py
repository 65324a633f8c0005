"""How a process of our own begins: with our code from where its parent has it.

The working folder is the user's. A folder `engines/` in it, or a second checkout, is not ours, and
Python looks there first for what `-m` names. So a child starts without it. If its parent
searches it, the child searches it last, for the modules of a user's model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module of ours as a program; its environment has `search_path()`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def search_path() -> str:
    """PYTHONPATH for a child: where this process finds modules, the working folder last."""
    here = Path.cwd()
    entries = [str(Path(entry).absolute()) for entry in sys.path]
    if here.resolve() != _ROOT:
        entries.sort(key=lambda entry: entry == str(here))
    if str(_ROOT) not in entries:  # as where it was found in "", which has become another folder
        entries.insert(0, str(_ROOT))
    return os.pathsep.join(entries)
