"""The cache of stages: a folder per stage and content key, valid once its last file is written.

A stage interrupted by Ctrl-C, a crash or a full disk has no `done.json`; the next run clears its
folder and does that stage again, and keeps all that were finished.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

_DONE = "done.json"


def content_key(parts: Mapping[str, Any]) -> str:
    """A key that changes exactly when one of the parts does."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class StageCache:
    """Folders under `root`, locked so that two runs do not build the same thing at once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def folder(
        self, stage: str, key: str, build: Callable[[Path], bool | None]
    ) -> tuple[Path, bool]:
        """The folder of a stage, and whether `build` had to run.

        `build` fills an empty folder; if it returns False its result is used now but not kept.
        """
        folder = self.root / stage / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            if (folder / _DONE).is_file():
                return folder, False
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            if build(folder) is not False:
                (folder / _DONE).write_text("{}")
            return folder, True
