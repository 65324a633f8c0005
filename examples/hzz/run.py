"""Score every event of the HZZ file, with the jets and muons in the memory that uproot filled.

pipeline run configs/hzz.yaml
pipeline promote hzz-events --to staging
python -m examples.hzz.run hzz-events@staging
"""

from __future__ import annotations

import sys

import uproot

import pipeline
from examples.nanoaod.data import locate
from soa.memory import from_jagged

FILE = "uproot-HZZ.root"


def main(model: str) -> None:
    """Print the five events with the highest scores."""
    session = pipeline.load(model, mode="test")
    with uproot.open(locate(FILE)) as file:
        events = file["events"].arrays(filter_name=["Jet_*", "Muon_*"])
    jets = from_jagged(events, session.signature, "jets")
    muons = from_jagged(events, session.signature, "muons")
    scores = session.collection("scores", len(events))
    session.run({**jets, **muons}, scores)
    for event in scores["signal"].argsort()[::-1][:5]:
        n_jets, n_muons = len(events[event]["Jet_Px"]), len(events[event]["Muon_Px"])
        print(f"event {event}: {scores['signal'][event]:.3f} ({n_jets} jets, {n_muons} muons)")


if __name__ == "__main__":
    main(sys.argv[1])
