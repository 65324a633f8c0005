"""Score files on an HTCondor pool: dask-jobqueue submits the workers as jobs of the pool.

    pip install 'soa-pipeline[dask,data]' dask-jobqueue
    python -m examples.dask.htcondor jet-tagger@production /data/*.root --out /data/scored --jobs 50

Run it where `condor_submit` works and that the nodes can reach: the scheduler lives in this
process. The registry, the files and the output have to be at the same paths on the nodes. Killed
and started again, it goes on. No HTCondor pool has run it.
"""

from __future__ import annotations

import argparse

from dask_jobqueue import HTCondorCluster

import pipeline


def cluster(seconds: int, log: str) -> HTCondorCluster:
    """A job is a worker with one thread."""
    return HTCondorCluster(
        cores=1,
        memory="4GB",
        disk="4GB",
        log_directory=log,
        job_extra_directives={"+MaxRuntime": seconds},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="name@alias or name/version")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=7200, help="of a job")
    parser.add_argument("--log", default="logs")
    options = parser.parse_args()
    with cluster(options.seconds, options.log) as workers:
        # New jobs take the place of those that end, as long as there are pieces.
        workers.adapt(minimum_jobs=1, maximum_jobs=options.jobs)
        pipeline.apply(options.model, options.files, options.out, dask=workers.scheduler_address)


if __name__ == "__main__":
    main()
