"""Arrow, Awkward and CuPy: the same addresses on both sides, or a refusal that says what to do."""

from __future__ import annotations

import gc
from typing import Any

import awkward as ak
import numpy as np
import pyarrow as pa
import pytest
import torch

from soa.errors import CollectionError, LayoutError
from soa.layout import Layout, column, eigen, scalar
from soa.memory import Collection
from soa.memory.interop import from_arrow, from_awkward, to_arrow, to_awkward
from tests.soa.exporters import aligned_array

NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "float16", "float32", "float64")  # fmt: skip


def address(array: Any) -> int:
    """Where an Arrow array's first value lies."""
    return int(array.buffers()[-1].address + array.offset * array.type.bit_width // 8)


def batch(n: int = 5) -> Any:
    return pa.record_batch(
        {
            "pt": pa.array(np.arange(n, dtype="float32")),
            "q": pa.array(np.arange(n, dtype="int8")),
            "name": pa.array([str(i) for i in range(n)]),
        }
    )


# A model's layout picks its columns, in its order.
PICKED = Layout([column("q", "int8"), column("pt", "float32")], 1, "columns")

MATRIX = Layout([eigen("m", "float32", 2, 3), column("k", "int32")])
MATRIX_APART = Layout(MATRIX.columns, 4, "columns")


def matrix_collection(n: int = 4) -> Collection:
    values = np.arange(6 * n, dtype="float32").reshape(n, 2, 3)
    return Collection.from_arrays(MATRIX, {"m": values, "k": np.arange(n, dtype="int32")})


# -- Arrow in --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrow_columns_are_seen_in_place(dtype: str) -> None:
    array = pa.array(np.arange(9).astype(dtype))
    sources: list[tuple[Any, Any]] = [
        (pa.table({"x": array}), array),
        (pa.record_batch({"x": array}), array),
        ({"x": array}, array),
        ({"x": array[3:7]}, array[3:7]),  # wherever a slice starts
        ({"x": pa.chunked_array([array])}, array),
    ]
    for data, one in sources:
        collection = from_arrow(data)
        assert collection.layout == Layout([column("x", dtype)], 1, "columns")
        assert collection.tensor("x").data_ptr() == address(one)
        assert collection.tensor("x").tolist() == one.to_pylist()
        assert collection.readonly


def test_a_layout_picks_arrow_columns() -> None:
    data = batch()
    collection = from_arrow(data, PICKED)
    assert collection.layout == PICKED
    assert collection.tensor("pt").data_ptr() == address(data.column("pt"))
    assert collection.tensor("q").data_ptr() == address(data.column("q"))
    part = from_arrow(data.slice(3, 2), PICKED)
    assert part.tensor("pt").data_ptr() == address(data.column("pt")) + 12
    assert part.tensor("q").tolist() == [3, 4]


def test_arrow_structs_are_eigen_columns() -> None:
    fields = [pa.array(np.arange(4, dtype="float32") + 10 * i) for i in range(6)]
    struct = pa.StructArray.from_arrays(fields, names=list("abcdef"))
    data = {"m": struct, "k": pa.array(np.arange(4, dtype="int32"))}
    collection = from_arrow(data, MATRIX_APART)
    # Fields are row by row: d is (1, 0), which is component 0 * 2 + 1.
    assert collection.component("m", 1).data_ptr() == address(fields[3])
    assert collection.component("m", 4).data_ptr() == address(fields[2])
    part = from_arrow({name: array[1:3] for name, array in data.items()}, MATRIX_APART)
    assert part.component("m", 1).data_ptr() == address(fields[3]) + 4
    assert part.component("m", 1).tolist() == [31, 32]


def test_empty_arrow_data() -> None:
    assert from_arrow(batch(0), PICKED).n == 0
    assert from_arrow(batch().slice(2, 0), PICKED).tensor("pt").shape == (0,)
    assert from_arrow({"x": pa.chunked_array([], pa.float32())}).n == 0


def test_nulls_that_are_not_there_do_no_harm() -> None:
    array = pa.array([1.0, None, 3.0], pa.float32())[2:]
    assert array.buffers()[0] is not None
    assert from_arrow({"x": array}).tensor("x").tolist() == [3.0]


def test_arrow_memory_lives_as_long_as_a_view() -> None:
    size = 1 << 20
    gc.collect()
    before = pa.total_allocated_bytes()
    view = from_arrow({"x": pa.array([1] * size, pa.int8())}).tensor("x")
    gc.collect()
    assert pa.total_allocated_bytes() >= before + size
    assert view.count_nonzero() == size
    del view
    gc.collect()
    assert pa.total_allocated_bytes() < before + size


def listed(kind: Any) -> dict[str, Any]:
    return {"x": pa.array([], kind)}


STRUCT = pa.StructArray.from_arrays([pa.array([1.0]), pa.array([1.0])], names=["a", "b"])
ONE_STRUCT = Layout([eigen("x", "float64", 2)], 8, "columns")
MASKED_STRUCT = pa.StructArray.from_arrays(
    [pa.array([1.0]), pa.array([1.0])], names=["a", "b"], mask=pa.array([True])
)


@pytest.mark.parametrize(
    ("data", "layout", "says"),
    [
        ({"x": pa.array([1.0, None])}, None, r"column 'x' has 1 nulls, .*fill_null\(value\)"),
        ({"x": pa.chunked_array([[1.0], [2.0]])}, None, r"lies in 2 chunks: combine_chunks\(\)"),
        (pa.table({"x": pa.chunked_array([[1], [2]])}), None, "column 'x' lies in 2 chunks"),
        (listed(pa.bool_()), None, "column 'x' is bool: .* bits; cast it to uint8"),
        (listed(pa.list_(pa.float32(), 3)), None, "fixed_size_list.* one element lie together"),
        (listed(pa.list_(pa.float32())), None, "column 'x' is list<.*flatten it first"),
        (listed(pa.timestamp("s")), None, r"timestamp.*view\('int64'\)"),
        (listed(pa.uint64()), None, r"column 'x' is uint64: .*view\('int64'\)"),
        (listed(pa.string()), None, "column 'x' is string: cast it to one of int8"),
        (listed(pa.null()), None, "column 'x' is null: cast"),
        ({"x": STRUCT}, None, "'x' has several entries an element: give the layout"),
        ({"x": MASKED_STRUCT}, ONE_STRUCT, "column 'x' has 1 nulls"),
        ({"x": pa.array([1.0])}, ONE_STRUCT, r"'x' is eigen \[2\] in the layout; .* one value"),
        ({"q": STRUCT, "pt": STRUCT}, PICKED, r"'q' is column \[\] in the layout; .* a struct"),
        (
            {"x": STRUCT},
            Layout([eigen("x", "float64", 3)], 8, "columns"),
            "'x' has 3 entries in the layout, 2 in the data",
        ),
        ({"pt": pa.array([1.0])}, PICKED, "no column 'q', there are: pt"),
        (
            {"pt": pa.array([1.0]), "q": pa.array([1], pa.int8())},
            PICKED,
            "column 'pt' is float64, the layout says float32",
        ),
        (
            {"x": pa.array([1])},
            Layout([scalar("x", "int64")], 8, "columns"),
            "'x' is a scalar of the collection",
        ),
        (batch(), Layout(PICKED.columns), r"layout is one buffer: use Collection\.wrap"),
        (pa.table([[1], [2]], names=["x", "x"]), None, "two columns are called 'x'"),
        ({"x": np.zeros(3)}, None, "column 'x' is a ndarray, not an Arrow array"),
        (pa.array([1.0]), None, "a DoubleArray is no Arrow data: give a Table"),
        (
            {"x": pa.array([1.0]), "y": pa.array([1.0, 2.0])},
            None,
            r"different lengths: x \[1\], y \[2\]",
        ),
        (
            pa.record_batch({"x": pa.array([1.0, 2.0], pa.float32())}).slice(1),
            Layout([column("x", "float32")], 64, "columns"),
            "column 'x' at .* is misaligned: 64-byte",
        ),
    ],
)
def test_arrow_data_that_cannot_be_seen_in_place(data: Any, layout: Any, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        from_arrow(data, layout)


# -- Arrow out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_to_arrow_shares_memory(dtype: str, storage: Any) -> None:
    layout = Layout([column("a", "int8"), column("x", dtype)], storage=storage)
    collection = Collection(layout, 3, capacity=40)
    made = to_arrow(collection)
    assert made.schema.names == ["a", "x"]
    assert address(made.column("x")) == collection.tensor("x").data_ptr()
    collection.tensor("x").copy_(torch.tensor([1, 2, 3]))
    assert made.column("x").to_pylist() == [1, 2, 3]
    made.validate(full=True)


def test_eigen_columns_through_arrow_and_back() -> None:
    collection = matrix_collection()
    made = to_arrow(collection)
    assert [f.name for f in made.schema.field("m").type] == [
        "e0_0", "e0_1", "e0_2", "e1_0", "e1_1", "e1_2",
    ]  # fmt: skip
    assert made.column("m")[1].as_py() == {
        "e0_0": 6, "e0_1": 7, "e0_2": 8, "e1_0": 9, "e1_1": 10, "e1_2": 11,
    }  # fmt: skip
    back = from_arrow(made, MATRIX_APART)
    for k in range(6):
        assert back.component("m", k).data_ptr() == collection.component("m", k).data_ptr()
    assert to_arrow(matrix_collection(0)).num_rows == 0
    vector = Collection(Layout([eigen("v", "int16", 2)]), 3)
    assert [f.name for f in to_arrow(vector).schema.field("v").type] == ["e0", "e1"]


def test_arrow_keeps_a_collection_alive() -> None:
    made = to_arrow(matrix_collection(), ["k"])
    gc.collect()
    assert made.column("k").to_pylist() == [0, 1, 2, 3]


@pytest.mark.parametrize("export", [to_arrow, to_awkward])
def test_what_is_no_column_cannot_go_out(export: Any) -> None:
    layout = Layout([column("x", "int8"), scalar("run", "int8"), column("h", "bfloat16")])
    collection = Collection(layout, 2)
    with pytest.raises(CollectionError, match=r"'run' is a scalar .*leave it out"):
        export(collection)
    with pytest.raises(CollectionError, match=r"column 'h': .* no bfloat16"):
        export(collection, ["x", "h"])
    with pytest.raises(LayoutError, match="no column 'y'"):
        export(collection, ["y"])
    assert len(export(collection, ["x"])["x"]) == 2


def test_arrow_has_no_bool_of_a_byte() -> None:
    with pytest.raises(CollectionError, match="column 'x': Arrow has no bool"):
        to_arrow(Collection(Layout([column("x", "bool")]), 2))


# -- Awkward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", *NUMBERS])
def test_awkward_columns_are_seen_in_place(dtype: str) -> None:
    x = np.arange(9).astype(dtype)
    array = ak.zip({"x": x, "y": np.arange(9.0)})
    whole = from_awkward(array, Layout([column("x", dtype)], 8, "columns"))
    assert whole.tensor("x").data_ptr() == x.ctypes.data
    assert whole.tensor("x").tolist() == x.tolist()
    assert whole.readonly
    part = from_awkward(ak.Array({"x": x})[2:5])
    assert part.layout.alignment == 1
    assert part.tensor("x").data_ptr() == x.ctypes.data + 2 * x.itemsize
    assert part.n == 3


def test_awkward_records_longer_than_the_array() -> None:
    contents = [ak.contents.NumpyArray(np.arange(9.0)), ak.contents.NumpyArray(np.arange(7))]
    array = ak.Array(ak.contents.RecordArray(contents, ["x", "y"], length=5))
    collection = from_awkward(array)
    assert (collection.n, collection.capacity) == (5, 5)


def test_eigen_columns_through_awkward_and_back() -> None:
    collection = matrix_collection()
    made = to_awkward(collection)
    assert made.k.tolist() == [0, 1, 2, 3]
    assert made.m.e1_0.tolist() == [3, 9, 15, 21]
    back = from_awkward(made, MATRIX_APART)
    for k in range(6):
        assert back.component("m", k).data_ptr() == collection.component("m", k).data_ptr()
    assert from_awkward(made[1:3], MATRIX_APART).component("m", 1).tolist() == [9, 15]
    collection.tensor("k")[0] = 7
    del collection
    gc.collect()
    assert made.k[0] == 7
    assert len(to_awkward(matrix_collection(0))) == 0


def test_read_only_memory_stays_so_in_awkward() -> None:
    array = aligned_array(np.arange(4), "float32")
    array.flags.writeable = False
    collection = Collection.wrap(Layout([column("x", "float32")], 16), array, 4)
    assert not ak.to_numpy(to_awkward(collection).x).flags.writeable


def record(**fields: Any) -> ak.Array:
    return ak.Array(fields)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (ak.Array([[{"x": 1}], []]), r"needed flat records: the array is jagged .*ak\.flatten"),
        (ak.Array([{"x": [1, 2]}, {"x": []}]), r"column 'x' is jagged .*ak\.flatten"),
        (ak.Array([{"x": 1}, None]), r"the array may have missing values .*ak\.fill_none"),
        (ak.Array([{"x": 1}, {"x": None}]), "column 'x' may have missing values"),
        (record(x=np.arange(4))[::2], r"the array is picked by an index .*ak\.to_packed"),
        (record(x=np.zeros((3, 2))), "column 'x' has several values an element .* as a field"),
        (ak.Array([{"x": 1}, {"x": "a"}]), "column 'x' is a UnionArray"),
        (ak.Array([1.0]), "needed flat records: the array is a NumpyArray"),
        (record(x=np.zeros(3, "u8")), "column 'x' is uint64: convert it to one of bool"),
        (record(x=np.zeros(3, "M8[s]")), r"column 'x' is datetime64\[s\]"),
        (ak.Array([{"x": {"a": 1}}]), "column 'x' has several entries .* give the layout"),
    ],
)
def test_awkward_arrays_that_cannot_be_seen_in_place(array: ak.Array, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        from_awkward(array)


# -- GPU -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cupy_shares_memory() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(256, dtype="float32")
    collection = Collection.from_columns(Layout([column("x", "float32")], 128, "columns"), {"x": x})
    assert collection.tensor("x").data_ptr() == x.data.ptr
    assert collection.device.type == "cuda"
    collection.tensor("x")[3] = -1
    torch.cuda.synchronize()
    assert float(x[3]) == -1
    wrapped = Collection.wrap(Layout([column("x", "float32")]), x, 256)
    assert wrapped.data_ptr == x.data.ptr
    back = cupy.from_dlpack(collection.tensor("x"))
    assert back.data.ptr == x.data.ptr


@pytest.mark.cuda
def test_gpu_collections_are_copied_by_hand() -> None:
    collection = Collection(Layout([column("x", "float32")]), 4, "cuda")
    for export in (to_arrow, to_awkward):
        with pytest.raises(CollectionError, match=r"lies on cuda:0: copy it first"):
            export(collection)
