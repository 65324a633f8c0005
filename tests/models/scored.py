"""Files of rows for a small tagger, written by each format's own library, and the eager answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import torch
import uproot

from tests.models.mlps import CLASSES, FEATURES, PointwiseFirst

SUFFIXES = (".parquet", ".arrow", ".feather", ".root", ".rntuple.root", ".h5", ".npz")


def columns(rows: int, seed: int = 1) -> dict[str, Any]:
    """Features, the row numbers, and a column of vectors."""
    draw = np.random.default_rng(seed)
    features: dict[str, Any] = {name: draw.normal(size=rows).astype("f4") for name in FEATURES}
    return {**features, "event": np.arange(rows), "hit": draw.normal(size=(rows, 3))}


def eager(table: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The model's answers on rows: (n, 3)."""
    rows = torch.from_numpy(np.stack([np.asarray(table[name]) for name in FEATURES], axis=1))
    with torch.no_grad():
        answers: np.ndarray[Any, Any] = PointwiseFirst(1)(rows).numpy()
    return answers


def write_rows(path: Path, table: Mapping[str, Any], group: int = 250) -> Path:
    """Writes a file with row groups, baskets, clusters or chunks of `group` rows."""
    kind = "".join(path.suffixes[-2:])
    if path.suffix == ".parquet":
        pq.write_table(pa.table(arrow(table)), path, row_group_size=group)
    elif path.suffix in (".arrow", ".feather"):
        pyarrow.feather.write_feather(pa.table(arrow(table)), path, chunksize=group)
    elif path.suffix == ".root":
        with uproot.recreate(path) as file:
            types = {name: ak.Array(values).type.content for name, values in table.items()}
            make = file.mkrntuple if kind == ".rntuple.root" else file.mktree
            tree = make("Events", types)
            rows = len(next(iter(table.values())))
            for low in range(0, rows, group):
                tree.extend({name: values[low : low + group] for name, values in table.items()})
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, values in table.items():
                file[name] = values
    else:
        np.savez_compressed(path, **table)
    return path


def write_parts(folder: Path, files: int) -> list[Path]:
    """Writes the rows of `columns(100 * files)` as this many files, each a piece of a job."""
    whole, paths = columns(100 * files), []
    for i in range(files):
        rows = slice(100 * i, 100 * (i + 1))
        part = {name: values[rows] for name, values in whole.items()}
        paths.append(write_rows(folder / f"{i}.parquet", part))
    return paths


def arrow(table: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of Arrow; those of vectors are lists of a fixed size."""

    def array(values: Any) -> Any:
        if isinstance(values, ak.Array):
            return ak.to_arrow(values, extensionarray=False)
        flat = pa.array(values.reshape(-1))
        return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, 3)

    return {name: array(values) for name, values in table.items()}


def read_rows(path: Path) -> dict[str, Any]:
    """All columns of an output, read with the format's own library."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
    elif path.suffix in (".arrow", ".feather"):
        table = pyarrow.feather.read_table(path)
    elif path.suffix == ".root":
        with uproot.open(path) as file:
            tree = file["Events"]
            return {name: tree[name].array() for name in tree.keys()}  # noqa: SIM118
    elif path.suffix == ".h5":
        with h5py.File(path) as file:
            return {name: file[name][:] for name in file}
    else:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files if arrays[name].shape}
    return {name: ak.from_arrow(table[name]) for name in table.column_names}


def require_scored(path: Path, table: Mapping[str, Any], kept: tuple[str, ...] = ()) -> None:
    """Requires exactly the rows of `table`, in their order, with the model's answers."""
    written = read_rows(path)
    # A file of ROOT may have counts of vectors besides, such as `nhit`.
    assert {name for name in written if not name.startswith("n")} == {*kept, *CLASSES}
    answers = np.stack([np.asarray(written[name]) for name in CLASSES], axis=1)
    np.testing.assert_allclose(answers, eager(table), atol=1e-5, rtol=1e-4)
    for name in kept:
        np.testing.assert_array_equal(np.asarray(written[name]), table[name])
