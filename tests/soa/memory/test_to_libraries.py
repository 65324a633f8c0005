"""A collection's columns in other libraries: the same addresses, or a refusal."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import awkward as ak
import numpy as np
import pytest

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
    """A collection of MATRIX's columns in one buffer, with whole numbers in order."""
    values = np.arange(6 * n, dtype="float32").reshape(n, 2, 3)
    return Collection.from_arrays(BUFFER, {"m": values, "k": np.arange(n, dtype="int32")})


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_to_arrow_shares_memory(dtype: str, storage: Any) -> None:
    layout = Layout([column("a", "int8"), column("x", dtype)], storage=storage)
    collection = Collection(layout, 3, capacity=40)
    batch = to_arrow(collection)
    assert batch.schema.names == ["a", "x"]
    assert address(batch.column("x")) == collection["x"].ctypes.data
    collection["x"][:] = [1, 2, 3]
    assert batch.column("x").to_pylist() == [1, 2, 3]
    batch.validate(full=True)


def test_booleans_become_bits() -> None:
    collection = Collection(Layout([column("x", "bool")]), 3)
    collection["x"][1] = True
    assert to_arrow(collection)["x"].to_pylist() == [False, True, False]
    assert to_awkward(collection).x.tolist() == [False, True, False]


def test_a_matrix_has_a_field_for_each_entry_in_arrow() -> None:
    row = to_arrow(matrix_collection()).column("m")[1].as_py()
    names = ["e0_0", "e0_1", "e0_2", "e1_0", "e1_1", "e1_2"]
    assert row == dict(zip(names, range(6, 12), strict=True))


def test_a_matrix_has_a_field_for_each_entry_in_awkward() -> None:
    assert to_awkward(matrix_collection()).m.e1_0.tolist() == [3, 9, 15, 21]


def test_a_vector_has_a_field_for_each_entry_in_arrow() -> None:
    vector = Collection(Layout([eigen("v", "int16", 2)]), 3)
    assert [field.name for field in to_arrow(vector).schema.field("v").type] == ["e0", "e1"]


either_export = pytest.mark.parametrize("export", [to_arrow, to_awkward])


@either_export
def test_a_matrix_comes_back_without_a_copy(export: Any) -> None:
    collection = matrix_collection()
    back = as_collection(export(collection), MATRIX)
    assert not back.copied
    for k in range(6):
        assert back.span("m", k).address == collection.span("m", k).address
    np.testing.assert_array_equal(to_numpy(back)["m"], collection["m"])


@either_export
def test_a_collection_without_rows_has_no_rows_elsewhere(export: Any) -> None:
    assert len(export(matrix_collection(0))) == 0


@either_export
def test_what_comes_out_keeps_a_collection_alive(export: Any) -> None:
    exported = export(matrix_collection(), ["k"])
    gc.collect(1)  # only young objects: visiting all takes a second
    assert exported["k"].tolist() == [0, 1, 2, 3]


def test_read_only_memory_stays_so_in_awkward_and_numpy() -> None:
    array = aligned_array(np.arange(4), "float32")
    array.flags.writeable = False
    collection = Collection.wrap(Layout([column("x", "float32")], 16), array, 4)
    assert not ak.to_numpy(to_awkward(collection).x).flags.writeable
    assert not to_numpy(collection)["x"].flags.writeable


def test_numpy_sees_the_columns() -> None:
    layout = Layout([column("x", "float32"), scalar("run", "uint32"), opaque("hit", 3)])
    collection = Collection(layout, 4)
    arrays = to_numpy(collection)
    assert [arrays[name].shape for name in ("x", "run", "hit")] == [(4,), (), (4,)]
    arrays["x"][2] = 5
    assert collection["x"][2] == 5


def test_numpy_gets_only_the_columns_that_are_named() -> None:
    assert [*to_numpy(matrix_collection(), ["k"])] == ["k"]


def test_a_frame_of_pandas_has_the_values() -> None:
    assert to_pandas(matrix_collection(), ["k"])["k"].tolist() == [0, 1, 2, 3]


def test_a_frame_of_polars_shares_memory() -> None:
    pytest.importorskip("polars")
    collection = matrix_collection()
    column_of_frame = to_polars(collection, ["k"])["k"]
    assert column_of_frame.to_list() == [0, 1, 2, 3]
    assert address(column_of_frame.to_arrow()) == collection["k"].ctypes.data


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_not_installed_is_refused_by_code(library: str) -> None:
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


MIXED = Layout(
    [column("x", "int8"), scalar("run", "int8"), column("h", "bfloat16"), opaque("o", 3)]
)


@either_export
@pytest.mark.parametrize(
    ("names", "says"),
    [
        (None, r"'run' is a scalar .*leave it out"),
        (["x", "h"], r"column 'h': .* no bfloat16"),
        (["o"], r"'o' is opaque.*leave it out"),
    ],
    ids=["scalar", "bfloat16", "opaque"],
)
def test_what_other_libraries_do_not_have_is_refused(
    export: Any, names: list[str] | None, says: str
) -> None:
    with pytest.raises(CollectionError, match=says):
        export(Collection(MIXED, 2), names)


@either_export
def test_an_unknown_column_is_refused(export: Any) -> None:
    with pytest.raises(LayoutError, match="no column 'y'"):
        export(Collection(MIXED, 2), ["y"])


@either_export
def test_a_column_beside_what_is_refused_goes_out(export: Any) -> None:
    assert len(export(Collection(MIXED, 2), ["x"])["x"]) == 2


@pytest.mark.cuda
@either_export
def test_collections_on_a_gpu_are_refused(export: Any) -> None:
    collection = Collection(Layout([column("x", "float32")]), 4, "cuda")
    with pytest.raises(CollectionError, match=r"lies on cuda:0: copy it first"):
        export(collection)


@pytest.mark.cuda
def test_the_text_of_a_collection_on_a_gpu_names_its_dtypes() -> None:
    assert "float32" in repr(Collection(Layout([column("x", "float32")]), 4, "cuda"))
