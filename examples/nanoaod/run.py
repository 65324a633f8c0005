"""Run the flavour tagger of the registry on the jets of the NanoAOD file.

    pipeline run configs/nanoaod.yaml
    pipeline promote nanoaod-flavour --to staging
    python -m examples.nanoaod.run nanoaod-flavour@staging

uproot decompresses the branches into new arrays, which are copied once into the collection. After
that nothing is copied: the model reads the columns of the collection and writes its answers into
the columns of `flavours`.

The committed weights were trained on these same jets. So the table only shows that everything
works; for the quality of the tagger see the cross-validation of train.py.
"""

from __future__ import annotations

import argparse

import numpy as np

import pipeline
from examples.nanoaod import data


def main() -> None:
    """Print the eight jets that are most like b."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="name@alias, name/version or the folder of a bundle")
    parser.add_argument("--mode", choices=["production", "test"], default="test")
    parser.add_argument("--registry", help="where the registry is, if not in its usual place")
    options = parser.parse_args()

    try:
        columns, labels = data.jets(data.locate())
        session = pipeline.load(options.model, mode=options.mode, registry=options.registry)
    except (FileNotFoundError, pipeline.SoaPipelineError) as error:
        raise SystemExit(f"error: {error}") from None
    jets = pipeline.Collection.from_arrays(session.layout("jets"), columns)
    flavours = session.collection("flavours", jets.n)
    session.run(jets, flavours)

    bottom = flavours["p_b"]
    print(f"{jets.n} jets of {int(jets.tensor('entry').max()) + 1} events; most like b:")
    print("event      pt     eta  p_light   p_c   p_b  true")
    for i in np.argsort(-bottom)[:8]:
        light, charm = flavours["p_light"][i], flavours["p_c"][i]
        print(
            f"{columns['entry'][i]:5d} {columns['pt'][i]:7.1f} {columns['eta'][i]:7.2f}"
            f"    {light:.3f} {charm:.3f} {bottom[i]:.3f}  {data.CLASSES[labels[i]]}"
        )


if __name__ == "__main__":
    main()
