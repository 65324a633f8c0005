"""Score the jets of NanoAOD files with dask-awkward.

    pipeline run configs/nanoaod.yaml
    pipeline promote nanoaod-flavour --to staging
    python -m examples.dask.jets nanoaod-flavour@staging FILE.root --steps 4

The session goes to the workers as the version that it runs, and is opened once in each of their
processes. `flavours` is an ordinary function of Awkward arrays; processor.py has it in coffea.
"""

from __future__ import annotations

import argparse
from typing import Any

import awkward as ak
import numpy as np

import pipeline
from examples.nanoaod.data import BRANCHES
from soa.memory import to_awkward


def flavours(jets: Any, session: pipeline.Session) -> Any:
    """Scores of jets, in the events of these: lists of records p_light, p_c, p_b.

    `jets`: lists of records with the fields of `BRANCHES`. With a typetracer, which dask-awkward
    sends ahead to learn which columns are read, the model runs on no rows.
    """
    known = ak.typetracer.length_zero_if_typetracer(jets)
    counts = ak.num(known, axis=1)
    columns = {"entry": np.repeat(np.arange(len(counts), dtype=np.int32), counts)}
    for name, dtype in BRANCHES.items():
        columns[name] = ak.to_numpy(ak.flatten(known[name])).astype(dtype, casting="safe")
    given = pipeline.Collection.from_arrays(session.layout("jets"), columns)
    found = session.collection("flavours", given.n)
    most = session.signature.ranges["n"].limit
    for start in range(0, given.n, most):
        rows = start, min(start + most, given.n)
        session.run(given.window(*rows), found.window(*rows))
    scores = ak.unflatten(to_awkward(found), counts)
    if ak.backend(jets) == "typetracer":
        return ak.Array(scores.layout.to_typetracer(forget_length=True))
    return scores


def scored(file: str, session: pipeline.Session, steps: int = 1) -> Any:
    """A dask-awkward array: the scores of all jets of a file, in `steps` partitions."""
    import dask_awkward as dak
    import uproot

    events = uproot.dask({file: "Events"}, steps_per_file=steps, open_files=True)
    jets = dak.zip({name: events[f"Jet_{name}"] for name in BRANCHES})
    return dak.map_partitions(flavours, jets, session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="name@alias, name/version or the folder of a bundle")
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    session = pipeline.load(options.model, mode="test")
    scores = scored(options.file, session, options.steps).compute()
    print(f"{ak.count(scores.p_b)} jets of {len(scores)} events, most like b: {ak.max(scores.p_b)}")


if __name__ == "__main__":
    main()
