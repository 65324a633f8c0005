"""Processes that share a registry, forked from one that has imported MLflow and opened nothing.

MLflow takes seconds to import, and a fork takes none. Connections to SQLite and threads must not
exist at a fork, so the parent only waits, kills and reads files.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from registry import Decision, Registry
from registry.history import lock
from tests.models import sqlite
from tests.models.bundles import made_bundle

SLOW = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")


def warm_up(lease_s: float | None = None) -> None:
    """Imports what the children need. `lease_s` replaces `lock.LEASE_S`, here and in them."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    if lease_s is not None:
        lock.LEASE_S = lease_s
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking

    import registry.store.registry  # noqa: F401

    assert mlflow.tracking is not None
    sqlite.quick_commits()
    gc.freeze()


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child, which exits with 0, or with 1 and a traceback on stderr."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run(work: Callable[[], None]) -> None:
    """Run `work` in a child and wait; raises if it failed."""
    _, status = os.waitpid(fork(work), 0)
    if status:
        raise SystemExit("a child failed: see above")


def at_once(preparations: Sequence[Callable[[], Callable[[], object]]]) -> list[int]:
    """Runs each preparation in a child, then all that they return together; their exit codes."""
    gate, starter = os.pipe()

    def child(prepare: Callable[[], Callable[[], object]]) -> None:
        os.close(starter)
        act = prepare()
        os.read(gate, 1)  # returns in all children when the parent closes the pipe
        act()

    children = [fork(functools.partial(child, prepare)) for prepare in preparations]
    os.close(gate)
    time.sleep(1)  # by then most have come to the gate; a late one finds it open
    os.close(starter)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def prepare(folder: Path, count: int, uri: str | None = None) -> str:
    """Makes bundles `folder/bundles/0` … and, without `uri`, an empty registry; its URI."""
    for seed in range(count):
        made_bundle(folder / "bundles" / str(seed), seed)
    os.environ["PIPELINE_CACHE"] = str(folder / "cache")
    if uri is not None:
        return uri
    new_uri = f"sqlite:///{folder}/store/registry.db"

    def make_tables() -> None:
        with Registry(new_uri).client(write=True):
            pass

    run(make_tables)
    return new_uri


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registry", metavar="URI", help="Default: a new SQLite file.")
    parser.add_argument("--lease", type=float, metavar="S", help="In place of lock.LEASE_S.")


def new_name() -> str:
    """A name that no model of any registry has."""
    return f"jets-{uuid.uuid4().hex[:8]}"
