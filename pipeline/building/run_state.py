"""The state of a run: its cache, what it says, and the seconds of its steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.building.stage_cache import StageCache
from soa.files import read_plain, write_whole
from soa.records import as_record, parse_json

Say = Callable[[str], None]
Show = Callable[[str, float | None], AbstractContextManager[object]]
"""Shows a running step. Gets its name, and its seconds in the previous run, if known."""


def show_nothing(name: str, before: float | None) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Work:
    """The state of a run. `worked`: the steps that were not in the cache, with their seconds."""

    cache: StageCache
    say: Say
    worked: dict[str, float] = field(default_factory=dict)
    try_again: bool = False
    """True if a candidate failed for lack of time or memory: the next run tries it again."""
    show: Show = show_nothing
    beside: Callable[[], object] = lambda: None
    """Called in this process while compilers run in others."""
    model: str = ""
    """The name of the model. The seconds of its steps are kept for its next run."""
    before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError):  # only needed for estimates of the time
            self.before = as_record(dict[str, float], parse_json(read_plain(self._kept)))

    @property
    def _kept(self) -> Path:
        return self.cache.root / "seconds" / f"{self.model}.json"

    def keep_seconds(self) -> None:
        """Keep the seconds of the steps, for the estimates of the next run. Does nothing if `model`
        is empty, as for a build at first use."""
        if not self.model:
            return
        with suppress(OSError):
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._kept, json.dumps(self.before | self.worked))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step when it begins; add it to `worked`, with its time, when it ends."""
        self.say(f"{name} …")
        begun = time.monotonic()
        with self.show(name, self.before.get(name)):
            yield
        self.worked[name] = round(time.monotonic() - begun, 1)
        self.say(f"{name}: {self.worked[name]} s")
