"""Score files on a Slurm cluster: dask-jobqueue submits the workers as jobs of the batch system.

    pip install 'soa-pipeline[dask,data]' dask-jobqueue
    python -m examples.dask.slurm jet-tagger@production /data/*.root --out /data/scored --jobs 50

Run it on a host on which `sbatch` works and which the nodes can reach, because Dask's scheduler
runs in this process. The registry, the files and the output must have the same paths on the nodes.
If it is killed and started again, it continues. It was run with a replacement of `sbatch`, but
never on a Slurm cluster.
"""

from __future__ import annotations

import argparse

from dask_jobqueue import SLURMCluster

import pipeline


def cluster(queue: str | None, minutes: int, log: str) -> SLURMCluster:
    """The cluster; each job is a worker with one thread, for at most `minutes`."""
    return SLURMCluster(
        cores=1,
        memory="4GB",
        queue=queue,
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:00",
        log_directory=log,
        # A worker stops accepting pieces before Slurm ends its job.
        worker_extra_args=["--lifetime", f"{max(minutes - 5, 1)}m", "--lifetime-stagger", "2m"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="name@alias or name/version")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--queue")
    parser.add_argument("--minutes", type=int, default=120, help="of a job")
    parser.add_argument("--log", default="logs")
    options = parser.parse_args()
    with cluster(options.queue, options.minutes, options.log) as workers:
        # New jobs replace those that end, as long as there are pieces to score.
        workers.adapt(minimum_jobs=1, maximum_jobs=options.jobs)
        pipeline.apply(options.model, options.files, options.out, dask=workers.scheduler_address)


if __name__ == "__main__":
    main()
