"""`as_collection`: addresses show whether each source was copied; refusals name the reason."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soa.errors import CollectionError, LayoutError, SoaPipelineError
from soa.layout import Layout, column, eigen, opaque, scalar
from soa.memory import Collection, as_collection, to_numpy
from tests.soa.exporters import OnlyDLPack, aligned_array
from tests.soa.strategies import layouts, values_of

NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
           "float16", "float32", "float64")  # fmt: skip
ROOT_FILES = Path(os.environ.get("SKHEP_DATA", Path(__file__).parents[4] / "shared" / "data"))

# A model's layout picks its columns, in its order.
PICKED = Layout([column("q", "int8"), column("pt", "float32")], storage="columns")
ONE = Layout([column("x", "float32")], storage="columns")
FLAG = Layout([column("x", "bool")], storage="columns")
MATRIX = Layout([eigen("m", "float32", 2, 3), column("k", "int32")], storage="columns")
PT, Q = np.linspace(1, 2, 40, dtype="float32"), np.arange(40, dtype="int8")
EVERY = {"pt": PT, "q": Q, "name": np.array([str(i) for i in range(40)])}


def address(array: Any) -> int:
    """The address of an Arrow array's first value."""
    return int(array.buffers()[-1].address + array.offset * array.type.bit_width // 8)


def arrow() -> pa.RecordBatch:
    """EVERY as a batch of Arrow."""
    return pa.record_batch({name: pa.array(values) for name, values in EVERY.items()})


def structured() -> np.ndarray:
    """PT and Q as fields of one array, with a third field."""
    rows = np.zeros(40, [("pt", "f4"), ("q", "i1"), ("more", "f8")])
    rows["pt"], rows["q"] = PT, Q
    return rows


# -- sources that are not copied -------------------------------------------------------------------


def polars_frame(columns: dict[str, Any]) -> Any:
    """A frame of polars; skips if that is not installed."""
    return pytest.importorskip("polars").DataFrame(columns)


def jax_columns() -> Any:
    """Arrays of jax; skips if that is not installed."""
    numpy = pytest.importorskip("jax.numpy")
    return {"pt": numpy.asarray(PT), "q": numpy.asarray(Q)}


def of_table(table: Any) -> dict[str, int]:
    """The addresses of the columns of a table of Arrow."""
    return {name: address(table.column(name)) for name in ("pt", "q")}


def of_arrays(data: Any) -> dict[str, int]:
    """The addresses of columns that NumPy sees without a copy."""
    return {name: np.asarray(data[name]).ctypes.data for name in ("pt", "q")}


# How a source is made, and the addresses of its columns.
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, int]]]] = {
    "numpy": (lambda: dict(EVERY), of_arrays),
    "torch": (lambda: {"pt": torch.from_numpy(PT), "q": torch.from_numpy(Q)}, of_arrays),
    "dlpack": (lambda: {"pt": OnlyDLPack(PT), "q": OnlyDLPack(Q)}, lambda _: of_arrays(EVERY)),
    "jax": (jax_columns, of_arrays),
    "arrow batch": (arrow, of_table),
    "arrow arrays": (
        lambda: {n: arrow().column(n) for n in ("pt", "q")},
        lambda arrays: {n: address(arrays[n]) for n in ("pt", "q")},
    ),
    "awkward": (lambda: ak.Array(EVERY), of_arrays),
    "awkward arrays": (lambda: {"pt": ak.Array(PT), "q": ak.Array(Q)}, of_arrays),
    "pandas": (lambda: pd.DataFrame(EVERY), of_arrays),
    "pandas series": (lambda: {"pt": pd.Series(PT), "q": pd.Series(Q)}, of_arrays),
    "polars": (
        lambda: polars_frame(EVERY),
        lambda frame: {n: address(frame[n].to_arrow()) for n in ("pt", "q")},
    ),
}


@pytest.mark.parametrize("source", IN_PLACE)
def test_columns_are_bound_where_they_lie(source: str) -> None:
    make, addresses = IN_PLACE[source]
    data = make()
    collection = as_collection(data, PICKED)
    assert (collection.copied, collection.n, collection.layout) == ((), 40, PICKED)
    assert of_arrays(collection) == addresses(data)
    np.testing.assert_array_equal(collection["pt"], PT)
    np.testing.assert_array_equal(collection["q"], Q)
    assert collection.readonly == (source not in ("numpy", "torch", "dlpack"))


