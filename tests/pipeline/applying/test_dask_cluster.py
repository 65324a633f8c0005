"""Files scored on a Dask cluster: workers and the scheduler die, and every row is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.applying import Piece, Plan, Scored, on_dask
from pipeline.errors import ApplyError
from registry.store.registry import Registry
from tests.models.project import answer, refusal
from tests.models.scored import columns, require_scored, write_parts

distributed = pytest.importorskip("distributed", reason="takes the extra `dask`")

REF = "tagger@production"
ROWS = 100
# A cluster in a process of its own, which ends at once if it is killed.
CLUSTER_SCRIPT = """
import sys, time
from distributed import LocalCluster
if __name__ == "__main__":
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
    print(cluster.scheduler_address, flush=True)
    time.sleep(600)
"""


def kill_one(client: Any, draw: random.Random) -> None:
    """Kills one of the workers that answer, at a random moment."""
    time.sleep(draw.uniform(0, 0.05))
    pids = list(client.run(os.getpid, on_error="ignore").values())
    if pids:
        os.kill(draw.choice(pids), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize(("files", "kills"), [(40, 2), (300, 12)])
def test_no_row_is_lost_or_doubled_when_workers_die(
    tmp_path: Path, production: Registry, files: int, kills: int
) -> None:
    sources, rows = write_parts(tmp_path, files), columns(ROWS * files)
    draw = random.Random(files)
    kill_after = draw.sample(range(files - 5), kills)
    killed = []
    with on_dask("local:2") as execute:
        client = distributed.default_client()

        def killing_workers(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            for i, scored in enumerate(execute(plan, pieces)):
                if i in kill_after:
                    kill_one(client, draw)
                    killed.append(i)
                yield scored

        report = pipeline.apply(
            REF, sources, tmp_path / "all.parquet", keep=["event"], registry=production,
            execute=killing_workers,
        )  # fmt: skip
    assert len(killed) == kills
    assert (report.rows, report.spent.rows, report.found) == (files * ROWS, files * ROWS, 0)
    require_scored(tmp_path / "all.parquet", rows, ("event",))


@pytest.mark.long
def test_a_job_goes_on_when_the_scheduler_went_away(tmp_path: Path, production: Registry) -> None:
    sources, rows = write_parts(tmp_path, 30), columns(ROWS * 30)
    out = tmp_path / "out" / "all.parquet"
    out.parent.mkdir()
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER_SCRIPT)
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        with on_dask(cluster.stdout.readline().strip()) as execute:

            def kill_scheduler(
                plan: Plan, pieces: Sequence[Piece]
            ) -> Iterator[tuple[Piece, Scored]]:
                for i, scored in enumerate(execute(plan, pieces)):
                    if i == 5:
                        cluster.kill()
                    yield scored

            with pytest.raises(ApplyError, match=r"scheduler at tcp://.* went away") as caught:
                pipeline.apply(REF, sources, out, registry=production, execute=kill_scheduler)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    report = pipeline.apply(REF, sources, out, registry=production)
    assert report.rows == 30 * ROWS and report.found >= 5 * ROWS
    require_scored(out, rows)
    assert [*out.parent.iterdir()] == [out]


@pytest.mark.long
def test_workers_that_die_too_often_end_a_job_that_goes_on_later(
    tmp_path: Path, production: Registry
) -> None:
    """If workers die on a piece as often as Dask allows, here never, the error names the piece."""
    import dask

    sources, out = write_parts(tmp_path, 10), tmp_path / "all.npz"
    allowed = {"distributed.scheduler.allowed-failures": 0}
    with dask.config.set(allowed), on_dask("local:1") as execute:

        def killing_a_worker(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            for i, scored in enumerate(execute(plan, pieces)):
                if i == 2:
                    kill_one(distributed.default_client(), random.Random(1))
                yield scored

        with pytest.raises(ApplyError, match="workers died") as caught:
            pipeline.apply(REF, sources, out, registry=production, execute=killing_a_worker)
    assert "\n" not in str(caught.value) and not out.exists()
    report = pipeline.apply(REF, sources, out, registry=production)
    assert report.found >= 2 * ROWS
    require_scored(out, columns(ROWS * 10))


@pytest.mark.long
def test_an_error_on_a_worker_is_one_line(tmp_path: Path, production: Registry) -> None:
    sources, out = write_parts(tmp_path, 10), tmp_path / "new.npz"
    with on_dask("local:1") as execute:

        def changing_a_file(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            os.utime(sources[3])
            return execute(plan, pieces)

        with pytest.raises(ApplyError, match="was changed") as caught:
            pipeline.apply(REF, sources, out, registry=production, execute=changing_a_file)
    assert "\n" not in str(caught.value) and not out.exists()


@pytest.mark.long  # a worker imports torch
def test_the_command_scores_on_workers(tmp_path: Path, production: Registry) -> None:
    sources, rows = write_parts(tmp_path, 3), columns(ROWS * 3)
    out = tmp_path / "all.npz"
    report = answer("apply", REF, *sources, "--out", out, "--dask", "local:1", registry=production)
    assert report["spent"]["rows"] == 3 * ROWS
    require_scored(out, rows)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "local:0", "nothing://here"])
def test_no_scheduler_is_one_line(
    tmp_path: Path, production: Registry, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.applying.dask_cluster._ANSWER_S", 1)
    sources = write_parts(tmp_path, 1)
    out = ("--out", tmp_path / "out", "--registry", production.uri)
    message = refusal("apply", REF, *sources, *out, "--dask", address)
    assert address in message and "scheduler" in message
    assert not (tmp_path / "out").exists()


def test_without_distributed_the_error_names_the_extra(
    tmp_path: Path, production: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    sources = write_parts(tmp_path, 1)
    with pytest.raises(ApplyError, match=r"soa-pipeline\[dask\]"):
        pipeline.apply(REF, sources, tmp_path / "out", registry=production, dask="local")


def test_a_cluster_and_threads_are_not_both_taken(tmp_path: Path, production: Registry) -> None:
    sources = write_parts(tmp_path, 1)
    with pytest.raises(ApplyError, match="threads"):
        pipeline.apply(REF, sources, tmp_path / "out", registry=production, dask="local", threads=2)


@pytest.mark.long
def test_the_slurm_script_with_a_stand_in_for_slurm(tmp_path: Path, production: Registry) -> None:
    """`sbatch` runs a copy of the job's script here, as Slurm does; `scancel` ends it."""
    pytest.importorskip("dask_jobqueue")
    sources, rows = write_parts(tmp_path, 6), columns(ROWS * 6)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "sbatch": 'job=$(mktemp -p "${0%/*}")\ncp "$1" "$job"\nsetsid sh "$job" >/dev/null 2>&1 &\n'
        'echo "Submitted batch job $!"',
        "scancel": "kill -- -$1",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-m", "examples.dask.slurm", REF, *sources,
         "--out", tmp_path / "all.parquet", "--jobs", "2", "--log", tmp_path / "logs"],
        cwd=root, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
             "PYTHONPATH": str(root), "PIPELINE_REGISTRY": production.uri},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    require_scored(tmp_path / "all.parquet", rows)
