"""Jets of a NanoAOD file as SoA columns, read with uproot.

The file is CMS Open Data (CC0), from scikit-hep-testdata. It is not part of this repository;
`locate` finds it. Its name says ttbar, but of its 537 jets 503 are light, 28 charm and 6 bottom,
and all DeepCSV and DeepJet discriminators are unset.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Columns: TypeAlias = dict[str, npt.NDArray[Any]]

FILE = "nanoAOD_2015_CMS_Open_Data_ttbar.root"
CLASSES = ("light", "c", "b")
# Branches Jet_<name>, with the dtypes of the file. In the columns, `entry` comes first: the number
# of the event in the file.
BRANCHES: dict[str, type[np.generic]] = {
    "pt": np.float32,
    "eta": np.float32,
    "phi": np.float32,
    "mass": np.float32,
    "area": np.float32,
    "chHEF": np.float32,
    "neEmEF": np.float32,
    "btagCSVV2": np.float32,
    "qgl": np.float32,
    "puIdDisc": np.float32,
    "jetId": np.int32,
    "nMuons": np.int32,
    "nConstituents": np.uint8,
}


def locate(name: str = FILE) -> Path:
    """The path of the file `name` in $SKHEP_DATA, else in ../shared/data next to the repository.

    Raises FileNotFoundError, which names these folders and says how to get the file.
    """
    folders = [Path(__file__).resolve().parents[3] / "shared" / "data"]
    if os.environ.get("SKHEP_DATA"):
        folders.insert(0, Path(os.environ["SKHEP_DATA"]))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"{name} is not in {' or '.join(map(str, folders))}. Put it in a folder that SKHEP_DATA "
        "names; examples/README.md says where it comes from."
    )


def jets(path: Path) -> tuple[Columns, npt.NDArray[np.int64]]:
    """Return (columns, labels) of all jets of all events, in the file's order; each (n,).

    Labels index `CLASSES` and come from Jet_hadronFlavour (0, 4, 5).
    """
    import awkward as ak
    import uproot

    with uproot.open(path) as file:
        wanted = [f"Jet_{name}" for name in (*BRANCHES, "hadronFlavour")]
        arrays: Any = file["Events"].arrays(wanted)
    counts = ak.to_numpy(ak.num(arrays["Jet_pt"]))
    columns: Columns = {"entry": np.repeat(np.arange(len(counts), dtype=np.int32), counts)}
    for name, dtype in BRANCHES.items():
        flat = ak.to_numpy(ak.flatten(arrays[f"Jet_{name}"]))
        columns[name] = flat.astype(dtype, casting="safe")
    flavour = ak.to_numpy(ak.flatten(arrays["Jet_hadronFlavour"]))
    labels = np.select([flavour == 4, flavour == 5], [1, 2], 0)
    return columns, labels.astype(np.int64)


def reference(rows: dict[str, int], seed: int) -> dict[str, Columns]:
    """Inputs of `configs/nanoaod.yaml`: random jets of the file, drawn with replacement."""
    columns, _ = jets(locate())
    drawn = np.random.default_rng(seed).integers(0, len(columns["pt"]), rows["n"])
    return {"jets": {name: values[drawn] for name, values in columns.items()}}