@pytest.mark.parametrize("first", range(34))
def test_slices_from_any_row_on_are_bound_where_they_lie(first: int) -> None:
    """Arrays as allocated: a slice may begin at any row."""
    table = pa.record_batch({"pt": pa.array(PT), "q": pa.array(Q)}).slice(first)
    for data in (table, {"pt": PT[first:], "q": Q[first:]}, ak.Array({"pt": PT, "q": Q})[first:]):
        collection = as_collection(data, PICKED)
        assert (collection.copied, collection.n) == ((), 40 - first)
        np.testing.assert_array_equal(collection["pt"], PT[first:])
        if data is not table:  # pa.array copies
            assert collection["pt"].ctypes.data == PT.ctypes.data + 4 * first


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("sliced", [False, True])
def test_every_number_of_arrow_is_bound_where_it_lies(dtype: str, sliced: bool) -> None:
    array = pa.array(np.arange(9).astype(dtype))
    array = array[3:7] if sliced else array
    for data in ({"x": array}, pa.table({"x": array})):
        collection = as_collection(data)
        assert collection.layout == Layout([column("x", dtype)], 1, "columns")
        assert collection["x"].ctypes.data == address(array)
        assert collection["x"].tolist() == array.to_pylist()
        assert collection.readonly and not collection.copied


@pytest.mark.parametrize("library", ["numpy", "torch", "memmap"])
def test_arrays_of_numpy_and_torch_can_be_outputs(library: str, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "numpy": lambda: np.zeros(5, "f4"),
        "torch": lambda: torch.zeros(5),
        "memmap": lambda: np.memmap(tmp_path / "x", "f4", "w+", shape=5),
    }
    values = makers[library]()
    collection = as_collection({"x": values}, ONE)
    collection["x"][:] = 3
    assert values[4] == 3 and not collection.readonly and not collection.copied


either_library = pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])


@either_library
def test_uint8_of_0_and_1_is_bool_where_it_lies(make: Any) -> None:
    values = make(np.array([0, 1, 1], "u1"))
    collection = as_collection({"x": values}, FLAG)
    assert collection["x"].tolist() == [False, True, True]
    assert collection["x"].ctypes.data == np.asarray(values).ctypes.data
    assert not collection.copied


@either_library
def test_uint8_of_other_values_is_no_bool(make: Any) -> None:
    values = make(np.array([0, 2, 1], "u1"))
    with pytest.raises(CollectionError, match=r"'x' is uint8 with other values .*dtype: uint8"):
        as_collection({"x": values}, FLAG)


@pytest.fixture
def entries() -> list[pa.Array]:
    """The entries of four matrices, row by row; those of entry i are from 10 * i on."""
    return [pa.array(np.arange(4, dtype="float32") + 10 * i) for i in range(6)]


def matrices_of(entries: list[pa.Array]) -> dict[str, Any]:
    """Data for MATRIX: a struct of Arrow with a field for each entry."""
    struct = pa.StructArray.from_arrays(entries, names=list("abcdef"))
    return {"m": struct, "k": pa.array(np.arange(4, dtype="int32"))}


def test_fields_of_a_struct_are_components_where_they_lie(entries: list[pa.Array]) -> None:
    collection = as_collection(matrices_of(entries), MATRIX)
    # Fields are row by row: d is (1, 0), which is component 0 * 2 + 1.
    assert collection.span("m", 1).address == address(entries[3])
    assert collection.span("m", 4).address == address(entries[2])


def test_fields_of_a_sliced_struct_are_components_where_they_lie(entries: list[pa.Array]) -> None:
    rows = {name: array[1:3] for name, array in matrices_of(entries).items()}
    collection = as_collection(rows, MATRIX)
    assert collection.span("m", 1).address == address(entries[3]) + 4
    assert collection.span("m", 1).tensor().tolist() == [31, 32] and not collection.copied


def test_entries_that_lie_apart_in_numpy_are_components_where_they_lie() -> None:
    by_entry = np.asfortranarray(np.arange(24, dtype="f4").reshape(4, 2, 3))
    collection = as_collection({"m": by_entry, "k": np.arange(4, dtype="i4")}, MATRIX)
    assert collection.span("m", 0).address == by_entry.ctypes.data and not collection.copied
    assert collection.span("m", 1).tensor().tolist() == by_entry[:, 1, 0].tolist()


OPAQUE = Layout([opaque("hit", 12), column("x", "float32")], storage="columns")
HITS = np.arange(9, dtype="f4").reshape(3, 3)  # 12 bytes a row


def opaque_collection(hits: Any) -> Collection:
    """A collection of OPAQUE with these hits."""
    return as_collection({"hit": hits, "x": np.arange(3, dtype="f4")}, OPAQUE)


