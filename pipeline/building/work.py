"""The work folder of a run: the results of its stages, and the seconds that its steps took.

A stage is a part of a run whose result is kept, such as "capture" or "compile". The result depends
on values such as options and digests; their digest, the content key, names the stage's folder. The
last file written there is `done.json`. A stage interrupted by Ctrl-C, a crash or a full disk does
not have it. The next run clears the folder of that stage and repeats it; finished stages are not
repeated.
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
"""Makes a context that is open while a step runs. Gets the step's name, and the seconds that it
took in the previous run, or None."""

_DONE, _RECORD, _FILES = "done.json", "record.json", "files.json"


def silent(text: str) -> None:
    """Say nothing: the default for `say`."""


def show_nothing(name: str, before: float | None) -> AbstractContextManager[object]:
    """Show nothing: the default for `show`."""
    return nullcontext()


def content_key(dependencies: Mapping[str, Any]) -> str:
    """Return a key of 20 hexadecimal digits that changes if one of the dependencies changes."""
    text = json.dumps(dependencies, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass
class Work:
    """The work folder `root`. Each stage in it is locked while it runs, so that two runs do not
    build the same thing at once.

    `say` gets lines about the progress. `worked` collects the seconds of the steps that ran, since
    their results were not in the folder.
    """

    root: Path
    say: Say = silent
    show: Show = show_nothing
    model: str = ""
    """The name of the model, under which the seconds of its steps are kept for its next run."""
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
        """Return the folder of a stage with these dependencies. It changes if the work folder is
        moved between two runs, so it must not be kept in records."""
        return self.root / stage / content_key(dependencies)

    def read_or_make(
        self,
        stage: str,
        dependencies: Mapping[str, Any],
        kind: type[T],
        make: Callable[[Path], T],
        keep: Callable[[T], bool] = lambda record: True,
    ) -> T:
        """Read the record of a stage if it is kept; else call `make`, and keep what it returns.

        `kind`: the type of the record, one that `as_record` reads. `make` gets the stage's folder,
        and may write files there. `dependencies`: all that the record depends on, except files, for
        which `make` calls `depends_on`. A record for which `keep` is false is returned now, but
        made again by the next run.
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
        """Announce a step when the `with` block begins; add its seconds to `worked` at its end."""
        self.say(f"{name} …")
        begun = time.monotonic()
        with self.show(name, self.before.get(name)):
            yield
        self.worked[name] = round(time.monotonic() - begun, 1)
        self.say(f"{name}: {self.worked[name]} s")

    def keep_seconds(self) -> None:
        """Write the seconds of the steps to a file, for the estimates of the next run. Does nothing
        if `model` is empty, as for a build at first use."""
        if self.model and self.worked:
            with suppress(OSError):
                self._seconds.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._seconds, json.dumps(self.before | self.worked))


def depends_on(folder: Path, files: Mapping[str, str]) -> None:
    """Write into a stage's folder which files it used. `files`: their digests by path. If a file
    has another digest later, the stage is built again."""
    (folder / _FILES).write_text(json.dumps(dict(files)))


def _is_done(folder: Path) -> bool:
    """Whether the stage of this folder has ended, and the files that it used are unchanged."""
    if not (folder / _DONE).is_file():
        return False
    try:
        record = folder / _FILES
        files = _read_record(dict[str, str], record) if record.is_file() else {}
        return all(digest_of(name) == digest for name, digest in files.items())
    except (OSError, ValueError):
        return False


def _read_record(kind: type[T], file: Path) -> T:
    """Read a record of type `kind` from a JSON file. OSError if it cannot be read, ValueError if it
    holds something else."""
    return as_record(kind, parse_json(read_plain(file)))
