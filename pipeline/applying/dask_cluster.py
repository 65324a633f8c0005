"""Scores the pieces of a job as tasks of a Dask cluster.

A task writes its part completely or not at all, and a repeated task writes the same part. So a
worker may die at any moment: the scheduler gives its pieces to other workers. Files, parts and
registry must have the same paths on every worker.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from engines.errors import first_line
from pipeline.applying.job import Execute, Piece, Plan, Scored
from pipeline.applying.score_piece import score
from pipeline.errors import ApplyError
from soa.errors import SoaPipelineError, needs_extra

if TYPE_CHECKING:
    from distributed import Client

_ANSWER_S = 10  # a scheduler must answer within these seconds
_RETRIES = 2  # for a failed piece; Dask itself limits how many workers may die on it


@contextmanager
def on_dask(where: str) -> Iterator[Execute]:
    """Connect to a Dask cluster, and yield a function that scores pieces there.

    `where`: the address of a scheduler. With `local`, or `local:4` for four, workers start on this
    host, and end with the `with` block. ApplyError if no scheduler answers, or if Dask is not
    installed.
    """
    with needs_extra("dask", ApplyError):
        from distributed import Client, LocalCluster
    local = re.fullmatch(r"local(?::([1-9][0-9]{0,3}))?", where)  # group 1: how many workers
    with ExitStack() as stack:
        try:
            cluster: str | LocalCluster = where
            if local is not None:
                count = int(local[1]) if local[1] else None
                workers = LocalCluster(
                    n_workers=count, threads_per_worker=1, dashboard_address=":0"
                )
                cluster = stack.enter_context(workers)
            client = stack.enter_context(Client(cluster, timeout=_ANSWER_S))
        except (OSError, ValueError) as error:
            raise ApplyError(
                f"no Dask scheduler answers at {where!r} ({first_line(error)}): write its address, "
                "as tcp://HOST:8786, or local:4 for workers on this host"
            ) from error
        yield partial(_run_all, client)


def _run_all(client: Client, plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
    """Score pieces on the cluster of `client`. Yields each piece once its part is written, in any
    order. ApplyError if a worker cannot run a piece, or the scheduler goes away."""
    from distributed import as_completed

    address = client.scheduler.address
    tasks = client.map(partial(_score_on_worker, plan), pieces, pure=False, retries=_RETRIES)
    waiting = dict(zip(tasks, pieces, strict=True))
    for task in as_completed(tasks):
        piece = waiting.pop(task)
        where = f"{piece.input.path}, rows {piece.start} to {piece.stop}"
        try:
            scored = task.result()
        except SoaPipelineError:
            raise
        except (CancelledError, OSError) as error:
            raise ApplyError(
                f"the Dask scheduler at {address} went away: start another one; the same command "
                "continues the job"
            ) from error
        except Exception as error:
            raise ApplyError(
                f"{where}: {first_line(error)}: see the logs of the workers at {address}, which "
                "need memory, and the same soa-pipeline, Python and libraries as this process; the "
                "same command continues the job"
            ) from error
        yield piece, scored


def _score_on_worker(plan: Plan, piece: Piece) -> Scored:
    """Score a piece; runs on a worker. Known errors are raised as ApplyError with their text, since
    the errors of some libraries cannot be pickled and sent back."""
    try:
        return score(plan, piece)
    except (SoaPipelineError, OSError) as error:
        message = str(error)  # raised outside of `except`: `error` must not become the context
    raise ApplyError(f"{message} (on the worker {socket.gethostname()})")