@pytest.mark.parametrize(
    "hits",
    [HITS, np.zeros(3, [("a", "f4"), ("b", "u1", 8)]), HITS.view("V12")[:, 0]],
    ids=["vectors", "structs", "void"],
)
def test_opaque_columns_are_bound_where_they_lie(hits: Any) -> None:
    collection = opaque_collection(hits)
    assert collection["hit"].ctypes.data == hits.ctypes.data and not collection.copied
    assert collection.tensor("hit").shape == (3, 12)


def test_opaque_columns_in_another_order_are_copied() -> None:
    assert opaque_collection(HITS[::-1]).copied == ("hit",)


def test_opaque_columns_of_another_size_are_refused() -> None:
    with pytest.raises(CollectionError, match=r"column 'hit' .* 12 bytes a row"):
        opaque_collection(HITS[:, :2])


WITH_RUN = Layout([column("x", "float32"), scalar("run", "uint32")], storage="columns")


def test_a_scalar_is_one_value() -> None:
    collection = as_collection({"x": PT, "run": np.uint32(7)}, WITH_RUN)
    assert (collection.n, int(collection["run"])) == (40, 7)


def test_a_collection_is_taken_as_it_is() -> None:
    collection = Collection(WITH_RUN, 40)
    assert as_collection(collection) is collection
    assert as_collection(collection, WITH_RUN) is collection


def test_columns_are_copied_into_a_buffer() -> None:
    buffer = as_collection(Collection(WITH_RUN, 40), Layout(WITH_RUN.columns))
    assert (buffer.layout.storage, buffer.copied) == ("buffer", ("x", "run"))


def test_a_buffer_gives_columns_without_a_copy() -> None:
    apart = as_collection(Collection(Layout(WITH_RUN.columns), 5), WITH_RUN)
    assert (apart.layout.storage, apart.copied) == ("columns", ())


def test_arrow_memory_lives_as_long_as_a_view() -> None:
    """It does not live longer: it is freed without the garbage collector."""
    size = 1 << 20
    before = pa.total_allocated_bytes()
    view = as_collection({"x": pa.repeat(pa.scalar(1, pa.int8()), size)}).tensor("x")
    gc.collect(1)  # only young objects: visiting all takes a second
    assert pa.total_allocated_bytes() >= before + size
    assert view.count_nonzero() == size
    del view
    assert pa.total_allocated_bytes() < before + size


def test_awkward_columns_may_be_longer_than_the_array() -> None:
    contents = [ak.contents.NumpyArray(np.arange(9.0)), ak.contents.NumpyArray(np.arange(7))]
    array = ak.Array(ak.contents.RecordArray(contents, ["x", "y"], length=5))
    collection = as_collection(array)
    assert (collection.n, collection.capacity, collection.copied) == (5, 5, ())


@pytest.mark.parametrize(
    ("data", "layout"),
    [
        (arrow().slice(0, 0), PICKED),
        ({"x": pa.chunked_array([], pa.float32())}, None),
        ({"x": np.zeros(0, "u1")}, FLAG),
    ],
    ids=["a slice", "no chunks", "no flags"],
)
def test_data_without_rows_is_a_collection_without_rows(data: Any, layout: Layout | None) -> None:
    assert as_collection(data, layout).n == 0


# -- sources that are copied and reported ----------------------------------------------------------


def hdf5(tmp_path: Path) -> Any:
    """A file with two datasets, and a compound one."""
    file = pytest.importorskip("h5py").File(tmp_path / "x.h5", "w")
    file["pt"], file["q"], file["rows"] = PT, Q, structured()
    return file


def npz(tmp_path: Path) -> Any:
    """A file of NumPy with two arrays."""
    np.savez(tmp_path / "x.npz", pt=PT, q=Q)
    return np.load(tmp_path / "x.npz")


COPIES: dict[str, Callable[[Path], Any]] = {
    "structured": lambda _: structured(),
    "strides": lambda _: {"pt": np.repeat(PT, 2)[::2], "q": np.repeat(Q, 3)[::3]},
    "strided tensors": lambda _: {
        "pt": torch.from_numpy(np.repeat(PT, 2))[::2],
        "q": torch.from_numpy(np.repeat(Q, 2))[::2],
    },
    "chunks": lambda _: pa.concat_tables([pa.table(arrow()[:9]), pa.table(arrow()[9:])]),
    "picked by an index": lambda _: ak.Array(EVERY)[np.arange(40)],
    "pandas of rows": lambda _: pd.DataFrame(
        {"pt": pd.Series(PT).astype("Float32"), "q": pd.Series(Q).astype("Int8")}
    ),
    "pandas in steps": lambda _: pd.DataFrame({"pt": np.repeat(PT, 2), "q": np.repeat(Q, 2)})[::2],
    "polars chunks": lambda _: pytest.importorskip("polars").concat(
        [polars_frame(EVERY)[:9], polars_frame(EVERY)[9:]], rechunk=False
    ),
    "other byte order": lambda _: {"pt": PT.astype(">f4"), "q": np.repeat(Q, 2)[::2]},
    "lists": lambda _: {"pt": list(PT), "q": list(Q)},
    "HDF5": hdf5,
    "a compound dataset": lambda folder: hdf5(folder)["rows"],
    "npz": npz,
}


