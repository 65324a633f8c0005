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

_ANSWER_S = 10
_RETRIES = 2  # for a failed piece; Dask itself limits how many workers may die on it


@contextmanager
def on_dask(where: str) -> Iterator[Execute]:
    """Yields a function that scores pieces on a cluster. `where` is the address of a scheduler, or
    `local` or `local:4`: then workers start here and end with the block. ApplyError if no scheduler
    answers."""
    with needs_extra("dask", ApplyError):
        from distributed import Client, LocalCluster
    local = re.fullmatch(r"local(?::([1-9][0-9]{0,3}))?", where)  # the group: number of workers
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
        yield partial(_score_all, client)


def _score_all(
    client: Client, plan: Plan, pieces: Sequence[Piece]
) -> Iterator[tuple[Piece, Scored]]:
    """Yields each piece once its part is written. ApplyError if workers or scheduler fail."""
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
    """Runs on a worker. Errors come back as text, since the errors of some libraries cannot be
    pickled."""
    try:
        return score(plan, piece)
    except (SoaPipelineError, OSError) as error:
        message = str(error)  # raised below, so that the error does not become its context
    raise ApplyError(f"{message} (on the worker {socket.gethostname()})")
