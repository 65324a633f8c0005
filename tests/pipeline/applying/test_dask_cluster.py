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
ELSEWHERE = """
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
    sources, given = write_parts(tmp_path, files), columns(ROWS * files)
    draw = random.Random(files)
    when = draw.sample(range(files - 5), kills)
    killed = []
    with on_dask("local:2") as execute:
        client = distributed.default_client()

        def killing(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            for i, done in enumerate(execute(plan, pieces)):
                if i in when:
                    kill_one(client, draw)
                    killed.append(i)
                yield done

        done = pipeline.apply(
            REF, sources, tmp_path / "all.parquet", keep=["event"], registry=production,
            execute=killing,
        )  # fmt: skip
    assert len(killed) == kills
    assert (done.rows, done.spent.rows, done.found) == (files * ROWS, files * ROWS, 0)
    require_scored(tmp_path / "all.parquet", given, ("event",))


@pytest.mark.long
def test_a_job_goes_on_when_the_scheduler_went_away(tmp_path: Path, production: Registry) -> None:
    sources, given = write_parts(tmp_path, 30), columns(ROWS * 30)
    out = tmp_path / "out" / "all.parquet"
    out.parent.mkdir()
    script = tmp_path / "cluster.py"
    script.write_text(ELSEWHERE)
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        with on_dask(cluster.stdout.readline().strip()) as execute:

            def ending(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
                for i, done in enumerate(execute(plan, pieces)):
                    if i == 5:
                        cluster.kill()
                    yield done

            with pytest.raises(ApplyError, match=r"scheduler at tcp://.* went away") as caught:
                pipeline.apply(REF, sources, out, registry=production, execute=ending)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    done = pipeline.apply(REF, sources, out, registry=production)
    assert done.rows == 30 * ROWS and done.found >= 5 * ROWS
    require_scored(out, given)
    assert [*out.parent.iterdir()] == [out]


@pytest.mark.long
def test_what_fails_on_a_worker_is_one_line(tmp_path: Path, production: Registry) -> None:
    """If workers die on a piece as often as Dask allows, the error names the piece."""
    import dask

    sources, given = write_parts(tmp_path, 10), columns(ROWS * 10)
    out = tmp_path / "all.npz"
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), on_dask("local:1") as on:

        def changed(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            os.utime(sources[3])
            return on(plan, pieces)

        def dying(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            for i, done in enumerate(on(plan, pieces)):
                if i == 2:
                    kill_one(distributed.default_client(), random.Random(1))
                yield done

        cases = ((dying, out, "workers died"), (changed, tmp_path / "new.npz", "was changed"))
        for execute, place, said in cases:
            with pytest.raises(ApplyError, match=said) as caught:
                pipeline.apply(REF, sources, place, registry=production, execute=execute)
            assert "\n" not in str(caught.value) and not place.exists()
            if place == out:
                done = pipeline.apply(REF, sources, out, registry=production)
                assert done.found >= 2 * ROWS
                require_scored(out, given)


@pytest.mark.long  # a worker imports torch
def test_the_command_scores_on_workers(tmp_path: Path, production: Registry) -> None:
    sources, given = write_parts(tmp_path, 3), columns(ROWS * 3)
    out = tmp_path / "all.npz"
    done = answer("apply", REF, *sources, "--out", out, "--dask", "local:1", registry=production)
    assert done["spent"]["rows"] == 3 * ROWS
    require_scored(out, given)


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:9", "local:0", "nothing://here"])
def test_no_scheduler_is_one_line(
    tmp_path: Path, production: Registry, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.applying.dask_cluster._ANSWER_S", 1)
    sources = write_parts(tmp_path, 1)
    out = ("--out", tmp_path / "out", "--registry", production.uri)
    said = refusal("apply", REF, *sources, *out, "--dask", where)
    assert where in said and "scheduler" in said
    assert not (tmp_path / "out").exists()


def test_without_distributed_it_is_said_what_to_install(
    tmp_path: Path, production: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    sources = write_parts(tmp_path, 1)
    with pytest.raises(ApplyError, match=r"soa-pipeline\[dask\]"):
        pipeline.apply(REF, sources, tmp_path / "out", registry=production, dask="local")
    with pytest.raises(ApplyError, match="threads"):
        pipeline.apply(REF, sources, tmp_path / "out", registry=production, dask="local", threads=2)


@pytest.mark.long
def test_the_slurm_script_with_a_stand_in_for_slurm(tmp_path: Path, production: Registry) -> None:
    """`sbatch` runs a copy of the job's script here, as Slurm does; `scancel` ends it."""
    pytest.importorskip("dask_jobqueue")
    sources, given = write_parts(tmp_path, 6), columns(ROWS * 6)
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in {
        "sbatch": 'job=$(mktemp -p "${0%/*}")\ncp "$1" "$job"\nsetsid sh "$job" >/dev/null 2>&1 &\n'
        'echo "Submitted batch job $!"',
        "scancel": "kill -- -$1",
    }.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "examples.dask.slurm", REF, *sources,
         "--out", tmp_path / "all.parquet", "--jobs", "2", "--log", tmp_path / "logs"],
        cwd=root, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
             "PYTHONPATH": str(root), "PIPELINE_REGISTRY": production.uri},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    require_scored(tmp_path / "all.parquet", given)