@pytest.mark.parametrize("source", COPIES)
def test_columns_that_cannot_be_bound_are_copied(source: str, tmp_path: Path) -> None:
    collection = as_collection(COPIES[source](tmp_path), PICKED)
    assert collection.copied == ("q", "pt")
    assert collection.readonly, "what is written here would not reach the data"
    np.testing.assert_array_equal(collection["pt"], PT)
    np.testing.assert_array_equal(collection["q"], Q)
    assert "copied: q, pt" in repr(collection)


@pytest.mark.parametrize("source", ["structured", "strides"])
def test_a_copy_is_aligned_to_64_bytes(source: str, tmp_path: Path) -> None:
    collection = as_collection(COPIES[source](tmp_path), PICKED)
    assert [collection[name].ctypes.data % 64 for name in ("pt", "q")] == [0, 0]


def test_only_what_must_be_is_copied() -> None:
    collection = as_collection({"pt": PT, "q": np.repeat(Q, 2)[::2]}, PICKED)
    assert collection.copied == ("q",)
    assert collection["pt"].ctypes.data == PT.ctypes.data


BITS = pa.array([True, False, True, None])


@pytest.mark.parametrize(
    "data",
    [pa.table({"x": BITS[:3]}), {"x": pa.chunked_array([BITS[:2], BITS[2:3]])}],
    ids=["table", "chunks"],
)
def test_booleans_of_arrow_are_copied_since_they_are_bits(data: Any) -> None:
    collection = as_collection(data, FLAG)
    assert (collection["x"].tolist(), collection.copied) == ([True, False, True], ("x",))


def test_booleans_of_arrow_have_dtype_bool() -> None:
    assert as_collection({"x": BITS[:3]}).layout == FLAG


def test_a_missing_boolean_of_arrow_is_filled() -> None:
    assert as_collection({"x": BITS}, FLAG, fill={"x": True})["x"].tolist()[3] is True


MISSING = {
    "arrow": pa.array([1.0, None, 3.0], pa.float32()),
    "awkward": ak.values_astype(ak.Array([1, None, 3]), "float32"),
    "pandas": pd.Series([1, None, 3], dtype="Float32"),
    "pandas of arrow": pd.Series([1, None, 3], dtype=pd.ArrowDtype(pa.float32())),
    "numpy": np.ma.masked_array(np.array([1, 2, 3], "f4"), [False, True, False]),
}


@pytest.mark.parametrize("source", MISSING)
def test_missing_values_are_filled(source: str) -> None:
    collection = as_collection({"x": MISSING[source]}, ONE, fill={"x": -1})
    assert (collection["x"].tolist(), collection.copied) == ([1, -1, 3], ("x",))


@pytest.mark.parametrize("source", MISSING)
def test_missing_values_without_a_fill_are_refused(source: str) -> None:
    with pytest.raises(CollectionError, match=r"column 'x' has nulls .*fill=\{'x': 0\}"):
        as_collection({"x": MISSING[source]}, ONE)


def test_a_slice_without_nulls_of_an_array_with_nulls_is_bound_where_it_lies() -> None:
    array = pa.array([1.0, None, 3.0], pa.float32())[2:]
    assert array.buffers()[0] is not None
    collection = as_collection({"x": array}, ONE, fill={"x": 5})
    assert (collection["x"].tolist(), collection.copied) == ([3.0], ())


MATRICES, K = np.arange(24, dtype="f4").reshape(4, 2, 3), np.arange(4, dtype="i4")
THREES = pa.FixedSizeListArray.from_arrays(pa.array(MATRICES.ravel()), 3)
TOGETHER = {
    "numpy": {"m": MATRICES, "k": K},
    "torch": {"m": torch.from_numpy(MATRICES), "k": torch.from_numpy(K)},
    "awkward": ak.Array({"m": MATRICES, "k": K}),
    "arrow": {"m": pa.FixedSizeListArray.from_arrays(THREES, 2), "k": pa.array(K)},
}
"""Matrices whose entries lie together; in a collection, each entry is a column of its own."""


