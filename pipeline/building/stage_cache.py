"""The cache of stages: a folder per stage and content key, valid once its last file is written.

A stage interrupted by Ctrl-C, a crash or a full disk has no `done.json`. The next run clears the
folder of that stage and repeats it; finished stages are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from soa.files import digest_of, read_plain, write_whole
from soa.records import as_data, as_record, parse_json

_DONE, _RECORD = "done.json", "record.json"
T = TypeVar("T")


def content_key(parts: Mapping[str, Any]) -> str:
    """A key that changes exactly when one of the parts does."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class StageCache:
    """Folders under `root`, locked so that two runs do not build the same thing at once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def result(
        self,
        stage: str,
        key: str,
        build: Callable[[Path], T],
        load: Callable[[Path], T],
        keep: Callable[[T], bool] = lambda made: True,
        depends_on: Callable[[Path], Mapping[str, str]] = lambda folder: {},
    ) -> T:
        """The result of a stage: `load` reads it from its folder, or `build` makes it there.

        A result for which `keep` is false is used now, and built again by the next run.
        `depends_on(folder)` is called after `build`, and returns the files that the stage used,
        with their digests. If one of them has changed later, the stage is built again.
        """
        folder = self.folder(stage, key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            done = _read(folder / _DONE)
            if done is not None and unchanged(done):
                return load(folder)
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            made = build(folder)
            if keep(made):
                write_whole(folder / _DONE, json.dumps(dict(depends_on(folder))))
            return made

    def record(
        self,
        stage: str,
        key: str,
        kind: type[T],
        make: Callable[[Path], T],
        keep: Callable[[T], bool] = lambda made: True,
    ) -> T:
        """The record of a stage, of a type that `as_record` reads: `make` makes it, and gets the
        stage's folder; a later call reads it there. `keep`: see `result`."""

        def build(folder: Path) -> T:
            made = make(folder)
            (folder / _RECORD).write_text(json.dumps(as_data(made)))
            return made

        def load(folder: Path) -> T:
            return as_record(kind, parse_json(read_plain(folder / _RECORD)))

        return self.result(stage, key, build, load, keep)

    def folder(self, stage: str, key: str) -> Path:
        """Where a stage keeps its files. The work folder may be moved between two runs."""
        return self.root / stage / key

    def files(self, folder: Path) -> dict[str, str]:
        """The files that a kept result depends on, with their digests."""
        return _read(folder / _DONE) or {}


def unchanged(files: Mapping[str, str]) -> bool:
    """True if all files, by path, still have their digests."""
    for name, digest in files.items():
        try:
            if digest_of(name) != digest:
                return False
        except OSError:
            return False
    return True


def _read(done: Path) -> dict[str, str] | None:
    """The files in a `done.json`; None if it cannot be read, and then the stage is done again."""
    try:
        return as_record(dict[str, str], parse_json(read_plain(done)))
    except (OSError, ValueError):
        return None
