"""Score files on a Slurm cluster: dask-jobqueue submits the workers as jobs of the batch system.

    pip install 'soa-pipeline[dask,data]' dask-jobqueue
    python -m examples.dask.slurm jet-tagger@production /data/*.root --out /data/scored --jobs 50

Run it where `sbatch` works and that the nodes can reach: the scheduler lives in this process. The
registry, the files and the output have to be at the same paths on the nodes. Killed and started
again, it goes on. It has been run with a stand-in for `sbatch`, on no Slurm cluster.
"""

from __future__ import annotations

import argparse

from dask_jobqueue import SLURMCluster

import pipeline


def cluster(queue: str | None, minutes: int, log: str) -> SLURMCluster:
    """A job is a worker with one thread."""
    return SLURMCluster(
        cores=1,
        memory="4GB",
        queue=queue,
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:00",
        log_directory=log,
        # A worker stops taking pieces before Slurm ends its job.
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
        # New jobs take the place of those that end, as long as there are pieces.
        workers.adapt(minimum_jobs=1, maximum_jobs=options.jobs)
        pipeline.apply(options.model, options.files, options.out, dask=workers.scheduler_address)


if __name__ == "__main__":
    main()