@pytest.mark.parametrize("source", TOGETHER)
def test_matrices_with_their_entries_together_are_copied(source: str) -> None:
    collection = as_collection(TOGETHER[source], MATRIX)
    assert collection.copied == ("m",)
    assert collection.span("m", 1).tensor().tolist() == MATRICES[:, 1, 0].tolist()


def test_without_a_layout_an_array_of_vectors_is_an_eigen_column() -> None:
    layout = as_collection({"v": MATRICES[:, 0]}).layout
    assert layout.columns == (eigen("v", "float32", 3),)


def lists_of(values: np.ndarray) -> dict[str, Any]:
    """The same vectors or matrices as lists, in the forms of libraries and files."""
    kind = pa.float32()
    for _ in values.shape[1:]:
        kind = pa.list_(kind)
    arrow = pa.array(values.tolist(), kind)
    # Objects as elements: lists of arrays of one axis, and arrays of one axis less than `values`.
    rows = [*values] if values.ndim == 2 else [[*matrix] for matrix in values]
    lists, arrays = np.empty((2, len(rows)), object)
    lists[:] = rows
    for i, row in enumerate(values):
        arrays[i] = row
    return {
        "arrow": arrow,
        "large": arrow.cast(pa.large_list(kind.value_type)),
        "chunks": pa.chunked_array([arrow[:1], arrow[1:]]),
        "a slice": pa.concat_arrays([arrow[-1:], arrow])[1:],
        "awkward": ak.from_arrow(arrow),
        "awkward lists": ak.values_astype(ak.Array(values.tolist()), "float32"),
        "pandas": pd.Series(lists),
        "pandas of arrow": pd.Series(arrow, dtype=pd.ArrowDtype(arrow.type)),
        "objects": arrays,
    }


def test_rows_of_three_axes_are_vectors() -> None:
    images = np.arange(120, dtype=np.float32).reshape(5, 3, 2, 4)
    layout = Layout([eigen("x", "float32", 24)], storage="columns")
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    for data in (images, torch.from_numpy(images), tensors, ak.Array(images)):
        collection = as_collection({"x": data}, layout)
        assert np.array_equal(to_numpy(collection)["x"], images.reshape(5, 24))


def test_rows_of_three_axes_with_other_numbers_of_elements_are_refused() -> None:
    images = np.arange(120, dtype=np.float32).reshape(5, 3, 2, 4)
    layout = Layout([eigen("x", "float32", 24)], storage="columns")
    with pytest.raises(CollectionError, match="found shape"):
        as_collection({"x": images[..., :3]}, layout)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,)])
def test_lists_of_one_length_are_vectors(shape: tuple[int, ...]) -> None:
    values = np.arange(4 * np.prod(shape), dtype="f4").reshape(4, *shape)
    layout = Layout([eigen("m", "float32", *shape)], storage="columns")
    for name, data in lists_of(values).items():
        for wanted in (layout, None):
            collection = as_collection({"m": data}, wanted)
            assert (collection.n, collection.layout.columns) == (4, layout.columns), name
            assert collection.readonly
            np.testing.assert_array_equal(to_numpy(collection)["m"], values, name)
        assert as_collection({"m": data[:0]}, layout).n == 0, name


def test_lists_of_a_file_that_pandas_wrote(tmp_path: Path) -> None:
    values = np.arange(12, dtype="f4").reshape(4, 3)
    pd.DataFrame({"m": [*values]}).to_parquet(tmp_path / "rows.parquet")
    layout = Layout([eigen("m", "float32", 3)])
    for data in (pd.read_parquet(tmp_path / "rows.parquet"), pa.parquet.read_table(tmp_path)):
        np.testing.assert_array_equal(as_collection(data, layout)["m"], values)


def test_awkward_that_may_be_missing_and_is_not_is_bound_where_it_lies() -> None:
    """Awkward reads each nullable column of Arrow and Parquet like this."""
    mask = np.zeros(40, np.int8)
    masked = ak.contents.ByteMaskedArray(
        ak.index.Index8(mask), ak.contents.NumpyArray(PT), valid_when=False
    )
    for content in (masked, ak.contents.UnmaskedArray(ak.contents.NumpyArray(PT))):
        assert "?" in str(ak.Array(content).type)
        collection = as_collection({"x": ak.Array(content)[3:]}, ONE)
        assert collection["x"].ctypes.data == PT[3:].ctypes.data and not collection.copied


