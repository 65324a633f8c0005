"""Collections: the address of each element, and how values are written."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soa.errors import CollectionError, LayoutError
from soa.layout import Column, Layout, column, eigen, opaque, scalar
from soa.memory import Collection
from tests.soa.exporters import (
    OnlyArrayInterface,
    OnlyCudaArrayInterface,
    OnlyDLPack,
    aligned_array,
)
from tests.soa.strategies import ROWS, layouts, values_of

# n = 33: x 132 -> 256 at 0; dir 3 * 256 at 256; m (2 x 3) 6 * 256 at 1024; run 128 at 2560.
LAYOUT = Layout(
    [
        column("x", "float32"),
        eigen("dir", "float32", 3),
        eigen("m", "float32", 2, 3),
        scalar("run", "uint32"),
    ]
)
N = 33


def raw(collection: Collection) -> bytes:
    """The bytes of a collection in one buffer."""
    assert collection.buffer is not None
    return bytes(collection.buffer.cpu().numpy())


# -- memory that a collection allocates --------------------------------------------------------


def test_own_memory_is_zeroed_and_aligned() -> None:
    collection = Collection(LAYOUT, N)
    assert raw(collection) == bytes(2688)
    assert collection.data_ptr % 128 == 0
    assert not collection.readonly
    assert [tuple(collection.tensor(name).shape) for name in ("x", "dir", "m", "run")] == [
        (33,),
        (33, 3),
        (33, 2, 3),
        (),
    ]


@pytest.mark.parametrize(
    ("name", "index", "offset"),
    [
        ("x", (5,), 20),  # 5 * 4
        ("dir", (5, 2), 788),  # 256 + 2 * 256 + 5 * 4
        ("m", (5, 1, 0), 1300),  # component 0 * 2 + 1 = 1: 1024 + 256 + 20
        ("m", (5, 0, 1), 1556),  # component 1 * 2 + 0 = 2: 1024 + 512 + 20
        ("m", (32, 1, 2), 2432),  # 1024 + 1280 + 128
    ],
)
def test_an_element_lies_where_the_layout_says(
    name: str, index: tuple[int, ...], offset: int
) -> None:
    collection = Collection(LAYOUT, N)
    collection.tensor(name)[index] = 1.25
    expected = bytearray(2688)
    expected[offset : offset + 4] = struct.pack("<f", 1.25)
    collection.tensor("run").fill_(0x01020304)
    expected[2560:2564] = b"\4\3\2\1"
    assert raw(collection) == bytes(expected)


def test_row_major_matrices_are_declared_transposed() -> None:
    """Eigen::Matrix<float, 2, 3, RowMajor> has component row * 3 + column."""
    matrices = np.arange(24, dtype="f4").reshape(4, 2, 3)
    collection = Collection(Layout([eigen("m", "float32", 3, 2)]), 4)
    for row in range(2):
        for col in range(3):
            collection.span("m", row * 3 + col).numpy()[...] = matrices[:, row, col]
    np.testing.assert_array_equal(collection["m"].transpose(0, 2, 1), matrices)


HIT = np.dtype([("x", "f4"), ("y", "f4"), ("id", "u4")])
CARRIED = [
    opaque("hit", HIT.itemsize),
    column("event", "uint64"),
    Column("head", "opaque3", "scalar"),
]


def carried_arrays() -> dict[str, Any]:
    """Five rows of CARRIED, with event numbers above those of int64."""
    hits = np.zeros(5, HIT)
    hits["id"], hits["y"] = np.arange(5), 0.5
    events = np.arange(5, dtype="u8") + (1 << 63)
    return {"hit": hits, "event": events, "head": np.void(b"abc")}


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_opaque_members_carry_their_bytes(storage: Any) -> None:
    layout = Layout(CARRIED, storage=storage)
    collection = Collection.from_arrays(layout, carried_arrays(), capacity=9)
    assert collection["hit"].view(HIT)["id"].tolist() == [0, 1, 2, 3, 4]
    assert collection["event"].tolist() == carried_arrays()["event"].tolist()
    assert collection["head"].tobytes() == b"abc" == bytes(collection.tensor("head").tolist())
    assert collection.tensor("hit").shape == (5, 12) and "opaque12" in repr(collection)


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_opaque_members_are_copied(storage: Any) -> None:
    layout = Layout(CARRIED, storage=storage)
    collection = Collection.from_arrays(layout, carried_arrays(), capacity=9)
    other = Collection(layout, 5)
    other.copy_from(collection)
    for copy in (other, collection.to("cpu")):
        assert copy["hit"].tobytes() == carried_arrays()["hit"].tobytes()


@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_opaque_members_of_another_size_are_refused(storage: Any) -> None:
    arrays = carried_arrays()
    with pytest.raises(CollectionError, match=r"column 'hit' .* 12 bytes a row"):
        Collection.from_arrays(
            Layout(CARRIED, storage=storage), {**arrays, "hit": arrays["hit"]["id"]}
        )


def test_offsets_follow_the_capacity() -> None:
    # capacity 33, 2 in use: dir stays at 256, not at the 128 of n = 2.
    collection = Collection(LAYOUT, 2, capacity=N)
    collection.tensor("dir")[1, 0] = 1.25
    assert raw(collection)[260:264] == struct.pack("<f", 1.25)
    assert collection.tensor("x").shape == (2,)
    assert collection.span("x").tensor().shape == (33,)
    assert collection.run("dir", 0, 3).shape == (3, 64)


of_any_layout = given(
    layout=layouts(storages=("buffer", "columns")),
    n=ROWS,
    spare=st.integers(0, 40),
    seed=st.integers(0, 99),
)


@of_any_layout
def test_values_come_back_component_by_component(
    layout: Layout, n: int, spare: int, seed: int
) -> None:
    values = values_of(layout, n, seed)
    collection = Collection.from_arrays(layout, values, n, capacity=n + spare)
    for member in layout.columns:
        flat = values[member.name].reshape(-1, member.components)
        for i in range(member.components):
            piece = collection.span(member.name, member.component_of(i)).tensor()
            assert torch.equal(piece[: len(flat)], flat[:, i])
            assert piece.data_ptr() % layout.alignment_of(member.name) == 0 or not piece.numel()


@of_any_layout
def test_values_come_back_in_torch_and_numpy(layout: Layout, n: int, spare: int, seed: int) -> None:
    """But for a matrix in separate columns, which has no single view, and bfloat16 in NumPy."""
    values = values_of(layout, n, seed)
    collection = Collection.from_arrays(layout, values, n, capacity=n + spare)
    for member in layout.columns:
        if layout.storage == "columns" and member.kind == "eigen":
            continue
        in_torch = collection.tensor(member.name)
        assert torch.equal(in_torch, values[member.name])
        if member.dtype == "bfloat16":
            with pytest.raises(LayoutError, match="no bfloat16"):
                collection[member.name]
            continue
        in_numpy = collection[member.name]
        assert in_numpy.dtype == np.dtype(member.dtype)
        assert in_numpy.ctypes.data == in_torch.data_ptr() or not in_numpy.size


@of_any_layout
def test_components_do_not_overlap(layout: Layout, n: int, spare: int, seed: int) -> None:
    values = values_of(layout, n, seed)
    collection = Collection.from_arrays(layout, values, n, capacity=n + spare)
    pieces = [
        collection.span(c.name, k).tensor() for c in layout.columns for k in range(c.components)
    ]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in pieces if t.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@of_any_layout
def test_a_copy_has_the_same_bytes_elsewhere(layout: Layout, n: int, spare: int, seed: int) -> None:
    values = values_of(layout, n, seed)
    collection = Collection.from_arrays(layout, values, n, capacity=n + spare)
    for piece, copied in zip(collection.memory(), collection.to("cpu").memory(), strict=True):
        assert torch.equal(piece, copied)
        assert piece.data_ptr() != copied.data_ptr() or not piece.numel()


# -- views ---------------------------------------------------------------------------------------


def test_rows_share_memory() -> None:
    collection = Collection(LAYOUT, 4, capacity=N)
    grown = collection.rows(np.int64(N))  # type: ignore[arg-type]
    assert (grown.n, grown.capacity, type(grown.n)) == (33, 33, int)
    assert grown.data_ptr == collection.data_ptr
    grown.tensor("m")[3, 1, 2] = 5.0
    assert collection.tensor("m")[3, 1, 2] == 5.0
    assert collection.rows(0).tensor("m").shape == (0, 2, 3)


def test_matrix_is_contiguous_and_in_place() -> None:
    collection = Collection(LAYOUT, N)
    block = collection.run("dir", 1, 4).tensor()  # dir[1], dir[2], m[0], m[1]
    assert block.shape == (4, 64)
    assert block.is_contiguous()
    assert block.data_ptr() == collection.data_ptr + 512
    block[3, 5] = 1.25
    assert collection.tensor("m")[5, 1, 0] == 1.25


def test_a_collection_without_rows_has_scalars_only() -> None:
    empty = Collection(LAYOUT, 0)
    assert len(raw(empty)) == 128  # the scalar's
    assert empty.tensor("m").shape == (0, 2, 3)
    assert empty["dir"].shape == (0, 3)
    assert empty.run("m", 0, 6).shape == (6, 0)


def test_a_collection_of_scalars_has_as_many_rows_as_it_is_told() -> None:
    event = Layout([scalar("run", "uint32")])
    assert Collection.from_arrays(event, {"run": np.uint32(7)}).tensor("run") == 7
    assert Collection.from_arrays(event, {"run": np.uint32(7)}, 5).n == 5


def test_borrowed_scalars_have_as_many_rows_as_they_are_told() -> None:
    apart = Layout([scalar("run", "uint32")], storage="columns")
    borrowed = Collection.from_columns(apart, {"run": aligned_array([7], "uint32")}, 5)
    assert (borrowed.n, int(borrowed.tensor("run"))) == (5, 7)


def test_its_text_has_a_line_for_each_column() -> None:
    collection = Collection(LAYOUT, 2, capacity=5)
    collection["x"][:] = [1.5, 20000]
    collection["dir"][1] = [1, 2, 3]
    assert repr(collection).splitlines() == [
        "Collection of 2 rows on cpu, room for 5",
        "  x  float32  [1.5e+00 2.0e+04]",
        "  dir  float32[3]  [[0. 0. 0.] [1. 2. 3.]]",
        "  m  float32[2, 3]  [[[0. 0. 0.] [0. 0. 0.]] [[0. 0. 0.] [0. 0. 0.]]]",
        "  run  uint32  0",
    ]


def test_its_text_leaves_out_the_middle_of_many_rows_and_columns() -> None:
    many = Layout(
        [column("h", "bfloat16"), opaque("o", 3), *(column(f"c{i}", "bool") for i in range(30))]
    )
    head, *lines = repr(Collection(many, 1000).window(10, 20)).splitlines()
    assert "10 rows" in head and "from row 10 of 1,000" in head
    assert lines[0].split() == ["h", "bfloat16"]
    assert lines[2].split() == ["c0", "bool", "[False", "False", "...", "False", "False]"]
    assert "12 more" in lines[-1]


@pytest.mark.parametrize(
    ("n", "capacity", "says"),
    [
        (-1, None, "-1 elements"),
        (0, -1, "-1 elements"),
        (5, 4, "5 elements in a collection with room for 4"),
        (2.0, None, "must be an integer, found 2.0"),
        (True, None, "must be an integer, found True"),
    ],
)
@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_sizes_that_cannot_be_are_refused(storage: Any, n: Any, capacity: Any, says: str) -> None:
    layout = Layout([column("x", "float32")], storage=storage)
    with pytest.raises(CollectionError, match=says):
        Collection(layout, n, capacity=capacity)
    if storage == "buffer":
        with pytest.raises(CollectionError, match=says):
            Collection.wrap(layout, aligned_array(np.zeros(64), "float32"), n, capacity=capacity)


no_n_of_four = pytest.mark.parametrize("n", [-1, 5, 2.0, True])


@no_n_of_four
def test_from_columns_refuses_an_n_that_the_columns_do_not_have(n: Any) -> None:
    layout = Layout([column("x", "float32")], storage="columns")
    with pytest.raises(CollectionError, match="elements"):
        Collection.from_columns(layout, {"x": aligned_array(np.zeros(4), "float32")}, n)


@no_n_of_four
def test_rows_refuses_an_n_that_the_collection_does_not_have(n: Any) -> None:
    with pytest.raises(CollectionError, match="elements"):
        Collection(LAYOUT, 4).rows(n)


def test_separate_columns_have_no_single_view() -> None:
    collection = Collection(Layout(LAYOUT.columns, storage="columns"), N)
    with pytest.raises(CollectionError, match="components of 'm' are separate arrays"):
        collection.tensor("m")
    with pytest.raises(CollectionError, match="not a matrix"):
        collection.run("m", 0, 6)
    with pytest.raises(CollectionError, match="one address each"):
        _ = collection.data_ptr
    assert len(collection.memory()) == 11  # 1 + 3 + 6 + 1


def test_wrap_refuses_separate_columns() -> None:
    apart = Layout([column("x", "float32")], storage="columns")
    with pytest.raises(CollectionError, match=r"use Collection\.from_columns"):
        Collection.wrap(apart, np.zeros(4, "f4"), 4)


def test_from_columns_refuses_one_buffer() -> None:
    with pytest.raises(CollectionError, match=r"use Collection\.wrap or from_arrays"):
        Collection.from_columns(LAYOUT, {})


# -- separately allocated columns ------------------------------------------------------------------

APART = Layout(
    [column("x", "float32"), eigen("v", "int16", 2), scalar("run", "uint32")], 64, "columns"
)


def columns_of(n: int = 5, **changed: Any) -> dict[str, Any]:
    """Columns for APART; `changed` replaces some."""
    good = {
        "x": aligned_array(np.arange(n), "float32"),
        "v": [aligned_array(np.arange(n), "int16"), aligned_array(np.arange(n) + 10, "int16")],
        "run": aligned_array([7], "uint32"),
    }
    return {**good, **changed}


def test_from_columns_shares_memory() -> None:
    arrays = columns_of()
    collection = Collection.from_columns(APART, arrays)
    assert (collection.n, collection.capacity) == (5, 5)
    assert collection.tensor("x").data_ptr() == arrays["x"].ctypes.data
    assert collection.span("v", 1).tensor().data_ptr() == arrays["v"][1].ctypes.data
    collection.tensor("x")[2] = 9.0
    arrays["v"][1][3] = -1
    assert arrays["x"][2] == 9.0
    assert collection.span("v", 1).tensor()[3] == -1
    assert collection.tensor("run") == 7


def test_from_columns_may_use_fewer_rows_than_the_columns_have() -> None:
    assert Collection.from_columns(APART, columns_of(), 3).tensor("x").shape == (3,)


@pytest.mark.parametrize(
    "exported", [torch.from_numpy, OnlyArrayInterface, OnlyDLPack, memoryview, np.asarray]
)
@pytest.mark.parametrize("readonly", [False, True])
def test_from_columns_shares_the_memory_of_any_exporter(exported: Any, readonly: bool) -> None:
    """It is read-only if the array is; torch takes only writable ones without a warning."""
    array = aligned_array(np.arange(5), "float32")
    array.flags.writeable = not readonly or exported is torch.from_numpy
    collection = Collection.from_columns(APART, columns_of(x=exported(array)))
    assert collection.tensor("x").data_ptr() == array.ctypes.data
    assert collection.readonly != array.flags.writeable


EIGHT_AND_ONE = Layout([column("d", "float64"), column("b", "int8")], 1, "columns")


def bytes_and_doubles(shift: int) -> dict[str, Any]:
    """Columns for EIGHT_AND_ONE; the doubles begin `shift` bytes after an aligned address."""
    doubles = aligned_array(np.zeros(3), "f8", shift=shift)
    return {"d": doubles, "b": aligned_array(np.zeros(3), "i1", shift=3)}


def test_each_separate_column_is_aligned_to_its_elements() -> None:
    """If the alignment of the layout is less."""
    assert (EIGHT_AND_ONE.alignment_of("d"), EIGHT_AND_ONE.alignment_of("b")) == (8, 1)
    assert Collection.from_columns(EIGHT_AND_ONE, bytes_and_doubles(shift=8)).n == 3
    assert Collection(EIGHT_AND_ONE, 3).span("d").tensor().data_ptr() % 8 == 0


def test_a_separate_column_that_is_not_aligned_to_its_elements_is_refused() -> None:
    with pytest.raises(CollectionError, match=r"column 'd' .* misaligned: 8-byte"):
        Collection.from_columns(EIGHT_AND_ONE, bytes_and_doubles(shift=4))


@pytest.mark.parametrize("exported", [lambda tensor: tensor, OnlyDLPack], ids=["torch", "DLPack"])
def test_a_bfloat16_column_shares_memory(exported: Any) -> None:
    layout = Layout([column("h", "bfloat16")], 16, "columns")
    tensor = torch.arange(5, dtype=torch.bfloat16)
    collection = Collection.from_columns(layout, {"h": exported(tensor)})
    assert collection.tensor("h").data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": np.arange(5)}, "column 'x' is int64, the layout says float32"),
        ({"x": aligned_array(np.arange(5), ">f4")}, "column 'x' is >f4, the layout says float32"),
        ({"x": aligned_array(np.zeros(5), "f4").view([("a", "f4")])}, "column 'x' is opaque4"),
        ({"x": [1.0]}, "column 'x': cannot view a list as memory"),
        ({"x": aligned_array(np.zeros(10), "f4")[::2]}, "column 'x': .* not contiguous"),
        ({"x": aligned_array(np.zeros((5, 1)), "f4")}, r"'x' has shape \(5, 1\), needed one dim"),
        ({"x": aligned_array(np.zeros(5), "f4", shift=4)}, "column 'x' .* misaligned: 64-byte"),
        ({"x": aligned_array(np.zeros(4), "f4")}, r"different lengths: x \[4\], v \[5\]"),
        ({"v": [aligned_array(np.zeros(5), "i2")]}, "'v' needs 2 component arrays, found 1"),
        ({"v": [aligned_array(np.zeros(5), "i2"), np.zeros(5)]}, r"column 'v\[1\]' is float64"),
        ({"run": aligned_array([1, 2], "u4")}, "scalar 'run' has 2 values, needed 1"),
        ({"eta": np.zeros(5)}, r"unknown \['eta'\]"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        Collection.from_columns(APART, columns_of(**changed))


def test_missing_columns_are_named() -> None:
    with pytest.raises(CollectionError, match=r"missing \['v', 'run'\]"):
        Collection.from_columns(APART, {"x": np.zeros(5, "f4")})


# -- values, by copy -------------------------------------------------------------------------------


def arrays_of(n: int = 5, **changed: Any) -> dict[str, Any]:
    """Arrays for LAYOUT; `changed` replaces some."""
    good = {
        "x": np.arange(n, dtype="float32"),
        "dir": np.arange(3 * n, dtype="float32").reshape(n, 3),
        "m": np.arange(6 * n, dtype="float32").reshape(n, 2, 3),
        "run": np.uint32(7),
    }
    return {**good, **changed}


def test_from_arrays_copies() -> None:
    arrays = arrays_of(x=np.arange(10, dtype="float32")[::-2])  # negative strides
    arrays["dir"].flags.writeable = False
    collection = Collection.from_arrays(LAYOUT, arrays)
    for name, value in arrays.items():
        assert np.array_equal(collection[name], value)
    collection.tensor("x")[0] = -1.0
    assert arrays["x"][0] == 9.0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": np.zeros(5)}, "column 'x' is float64, the layout says float32: convert it first"),
        ({"x": np.zeros(5, ">f4")}, "column 'x' is >f4"),
        ({"x": [[1.0], [1.0, 2.0]]}, "column 'x': .*inhomogeneous"),
        ({"x": np.ma.masked_array(np.zeros(5), np.arange(5) == 2)}, "column 'x': .*masked"),
        ({"x": np.zeros(4, "f4")}, r"cannot tell n from columns of shapes x \(4,\), dir \(5, 3\)"),
        ({"x": np.float32(1)}, r"cannot tell n from columns of shapes x \(\)"),
        ({"m": np.zeros((5, 3, 2), "f4")}, r"'m' has shape \(5, 3, 2\), needed \(5, 2, 3\)"),
        ({"run": np.zeros(1, "u4")}, r"'run' has shape \(1,\), needed \(\)"),
        ({"x": torch.zeros(5).to_sparse()}, "column 'x' is a sparse"),
        ({"x": torch.zeros(5, device="meta")}, "column 'x' is .*meta"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        Collection.from_arrays(LAYOUT, arrays_of(**changed))


# -- GPU -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_cuda_columns_share_memory() -> None:
    layout = Layout([column("x", "float32"), column("h", "bfloat16")], 64, "columns")
    x = torch.zeros(5, device="cuda")
    h = torch.zeros(5, device="cuda", dtype=torch.bfloat16)
    pieces: list[Any] = [x, OnlyDLPack(x), OnlyCudaArrayInterface(x)]
    for piece in pieces:
        collection = Collection.from_columns(layout, {"x": piece, "h": h})
        assert collection.tensor("x").data_ptr() == x.data_ptr()
        assert collection.device == x.device
    with pytest.raises(CollectionError, match="different devices"):
        Collection.from_columns(layout, {"x": aligned_array(np.zeros(5), "f4"), "h": h})


def test_a_copy_of_other_columns_is_refused() -> None:
    narrow, wide = (Layout([column("pt", dtype)]) for dtype in ("float32", "float64"))
    with pytest.raises(CollectionError, match="other columns"):
        Collection(narrow, 3).copy_from(Collection(wide, 3))


def test_a_copy_of_too_many_rows_is_refused() -> None:
    layout = Layout([column("pt", "float32")])
    with pytest.raises(CollectionError, match="room for 3"):
        Collection(layout, 3).copy_from(Collection(layout, 4))
