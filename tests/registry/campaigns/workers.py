"""Processes that share a registry: forked from one that has imported MLflow and opened nothing.

MLflow takes seconds to import and a fork takes none; a connection to SQLite, or a thread, must not
be carried through one, so the parent only ever waits, kills and reads files.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from registry import Decision, Manifest, Registry
from tests.models import bundles

PASSED = (Decision("digests", True, "all match", "all match", "every file has its digest"),)
SLOW = Decision("speed", False, "ratio 1.5", "ratio <= 1.1", "ratio 1.5, limit 1.1")


def warm_up() -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking

    import registry.store  # noqa: F401

    assert mlflow.tracking is not None
    gc.freeze()


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child, which exits with 0, or with 1 after saying why on stderr."""
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
    """The same, and wait; raises if it failed."""
    _, status = os.waitpid(fork(work), 0)
    if status:
        raise SystemExit("a child failed: see above")


def prepare(folder: Path, count: int) -> str:
    """Bundles `folder/bundles/0` … and an empty registry; its URI."""
    manifest = Manifest.model_validate(bundles.manifest_data())
    for seed in range(count):
        bundles.write_bundle(folder / "bundles" / str(seed), manifest, seed)
    uri = f"sqlite:///{folder}/store/registry.db"

    def make() -> None:
        with Registry(uri)._access.client(write=True):
            pass

    run(make)
    return uri
