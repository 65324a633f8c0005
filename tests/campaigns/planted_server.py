"""Runs pytest in children of a process that has imported the libraries, but none of our code.

    python -P tests/campaigns/planted_server.py

It reads requests, one line of JSON each, and answers each with one line. The outcomes of a
request's tests are written to its file `said`, one line of JSON per step, so they survive a crash.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# These start threads or connections, or warn if they are imported before pytest.
_NOT_BEFORE = {"grpc", "tritonclient", "pytest", "hypothesis", "_hypothesis_pytestplugin"}


class Record:
    """A pytest plugin: writes when a test begins and how it ends.

    Of a test with parameters, it skips the rest once one case has failed.
    """

    def __init__(self, file: Path) -> None:
        self._out, self._red = file.open("a"), set[str]()

    def _say(self, **what: object) -> None:
        print(json.dumps(what), file=self._out, flush=True)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        if item.nodeid.partition("[")[0] in self._red:
            return True
        self._say(test=item.nodeid, what="begins")
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._red.add(report.nodeid.partition("[")[0])
        if report.failed or report.when == "call" or report.skipped:
            self._say(test=report.nodeid, what=report.outcome)

    def pytest_sessionfinish(self) -> None:
        self._say(modules=[name for name, module in sys.modules.items() if _is_library(module)])


def _is_library(module: object) -> bool:
    file = getattr(module, "__file__", None) or ""
    top = getattr(module, "__name__", "").partition(".")[0]
    return "site-packages" in file and top not in _NOT_BEFORE


def _run(asked: dict[str, Any]) -> int:
    """Runs the tests of a request; called in the child."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.update(asked["environment"])
    os.chdir(asked["root"])
    if asked["code_digest"]:  # else the shared models would count as made by other code
        provenance: Any = importlib.import_module("pipeline.building.provenance")
        provenance.code_digest = lambda: asked["code_digest"]
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-m", "", "--maxfail", "1000", "--tb", "short"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={asked['temp']}"]
    return int(pytest.main([*options, *asked["tests"]], [Record(Path(asked["said"]))]))


def _import(names: list[str], tops: set[str]) -> None:
    """Imports these libraries before the next child is forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name.partition(".")[0] not in tops and name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception:  # the children meet the same error
                    continue
    gc.collect()
    gc.freeze()


def _wait(pid: int, limit_s: float) -> int | None:
    """The exit code: negative for a signal, None after `limit_s`. Kills the child's whole group."""
    ended = os.pidfd_open(pid)
    within = bool(select.select([ended], [], [], limit_s)[0])
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if within else None


def main() -> None:
    plugins = {
        path.parts[0].removesuffix(".py")
        for entry in entry_points(group="pytest11")
        for path in (entry.dist.files if entry.dist else None) or ()
    }
    for line in sys.stdin:
        asked, begun = json.loads(line), time.monotonic()
        pid = os.fork()
        if pid == 0:
            ended = 99
            try:
                ended = _run(asked)
            finally:
                sys.stdout.flush()
                os._exit(ended)
        code = _wait(pid, asked["limit_s"])
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = {
            "code": code,
            "seconds": time.monotonic() - begun,
            "cpu": used.ru_utime + used.ru_stime,
        }
        said = Path(asked["said"])  # read before answering: the client then removes it
        lines = said.read_text().splitlines() if said.exists() else []
        print(json.dumps(answer), flush=True)
        steps = map(json.loads, lines)
        _import([name for step in steps for name in step.get("modules", ())], plugins)


if __name__ == "__main__":
    main()
