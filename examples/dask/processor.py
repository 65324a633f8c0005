"""A coffea processor (2025 and later) that scores the jets of each chunk of events.

    python -m examples.dask.processor nanoaod-flavour@staging FILE.root

coffea sends the processor to its workers with every chunk. Each process opens the session in it
only once. The session keeps the version that it loaded at first, even if the alias moves later.
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

import awkward as ak
import numpy as np
from coffea import processor
from coffea.nanoevents import NanoAODSchema

import pipeline
from examples.nanoaod.data import BRANCHES
from soa.memory import to_awkward


class Schema(NanoAODSchema):  # type: ignore[misc]
    """For files of 2015, in which some referenced collections are missing. coffea sets some fields
    to constants; here only the charge of jets, because these photons have a mass and a charge."""

    warn_missing_crossrefs = False
    full_like_items: ClassVar[dict[str, Any]] = {
        "Jet_charge": NanoAODSchema.full_like_items["Jet_charge"]
    }


def flavours(jets: Any, session: pipeline.Session) -> Any:
    """Scores of jets: for each event a list of records with p_light, p_c and p_b."""
    counts = ak.num(jets.pt, axis=1)
    columns = {"entry": np.repeat(np.arange(len(counts), dtype=np.int32), counts)}
    for name, dtype in BRANCHES.items():
        columns[name] = ak.to_numpy(ak.flatten(jets[name])).astype(dtype, casting="safe")
    inputs = pipeline.Collection.from_arrays(session.layout("jets"), columns)
    scores = session.collection("flavours", inputs.n)
    most = session.signature.ranges["n"].limit
    for start in range(0, inputs.n, most):
        rows = start, min(start + most, inputs.n)
        session.run(inputs.window(*rows), scores.window(*rows))
    return ak.unflatten(to_awkward(scores), counts)


class Flavours(processor.ProcessorABC):  # type: ignore[misc]
    """Counts events and jets, and fills a histogram of the jets' `p_b` with 20 bins."""

    def __init__(self, session: pipeline.Session) -> None:
        self.session = session

    def process(self, events: Any) -> dict[str, Any]:
        """The counts and the histogram of a chunk, by its dataset. coffea adds those of all."""
        bottom = ak.flatten(flavours(events.Jet, self.session).p_b)
        histogram, _ = np.histogram(ak.to_numpy(bottom), bins=20, range=(0, 1))
        counts = {"events": len(events), "jets": len(bottom), "p_b": histogram}
        return {events.metadata["dataset"]: counts}

    def postprocess(self, accumulator: Any) -> Any:
        return accumulator


def run(files: list[str], session: pipeline.Session, client: Any = None, chunk: int = 100) -> Any:
    """The sum over all chunks of `chunk` events, computed on the workers of `client` if given."""
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
