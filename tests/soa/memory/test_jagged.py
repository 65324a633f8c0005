"""Jagged arrays of Awkward and Arrow: the same addresses on both sides, or a refusal."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pyarrow as pa
import pytest

from soa import Block, Layout, RowRange, Signature, column
from soa.errors import CollectionError
from soa.memory import Collection, from_jagged
from soa.signature import offsets_layout

PT = np.array([10, 11, 12, 20, 40, 41], "float32")
Q = np.array([1, -1, 1, 1, -1, -1], "int8")
OFFSETS = np.array([0, 3, 4, 4, 6])
ROWS = [[10, 11, 12], [20], [], [40, 41]]


def signature(dtype: str = "int64") -> Signature:
    """Jagged jets with `q` and `pt`, whose offsets have this dtype."""
    return Signature.build(
        {
            "jets": Layout([column("q", "int8"), column("pt", "float32")], 1, "columns"),
            "jets_offsets": offsets_layout(dtype),
            "out": Layout([column("y", "float32")]),
        },
        [Block("jets", "jets", ("pt",)), Block("jets_offsets", "jets_offsets", ("begin", "end"))],
        [Block("y", "out", ("y",))],
        {"n": RowRange(0, 10), "jet": RowRange(0, 100)},
        {"jets": "jet"},
        jagged={"jets": 2},
    )


def lists(content: Any, offsets: Any = OFFSETS) -> Any:
    """Awkward's lists of a content."""
    return ak.contents.ListOffsetArray(ak.index.Index64(offsets), content)


def of_records() -> Any:
    """One list of records for each row."""
    columns = [ak.contents.NumpyArray(PT), ak.contents.NumpyArray(Q)]
    return ak.Array(lists(ak.contents.RecordArray(columns, ["pt", "q"])))


def of_lists(offsets: Any = OFFSETS) -> Any:
    """One record of lists for each row; those of `q` may have other offsets."""
    columns = [lists(ak.contents.NumpyArray(PT)), lists(ak.contents.NumpyArray(Q), offsets)]
    return ak.Array(ak.contents.RecordArray(columns, ["pt", "q"]))


def arrow(kind: Any = pa.ListArray, dtype: Any = None) -> Any:
    """A table of two columns of lists, whose offsets have this dtype, int32 by default."""
    offsets = pa.array(OFFSETS, dtype or pa.int32())
    return pa.table(
        {"pt": kind.from_arrays(offsets, pa.array(PT)), "q": kind.from_arrays(offsets, pa.array(Q))}
    )


def rows_of(collections: dict[str, Collection], name: str = "pt") -> list[list[float]]:
    """The items of each row."""
    items, offsets = collections["jets"][name], collections["jets_offsets"]
    pairs = zip(offsets["begin"], offsets["end"], strict=True)
    return [items[begin:end].tolist() for begin, end in pairs]


@pytest.mark.parametrize("make", [of_records, of_lists])
def test_awkward_lists_are_seen_in_place(make: Any) -> None:
    array = make()
    collections = from_jagged(array, signature(), "jets")
    jets, offsets = collections["jets"], collections["jets_offsets"]
    assert (jets.n, offsets.n) == (len(PT), len(ROWS))
    assert jets["pt"].ctypes.data == PT.ctypes.data
    assert jets["q"].ctypes.data == Q.ctypes.data
    assert offsets["begin"].ctypes.data == OFFSETS.ctypes.data
    assert offsets["end"].ctypes.data == OFFSETS.ctypes.data + 8  # from the second offset on
    assert rows_of(collections) == ROWS
    assert jets.readonly and offsets.readonly


@pytest.fixture
def last_is_missing() -> Any:
    """ROWS and a missing row, as Awkward reads them from a Parquet file."""
    table = pa.table(
        {
            "pt": pa.array([*ROWS, None], pa.list_(pa.float32())),
            "q": pa.array([*([1] * len(row) for row in ROWS), None], pa.list_(pa.int8())),
        }
    )
    return ak.from_arrow(table)


def test_rows_that_may_be_missing_and_are_not_are_taken(last_is_missing: Any) -> None:
    array = last_is_missing[:4]
    assert "option" in str(array.type)
    assert rows_of(from_jagged(array, signature(), "jets")) == ROWS


def test_a_missing_row_is_refused(last_is_missing: Any) -> None:
    with pytest.raises(CollectionError, match="column 'q' has no list in every row"):
        from_jagged(last_is_missing, signature(), "jets")


