"""A coffea processor (2025 and later) that scores the jets of each chunk of events.

    python -m examples.dask.processor nanoaod-flavour@staging FILE.root

coffea sends the processor to its workers with every chunk; the session in it is opened once in a
process, and runs the version that it was loaded as, whatever the alias means later.
"""

from __future__ import annotations

import argparse
from typing import Any

import awkward as ak
import numpy as np
from coffea import processor
from coffea.nanoevents import NanoAODSchema

import pipeline
from examples.dask.jets import flavours


class Schema(NanoAODSchema):  # type: ignore[misc]
    """For files that lack some of the references between their collections."""

    warn_missing_crossrefs = False


class Flavours(processor.ProcessorABC):  # type: ignore[misc]
    """Counts jets, and how their scores of `b` are distributed in 20 bins."""

    def __init__(self, session: pipeline.Session) -> None:
        self.session = session

    def process(self, events: Any) -> dict[str, Any]:
        bottom = ak.flatten(flavours(events.Jet, self.session).p_b)
        histogram, _ = np.histogram(ak.to_numpy(bottom), bins=20, range=(0, 1))
        found = {"events": len(events), "jets": len(bottom), "p_b": histogram}
        return {events.metadata["dataset"]: found}

    def postprocess(self, accumulator: Any) -> Any:
        return accumulator


def run(files: list[str], session: pipeline.Session, client: Any = None, chunk: int = 100) -> Any:
    """What all chunks of `chunk` events add up to; on the workers of a Dask client, if given."""
    here = processor.IterativeExecutor(status=False)
    executor = processor.DaskExecutor(client=client, status=False) if client else here
    runner = processor.Runner(executor, pre_executor=here, chunksize=chunk, schema=Schema)
    return runner({"jets": files}, Flavours(session), treename="Events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="name@alias, name/version or the folder of a bundle")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--dask", metavar="ADDRESS", help="a scheduler; without it: here")
    options = parser.parse_args()
    session = pipeline.load(options.model, mode="test")
    if options.dask is None:
        print(run(options.files, session))
        return
    from distributed import Client

    with Client(options.dask) as client:
        print(run(options.files, session, client))


if __name__ == "__main__":
    main()
