"""A collection's columns in other libraries: the same addresses, or a refusal."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import awkward as ak
import numpy as np
import pytest
import torch

from soa.errors import CollectionError, LayoutError
from soa.layout import Layout, column, eigen, opaque, scalar
from soa.memory import (
    Collection,
    as_collection,
    to_arrow,
    to_awkward,
    to_numpy,
    to_pandas,
    to_polars,
)
from tests.soa.exporters import aligned_array
from tests.soa.memory.test_from_libraries import MATRIX, NUMBERS, address

BUFFER = Layout(MATRIX.columns)


def matrix_collection(n: int = 4) -> Collection:
    values = np.arange(6 * n, dtype="float32").reshape(n, 2, 3)
    return Collection.from_arrays(BUFFER, {"m": values, "k": np.arange(n, dtype="int32")})


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_to_arrow_shares_memory(dtype: str, storage: Any) -> None:
    layout = Layout([column("a", "int8"), column("x", dtype)], storage=storage)
    collection = Collection(layout, 3, capacity=40)
    made = to_arrow(collection)
    assert made.schema.names == ["a", "x"]
    assert address(made.column("x")) == collection["x"].ctypes.data
    collection["x"][:] = [1, 2, 3]
    assert made.column("x").to_pylist() == [1, 2, 3]
    made.validate(full=True)


def test_booleans_become_bits() -> None:
    collection = Collection(Layout([column("x", "bool")]), 3)
    collection["x"][1] = True
    assert to_arrow(collection)["x"].to_pylist() == [False, True, False]
    assert to_awkward(collection).x.tolist() == [False, True, False]


def test_eigen_columns_and_back() -> None:
    collection = matrix_collection()
    made = to_arrow(collection)
    names = ["e0_0", "e0_1", "e0_2", "e1_0", "e1_1", "e1_2"]
    assert made.column("m")[1].as_py() == dict(zip(names, range(6, 12), strict=True))
    records = to_awkward(collection)
    assert records.m.e1_0.tolist() == [3, 9, 15, 21]
    for data in (made, records):
        back = as_collection(data, MATRIX)
        assert not back.copied
        for k in range(6):
            assert back.span("m", k).address == collection.span("m", k).address
        np.testing.assert_array_equal(to_numpy(back)["m"], collection["m"])
    assert to_arrow(matrix_collection(0)).num_rows == len(to_awkward(matrix_collection(0))) == 0
    vector = Collection(Layout([eigen("v", "int16", 2)]), 3)
    assert [f.name for f in to_arrow(vector).schema.field("v").type] == ["e0", "e1"]


def test_what_comes_out_keeps_a_collection_alive() -> None:
    made, records = to_arrow(matrix_collection(), ["k"]), to_awkward(matrix_collection(), ["k"])
    gc.collect(1)  # only young objects: visiting all takes a second
    assert made.column("k").to_pylist() == records.k.tolist() == [0, 1, 2, 3]


def test_read_only_memory_stays_so() -> None:
    array = aligned_array(np.arange(4), "float32")
    array.flags.writeable = False
    collection = Collection.wrap(Layout([column("x", "float32")], 16), array, 4)
    assert not ak.to_numpy(to_awkward(collection).x).flags.writeable
    assert not to_numpy(collection)["x"].flags.writeable


def test_numpy_sees_the_columns() -> None:
    layout = Layout([column("x", "float32"), scalar("run", "uint32"), opaque("hit", 3)])
    collection = Collection(layout, 4)
    found = to_numpy(collection)
    assert [found[name].shape for name in ("x", "run", "hit")] == [(4,), (), (4,)]
    found["x"][2] = 5
    assert collection["x"][2] == 5
    assert [*to_numpy(collection, ["x"])] == ["x"]


def test_frames() -> None:
    collection = matrix_collection()
    assert to_pandas(collection, ["k"])["k"].tolist() == [0, 1, 2, 3]
    pytest.importorskip("polars")
    assert to_polars(collection, ["k"])["k"].to_list() == [0, 1, 2, 3]
    assert address(to_polars(collection, ["k"])["k"].to_arrow()) == collection["k"].ctypes.data


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_not_installed(library: str) -> None:
    """In a process of its own: pyarrow imports pandas once."""
    program = f"""
import sys
class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "{library}":
            raise ModuleNotFoundError("No module named '{library}'")
sys.meta_path.insert(0, Hidden)
from soa import Collection, Layout, column
from soa.errors import CollectionError
from soa.memory import to_{library}
try:
    to_{library}(Collection(Layout([column("pt", "float32")]), 3))
except CollectionError as error:
    print(error.code)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "missing-library\n", ran.stderr


@pytest.mark.parametrize("export", [to_arrow, to_awkward])
def test_what_is_no_column_cannot_go_out(export: Any) -> None:
    layout = Layout(
        [column("x", "int8"), scalar("run", "int8"), column("h", "bfloat16"), opaque("o", 3)]
    )
    collection = Collection(layout, 2)
    for names, says in (
        (None, r"'run' is a scalar .*leave it out"),
        (["x", "h"], r"column 'h': .* no bfloat16"),
        (["o"], r"'o' is opaque.*leave it out"),
    ):
        with pytest.raises(CollectionError, match=says):
            export(collection, names)
    with pytest.raises(LayoutError, match="no column 'y'"):
        export(collection, ["y"])
    assert len(export(collection, ["x"])["x"]) == 2


@pytest.mark.cuda
def test_gpu_collections_are_copied_by_hand() -> None:
    collection = Collection(Layout([column("x", "float32")]), 4, "cuda")
    for export in (to_arrow, to_awkward):
        with pytest.raises(CollectionError, match=r"lies on cuda:0: copy it first"):
            export(collection)
    assert "float32" in repr(collection) and torch.cuda.is_available()