def test_awkward_with_a_mask_of_bits_is_read() -> None:
    masked = ak.from_arrow(pa.array([1.0, None, 3.0], pa.float32())[:1])
    assert as_collection({"x": masked}, ONE)["x"].tolist() == [1]


def test_columns_for_one_buffer_are_all_copied() -> None:
    layout = Layout([column("pt", "float32"), column("q", "int8"), eigen("v", "float32", 2)])
    values = np.arange(80, dtype="f4").reshape(40, 2)
    collection = as_collection({**EVERY, "v": values}, layout)
    assert (collection.copied, collection.n) == (("pt", "q", "v"), 40)
    np.testing.assert_array_equal(collection["v"], values)
    np.testing.assert_array_equal(collection["q"], Q)


@pytest.mark.parametrize(("shift", "copied"), [(64, ()), (4, ("x",))])
def test_what_is_not_aligned_enough_is_copied(shift: int, copied: tuple[str, ...]) -> None:
    layout = Layout([column("x", "float32")], 64, "columns")
    array = aligned_array(np.arange(9), "f4", shift=shift)
    collection = as_collection({"x": array}, layout)
    assert (collection.copied, collection["x"].tolist()) == (copied, list(range(9)))
    assert collection["x"].ctypes.data % 64 == 0


@given(layouts(storages=("buffer", "columns")), st.integers(0, 9), st.integers(0, 9))
def test_values_of_any_layout_come_back(layout: Layout, n: int, seed: int) -> None:
    values = values_of(layout, n, seed)
    collection = as_collection(values, layout)
    assert collection.n == n or all(c.kind == "scalar" for c in layout.columns)
    for member in layout.columns:
        for i, entry in enumerate(values[member.name].reshape(-1, member.components).unbind(1)):
            component = collection.span(member.name, member.component_of(i)).tensor()
            assert torch.equal(component[: len(entry)], entry)


# -- real files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["ak", "np"])
def test_branches_of_a_real_file_are_not_copied(library: str) -> None:
    if not (file := ROOT_FILES / "uproot-Zmumu.root").exists():
        pytest.skip(f"{file} is not there")
    uproot = pytest.importorskip("uproot")
    tree = uproot.open(file)["events"]
    data = tree.arrays(["pt1", "Q1"], library=library)
    collection = as_collection(data)
    assert collection.n == tree.num_entries and not collection.copied
    np.testing.assert_array_equal(collection["pt1"], np.asarray(data["pt1"]))


# -- what cannot be taken --------------------------------------------------------------------------


STRUCT = pa.StructArray.from_arrays([pa.array([1.0]), pa.array([1.0])], names=["a", "b"])
VECTOR = Layout([eigen("x", "float64", 2)], storage="columns")
SCALAR = Layout([scalar("x", "int64")], storage="columns")


