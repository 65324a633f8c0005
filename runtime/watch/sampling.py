"""Counts a share of a session's calls, for `pipeline drift`; off unless PIPELINE_WATCH is set.

`PIPELINE_WATCH=0.01`, or `watch=0.01` in `load`, counts one call of a hundred, drawn at random.
Each process keeps its counts in a file of its own, which is written again every few seconds, in the
folder PIPELINE_COUNTS (by default `pipeline-counts`). The files of all processes add up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from secrets import token_hex
from socket import gethostname
from typing import TYPE_CHECKING, ParamSpec

from engines.errors import first_line
from engines.processes import Lock, repair_after_fork
from runtime.errors import LoadError
from runtime.process import torch_runs_on, write_regularly
from runtime.session import Binding, record_drift
from runtime.watch.counts import Counter, Counts
from runtime.watch.distance import measure_drift
from runtime.watch.profile import PROFILE, Profile, has_profile, read_profile
from soa.files import write_whole
from soa.text import logger

if TYPE_CHECKING:
    import torch

    from runtime.opening import Opened
    from soa.memory import Device

P = ParamSpec("P")
SHARE, FOLDER = "PIPELINE_WATCH", "PIPELINE_COUNTS"
log = logger("soa-pipeline")
_draw = Random().random  # its own generator: the program may have seeded the common one


class Watcher:
    """Counts calls of the sessions of one version in this process, and writes the counts to a file.

    `share`: the share of calls to count. `folder`: where the file is. Any number of threads may use
    it. A child of a fork begins with no counts, in a file of its own. It keeps no file of the
    version open.
    """

    def __init__(self, opened: Opened, profile: Profile, share: float, folder: Path) -> None:
        """Begin with no counts. The file is written once a call was counted."""
        self._profile, self._share, self._folder = profile, share, folder
        self._label, self._name = opened.label, opened.name
        self._number = None if opened.number is None else str(opened.number)
        self._digest, self._signature = opened.bundle.digest, opened.signature
        self._warned = False
        self.after_fork()
        repair_after_fork(self)

    def after_fork(self) -> None:
        """Begin with no counts and a new file. The child of a fork calls this, too."""
        self._counter, self._written = Counter(self._profile, self._signature), 0
        name = re.sub(r"[^\w.-]", "_", f"{self._label}-{gethostname()}-{os.getpid()}")
        self.file = self._folder / f"{name}-{token_hex(4)}.json"
        """Where this process keeps the counts."""

    @property
    def counts(self) -> Counts:
        """What this process has counted so far."""
        return self._counter.counts(self._name, self._number, self._digest)

    def count_calls(self, run: Callable[P, object], binding: Binding) -> Callable[P, None]:
        """Wrap `run`, the call of a binding, so that a share of the calls is counted afterwards."""
        share = self._share

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            """Run, then count the call if it was drawn. A call that raises is not counted."""
            run(*args, **kwargs)
            if _draw() < share:
                self._count(binding)

        return call

    def _count(self, binding: Binding) -> None:
        """Count one call. The first error is logged; no error reaches the caller."""
        try:
            if binding.device.type != "cpu":
                import torch

                torch.cuda.synchronize(str(binding.device))
            rows_of = self._signature.rows_of
            memory = {**binding.inputs, **binding.outputs}
            self._counter.add(memory, {name: binding.rows[rows_of[name]] for name in memory})
            _WRITER.add(self)
        except Exception as error:
            if not self._warned:
                log.warning("a call is not counted: %s", first_line(error))
            self._warned = True

    def write(self) -> None:
        """Write this process's file if it has new counts, and set the gauges of telemetry."""
        counts = self.counts
        if counts.calls == self._written:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, counts.to_json())
        self._written = counts.calls
        indices = {moved.column: moved.psi for moved in measure_drift(self._profile, counts)}
        record_drift(counts.model, counts.version or "", indices)


class _Writer:
    """Writes the files of all watchers of this process, in one thread."""

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}
        self._lock = Lock()
        self._process = 0

    def add(self, watcher: Watcher) -> None:
        """Write the file of this watcher regularly from now on. Each counted call calls this."""
        if watcher in self._watchers and self._process == os.getpid():
            return
        with self._lock:
            self._watchers[watcher] = None
            is_first = self._process != os.getpid()  # in this process, which may be a fork's child
            self._process = os.getpid()
        if is_first:
            write_regularly(self.write, "the counts of calls")

    def write(self) -> None:
        """Write the files of all watchers that have counted something new."""
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.write()


_WRITER = _Writer()


def make_watcher(opened: Opened, device: Device | torch.device) -> Watcher | None:
    """Make the watcher that counts the calls of a version on a device.

    Returns None if nothing is to be counted. The option `watch` counts before the variable
    PIPELINE_WATCH. Raises LoadError for a share that is none, for a version without a profile, and
    for a GPU without torch.
    """
    share = opened.opening.watch
    by_variable = share is None
    if share is None:
        share = _parse_share(os.environ.get(SHARE) or "0")
    if not share:
        return None
    # The variable is meant for all versions of a process: one without a profile is no error then.
    if by_variable and not has_profile(opened.bundle):
        log.warning("%s is not watched: it has no %s", opened.label, PROFILE)
        return None
    if device.type != "cpu" and not torch_runs_on(device):
        raise LoadError(f"{opened.label}: to count values on {device}, torch for it must be here")
    return Watcher(opened, read_profile(opened.bundle), share, counts_folder())


def counts_folder() -> Path:
    """Return the folder in which sessions keep their counts: PIPELINE_COUNTS, or the default."""
    return Path(os.environ.get(FOLDER) or "pipeline-counts").absolute()


def _parse_share(text: str) -> float:
    """Read the text of PIPELINE_WATCH. Raises LoadError unless it is a number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise LoadError(f"{SHARE}={text}: give the share of calls to count, from 0 to 1")
    return share