either_form = pytest.mark.parametrize("make", [of_records, of_lists])


@either_form
@pytest.mark.parametrize(
    "rows",
    [slice(1, 4), np.array([3, 0, 2, 0]), np.array([False, True, True, False]), [2]],
    ids=["slice", "index", "mask", "empty row"],
)
def test_rows_of_any_choice_keep_their_content_where_it_is(make: Any, rows: Any) -> None:
    array = make()[rows]
    collections = from_jagged(array, signature(), "jets")
    assert rows_of(collections) == array["pt"].to_list()
    assert rows_of(collections, "q") == array["q"].to_list()
    jets = collections["jets"]
    assert not jets.n or 0 <= jets["pt"].ctypes.data - PT.ctypes.data < PT.nbytes


@either_form
def test_no_rows_have_no_offsets(make: Any) -> None:
    assert from_jagged(make()[:0], signature(), "jets")["jets_offsets"].n == 0


def test_lists_of_one_size_are_seen_in_place() -> None:
    array = ak.to_regular(ak.zip({"pt": PT.reshape(3, 2), "q": Q.reshape(3, 2)}))
    collections = from_jagged(array, signature(), "jets")
    assert rows_of(collections) == PT.reshape(3, 2).tolist()
    assert collections["jets"]["pt"].ctypes.data == PT.ctypes.data


def test_arrow_lists_are_seen_in_place() -> None:
    table = arrow()
    column = table["pt"].chunk(0)
    jets = from_jagged(table, signature("int32"), "jets")
    assert rows_of(jets) == ROWS
    assert jets["jets"]["pt"].ctypes.data == column.values.buffers()[1].address
    assert jets["jets_offsets"]["begin"].ctypes.data == column.buffers()[1].address


def test_arrow_offsets_of_another_dtype_are_copied() -> None:
    assert rows_of(from_jagged(arrow(), signature("int64"), "jets")) == ROWS


def test_large_arrow_lists_are_seen_in_place() -> None:
    large = arrow(pa.LargeListArray, pa.int64())
    ends = from_jagged(large, signature("int64"), "jets")["jets_offsets"]["end"]
    assert ends.ctypes.data == large["q"].chunk(0).buffers()[1].address + 8


def test_arrow_lists_of_records_are_read() -> None:
    struct = pa.StructArray.from_arrays([pa.array(PT), pa.array(Q)], ["pt", "q"])
    whole = pa.ListArray.from_arrays(pa.array(OFFSETS, pa.int32()), struct)
    assert rows_of(from_jagged(whole, signature("int32"), "jets")) == ROWS
    assert rows_of(from_jagged(whole.slice(1, 3), signature("int32"), "jets")) == ROWS[1:]


@pytest.mark.parametrize(
    "data, says",
    [
        (of_lists(np.array([0, 2, 4, 4, 6])), "'q', 'pt' have different offsets"),
        (ak.Array([{"pt": 1.0, "q": 1}]), "column 'q' has no list in every row"),
        (ak.Array([{"pt": [1.0]}]), "no column 'q', there are: pt"),
        (ak.Array([[1.0, 2.0], []]), "no column 'q', there are: "),
        (ak.mask(of_records(), np.array([True, False, True, True])), "has no list in every row"),
        (ak.Array([[{"pt": 1.0, "q": q} for q in (1, None)]]), "column 'q' has nulls"),
        (ak.Array([[{"pt": 1.0, "q": 1}]]), "column 'q' is int64, the layout says int8"),
        (pa.table({"pt": [1.0], "q": [1]}), "column 'q' has no list in every row"),
    ],
)
def test_what_is_not_jagged_alike_is_refused(data: Any, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        from_jagged(data, signature(), "jets")


def test_items_that_an_index_picks_are_taken_once_they_are_packed() -> None:
    """Some versions of Awkward pack them; of the others they are refused, with this advice."""
    array = of_records()
    picked = array[ak.argsort(array.pt, ascending=False)]
    try:
        collections = from_jagged(picked, signature(), "jets")
    except CollectionError as error:
        assert "to_packed" in str(error)
        collections = from_jagged(ak.to_packed(picked), signature(), "jets")
    assert rows_of(collections) == [row[::-1] for row in ROWS]


def test_a_collection_that_is_not_jagged_is_named() -> None:
    with pytest.raises(CollectionError, match=r"'out' is not jagged in the model: jets"):
        from_jagged(of_records(), signature(), "out")