@pytest.mark.parametrize(
    ("data", "layout", "says"),
    [
        ({"x": pa.array([0], pa.timestamp("s"))}, None, r"timestamp.*view\('int64'\)"),
        ({"x": pa.array(["a"])}, None, "column 'x' is string: cast it to one of bool, int8"),
        ({"x": STRUCT}, None, "'x' has several entries an element: give the layout"),
        ({"q": STRUCT, "pt": PT[:1]}, PICKED, "'q' is column in the layout; .* a struct"),
        ({"x": np.zeros(())}, VECTOR, r"'x' is eigen \[2\] in the layout; .* \(\)"),
        ({"pt": PT}, PICKED, "no column 'q', there are: pt"),
        ({"x": PT.astype("f8")}, ONE, "'x' is float64, the layout says .*dtype: float64"),
        ({"x": PT.astype("M8[s]")}, None, r"column 'x': unknown dtype 'datetime64\[s\]"),
        ({"x": np.array(["a", None])}, None, "column 'x' is string: cast it"),
        ({"x": [[1.0], [2.0, 3.0]]}, None, "column 'x': .*inhomogeneous"),
        ({"x": torch.zeros(3).to_sparse()}, ONE, "column 'x': "),
        (pa.table({"x": [1, 2]}), SCALAR, r"'x' is scalar in the layout; .* not one value"),
        (pa.table([[1], [2]], names=["x", "x"]), None, "two columns are called 'x'"),
        ({"x": PT, "y": PT[1:]}, None, r"different lengths: x \[40\], y \[39\]"),
        (PT, None, r"a ndarray without columns .*Collection\.wrap"),
        (pa.array([1.0]), None, "a DoubleArray without columns"),
        (ak.Array([{"x": [1, 2]}, {"x": []}]), None, r"column 'x' is jagged .*0 to 2 "),
        (ak.Array([{"x": [[1, 2], [3]]}]), None, r"column 'x' is jagged .*1 to 2 "),
        (pa.table({"x": [[1, 2], []]}), None, r"column 'x' is jagged .*0 to 2 .* flatten it"),
        (pd.DataFrame({"x": [PT[:2], PT[:3]]}), None, r"column 'x' is jagged .*2 to 3 "),
        (pd.DataFrame({"x": [PT[:2], None]}), VECTOR, "column 'x' has no list in 1 rows"),
        (pa.table({"x": [[1.0, 2.0], None]}), VECTOR, "column 'x' has no list in 1 rows"),
        (ak.Array([{"x": [1.0]}, {"x": None}]), VECTOR, "column 'x' has no list in 1 rows"),
        (pa.table({"x": [[1.0, None]]}), VECTOR, "column 'x' has nulls"),
        (ak.Array([{"x": 1}, {"x": "a"}]), None, "column 'x' is dense_union"),
        (ak.Array([{"x": ["a"]}]), None, "column 'x' is large_string: cast it"),
    ],
)
def test_what_cannot_be_taken_is_refused(data: Any, layout: Any, says: str) -> None:
    with pytest.raises((CollectionError, LayoutError), match=says) as caught:
        as_collection(data, layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        ({"x": 0.5}, r"column 'x' is int32, which cannot hold fill=0\.5"),
        ({"y": 0}, "no column 'y'"),
    ],
)
def test_a_fill_that_cannot_be_is_refused(fill: dict[str, Any], says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        as_collection({"x": pa.array([1, None], pa.int32())}, fill=fill)


# -- GPU -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cupy_shares_memory() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(256, dtype="float32")
    collection = as_collection({"x": x}, ONE)
    assert collection.tensor("x").data_ptr() == x.data.ptr
    assert collection.device.type == "cuda" and not collection.copied
    collection.tensor("x")[3] = -1
    torch.cuda.synchronize()
    assert float(x[3]) == -1
    back = cupy.from_dlpack(collection.tensor("x"))
    assert back.data.ptr == x.data.ptr


@pytest.mark.cuda
def test_memory_of_cupy_is_wrapped_in_place() -> None:
    x = pytest.importorskip("cupy").arange(256, dtype="float32")
    wrapped = Collection.wrap(Layout([column("x", "float32")]), x, 256)
    assert wrapped.data_ptr == x.data.ptr


# -- kinds of arrays that pandas and Arrow have besides numbers ------------------------------------


def _pandas_ways(array: Any) -> list[Any]:
    """A pandas array as it comes: in a frame, as a Series, as an index, alone."""
    frame = pd.DataFrame({"x": array})
    return [frame, {"x": frame["x"]}, {"x": pd.Index(frame["x"])}, {"x": array}]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pd.Categorical([1.5, 2.5, 1.5]), "float64"),
        (pd.array([1, 2, 3], dtype="Int32"), "int32"),
        (pd.array([True, False, True], dtype="boolean"), "bool"),
        (pd.array([1, 2, 3], dtype="int64[pyarrow]"), "int64"),
        (pd.arrays.SparseArray([0.0, 1.0, 0.0]), "float64"),
    ],
)
def test_pandas_arrays_in_each_place(array: Any, dtype: str) -> None:
    for data in _pandas_ways(array):
        collection = as_collection(data)
        assert collection.layout["x"].dtype == dtype
        assert collection["x"].tolist() == list(array)


with_a_null = pytest.mark.parametrize(
    "array",
    [pd.Categorical([1.5, None]), pd.array([1, None], dtype="Int32")],
    ids=["categories", "numbers"],
)


@with_a_null
def test_a_null_of_a_pandas_array_is_refused(array: Any) -> None:
    for data in _pandas_ways(array):
        with pytest.raises(CollectionError, match="'x' has nulls"):
            as_collection(data)


@with_a_null
def test_a_null_of_a_pandas_array_is_filled(array: Any) -> None:
    for data in _pandas_ways(array):
        assert as_collection(data, fill={"x": 9})["x"].tolist() == [array[0], 9]


def test_categories_of_text_are_refused() -> None:
    for data in _pandas_ways(pd.Categorical(["a", "b"])):
        with pytest.raises(CollectionError, match="'x' is a category of large_string"):
            as_collection(data)


