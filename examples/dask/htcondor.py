"""Score files on an HTCondor pool: dask-jobqueue submits the workers as jobs of the pool.

    pip install 'soa-pipeline[dask,data]' dask-jobqueue
    python -m examples.dask.htcondor jet-tagger@production /data/*.root --out /data/scored --jobs 50

Run it on a host on which `condor_submit` works and which the nodes can reach, because Dask's
scheduler runs in this process. The registry, the files and the output must have the same paths on
the nodes. If it is killed and started again, it continues. It was never run on an HTCondor pool.
"""

from __future__ import annotations

import argparse

from dask_jobqueue import HTCondorCluster

import pipeline


def cluster(seconds: int, log: str) -> HTCondorCluster:
    """The pool; each job is a worker with one thread, for at most `seconds`."""
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
        # New jobs replace those that end, as long as there are pieces to score.
        workers.adapt(minimum_jobs=1, maximum_jobs=options.jobs)
        pipeline.apply(options.model, options.files, options.out, dask=workers.scheduler_address)


if __name__ == "__main__":
    main()
