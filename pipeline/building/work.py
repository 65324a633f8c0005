"""The work folder of a run: the results of its stages, and the seconds that its steps took.

A stage has a folder for each content key, which is valid once its last file is written. A stage
interrupted by Ctrl-C, a crash or a full disk has no `done.json`. The next run clears the folder of
that stage and repeats it; finished stages are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from soa.files import digest_of, read_plain, write_whole
from soa.records import as_data, as_record, parse_json

T = TypeVar("T")
Say = Callable[[str], None]
Show = Callable[[str, float | None], AbstractContextManager[object]]
"""Shows a running step. Gets its name, and its seconds in the previous run, if known."""

_DONE, _RECORD, _FILES = "done.json", "record.json", "files.json"


def silent(text: str) -> None:
    """Says nothing."""


def show_nothing(name: str, before: float | None) -> AbstractContextManager[object]:
    """Shows nothing."""
    return nullcontext()


def content_key(dependencies: Mapping[str, Any]) -> str:
    """A key that changes exactly when one of the dependencies does."""
    text = json.dumps(dependencies, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass
class Work:
    """The work folder `root`, which is locked so that two runs do not build the same thing at once.

    `worked`: the steps that were not in the cache, with their seconds.
    """

    root: Path
    say: Say = silent
    show: Show = show_nothing
    model: str = ""
    """The name of the model. The seconds of its steps are kept for its next run."""
    meanwhile: Callable[[], object] = lambda: None
    """Called in this process while compilers run in others."""
    worked: dict[str, float] = field(default_factory=dict)
    try_again: bool = False
    """True if a candidate failed for lack of time or memory: the next run tries it again."""

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        self._seconds = self.root / "seconds" / f"{self.model}.json"
        self.before: dict[str, float] = {}
        """The seconds of the steps in earlier runs."""
        with suppress(OSError, ValueError):  # only needed for estimates of the time
            self.before = _read_record(dict[str, float], self._seconds)

    def folder(self, stage: str, dependencies: Mapping[str, Any]) -> Path:
        """Where a stage keeps its files. The work folder may be moved between two runs."""
        return self.root / stage / content_key(dependencies)

    def read_or_make(
        self,
        stage: str,
        dependencies: Mapping[str, Any],
        kind: type[T],
        make: Callable[[Path], T],
        keep: Callable[[T], bool] = lambda record: True,
    ) -> T:
        """The record of a stage, of a type that `as_record` reads. `make` makes it, and may write
        files into the stage's folder, which it gets; a later call reads the record there.

        `dependencies`: all that the record depends on, except files that `depends_on` names in
        `make`. A record for which `keep` is false is used now, and made again by the next run.
        """
        folder = self.folder(stage, dependencies)
        if _is_done(folder):
            return _read_record(kind, folder / _RECORD)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if _is_done(folder):  # another run has made it meanwhile
                return _read_record(kind, folder / _RECORD)
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            record = make(folder)
            (folder / _RECORD).write_text(json.dumps(as_data(record)))
            if keep(record):
                write_whole(folder / _DONE, "{}")
            return record

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step when it begins; add it to `worked`, with its time, when it ends."""
        self.say(f"{name} …")
        begun = time.monotonic()
        with self.show(name, self.before.get(name)):
            yield
        self.worked[name] = round(time.monotonic() - begun, 1)
        self.say(f"{name}: {self.worked[name]} s")

    def keep_seconds(self) -> None:
        """Keep the seconds of the steps, for the estimates of the next run. Does nothing without a
        `model`, as for a build at first use."""
        if self.model and self.worked:
            with suppress(OSError):
                self._seconds.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._seconds, json.dumps(self.before | self.worked))


def depends_on(folder: Path, files: Mapping[str, str]) -> None:
    """Note in a stage's folder that it used these files, by path, which had these digests. If one
    of them has changed later, the stage is built again."""
    (folder / _FILES).write_text(json.dumps(dict(files)))


def _is_done(folder: Path) -> bool:
    """Whether a stage has ended, and the files that it used are as they were."""
    if not (folder / _DONE).is_file():
        return False
    try:
        record = folder / _FILES
        files = _read_record(dict[str, str], record) if record.is_file() else {}
        return all(digest_of(name) == digest for name, digest in files.items())
    except (OSError, ValueError):
        return False


def _read_record(kind: type[T], file: Path) -> T:
    """A record of this type from a file of JSON. Raises OSError, ValueError."""
    return as_record(kind, parse_json(read_plain(file)))