BATCH = pa.record_batch({"x": pa.array([1.5, 2.5]), "other": ["a", "b"]})
UNREAD: dict[str, Callable[[], Any]] = {
    "a lazy frame": lambda: polars_frame({"x": [1.5, 2.5], "other": ["a", "b"]}).lazy(),
    "batches": lambda: pa.RecordBatchReader.from_batches(BATCH.schema, [BATCH]),
    "a data set": lambda: pyarrow.dataset.dataset(pa.table(BATCH)),
}


@pytest.mark.parametrize("source", UNREAD)
def test_frames_and_tables_that_must_be_read_first_are_copied(source: str) -> None:
    collection = as_collection(UNREAD[source](), Layout([column("x", "float64")]))
    assert collection["x"].tolist() == [1.5, 2.5]
    assert collection.readonly and collection.copied == ("x",)


def test_all_batches_are_read() -> None:
    batches = pa.RecordBatchReader.from_batches(BATCH.schema, [BATCH, BATCH])
    collection = as_collection(batches, Layout([column("x", "float64")]))
    assert collection["x"].tolist() == [1.5, 2.5, 1.5, 2.5]


DICTIONARY = pa.array([1.5, 2.5, 1.5]).dictionary_encode()


@pytest.mark.parametrize(
    "array",
    [
        DICTIONARY,
        pa.chunked_array([DICTIONARY]),
        pa.RunEndEncodedArray.from_arrays([2, 3], [1.5, 2.5]),
    ],
    ids=["a dictionary", "chunks", "runs"],
)
def test_dictionaries_and_runs_of_numbers_are_copied(array: Any) -> None:
    collection = as_collection({"x": array})
    assert collection["x"].tolist() == array.to_pylist() and collection.copied == ("x",)


def test_a_null_of_a_dictionary_is_filled() -> None:
    with_null = pa.array([1.5, None]).dictionary_encode()
    assert as_collection({"x": with_null}, fill={"x": 0})["x"].tolist() == [1.5, 0]


def test_a_dictionary_of_text_is_refused() -> None:
    with pytest.raises(CollectionError, match="'x' is a category of string"):
        as_collection({"x": pa.array(["a"]).dictionary_encode()})


@pytest.mark.parametrize("order", [None, [0, 1], [1, 0]])
def test_tensors_of_fixed_shape_are_read_in_any_order_of_axes(order: list[int] | None) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=order)
    flat = pa.array(np.arange(24, dtype=np.float32))
    whole = pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, 6))
    for array in (whole, whole[1:3]):
        expected = array.to_numpy_ndarray()
        assert (to_numpy(as_collection({"m": array}))["m"] == expected).all()


either_list = pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32(), 2), pa.list_(pa.float32())], ids=["of two", "of any size"]
)
WITH_A_NULL: list[list[float] | None] = [[1.0, 2.0], None, [3.0, 4.0]]


@either_list
def test_a_null_vector_is_refused(kind: Any) -> None:
    with pytest.raises(CollectionError, match="'v' has no list in 1 rows"):
        as_collection({"v": pa.array(WITH_A_NULL, type=kind)})


@either_list
@pytest.mark.parametrize("first", [0, 1])
def test_a_null_vector_takes_the_fill_value(kind: Any, first: int) -> None:
    vectors = pa.array(WITH_A_NULL, type=kind)[first:]
    collection = as_collection({"v": vectors}, fill={"v": -1})
    assert to_numpy(collection)["v"].tolist() == [[1, 2], [-1, -1], [3, 4]][first:]


def test_a_cast_names_the_dtype_of_the_layout() -> None:
    with pytest.raises(CollectionError, match=r"'x' is string: cast it to float16$"):
        as_collection({"x": pa.array(["a"])}, Layout([column("x", "float16")]))


@pytest.mark.parametrize(
    ("name", "there", "meant"),
    [
        ("pt", ["Pt", "eta"], "Pt"),
        ("pt", ["jet_pt", "jet_eta"], "jet_pt"),
        ("pt", ["jet_pt", "el_pt"], None),
        ("pt", ["mass", "eta"], None),
    ],
)
def test_the_nearest_column_is_named(name: str, there: list[str], meant: str | None) -> None:
    zeros = np.zeros(3)
    data = dict.fromkeys(there, zeros)
    collection = Collection(Layout([column(other, "float64") for other in there]), 3)
    for look_up in (
        lambda: as_collection(data, Layout([column(name, "float64")])),
        lambda: as_collection(data, fill={name: 0}),
        lambda: collection[name],
    ):
        with pytest.raises(SoaPipelineError) as caught:
            look_up()
        assert (f"did you mean {meant!r}?" in str(caught.value)) == (meant is not None)
