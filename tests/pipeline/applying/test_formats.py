"""Every Arrow type in every format: each value is kept, or one line says that it cannot be."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uproot

import pipeline
from pipeline.applying.columns import as_arrow
from pipeline.applying.outputs import Rows, write
from pipeline.applying.sources import open_source
from pipeline.errors import DataError
from registry.store.registry import Registry
from tests.models.mlps import FEATURES
from tests.models.project import cli, refusal
from tests.models.scored import columns

REF = "tagger@production"
FORMS = (".parquet", ".arrow", ".root", ".rntuple.root", ".h5", ".npz")
_DAYS = [dt.datetime(2020, 1, 2, 3, 4, 5), dt.datetime(1969, 12, 31), dt.datetime(2262, 1, 1)] * 2
_UNITS = ("s", "ms", "us", "ns")


def _five(kind: Any, values: Sequence[Any]) -> Any:
    """Five rows of this Arrow type: three to five values, or the first ones twice."""
    return pa.array([*values, *values][:5], kind)


def _extension(kind: Any, values: Sequence[Any]) -> Any:
    """Five rows of this extension type, from values of its storage type."""
    return pa.ExtensionArray.from_storage(kind, _five(kind.storage_type, values))


NUMBERS = {
    "bool": _five(pa.bool_(), [True, False, True]),
    **{
        name: _five(pa.type_for_alias(name), [0, np.iinfo(name).max, np.iinfo(name).min])
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    "float": _five(pa.float32(), [1.5, -np.inf, 1e-40]),
    "double": _five(pa.float64(), [1.5, np.inf, -0.0]),
}
HALF = {"halffloat": _five(pa.float16(), [np.float16(1.5), np.float16(-2), np.float16(0)])}
MOMENTS = {
    "date32[day]": _five(pa.date32(), [day.date() for day in _DAYS]),
    **{f"timestamp[{unit}]": _five(pa.timestamp(unit), _DAYS) for unit in _UNITS},
    **{
        f"duration[{unit}]": _five(pa.duration(unit), [dt.timedelta(1), dt.timedelta(0, -7)] * 2)
        for unit in _UNITS
    },
}
TEXT = {
    str(kind): _five(kind, ["", "b\u00e9", "c" * 300])
    for kind in (pa.string(), pa.large_string(), pa.string_view())
}
VECTORS = {
    "vector": _five(pa.list_(pa.int32(), 2), [[1, 2], [3, -4], [5, 6]]),
    "vector of bool": _five(pa.list_(pa.bool_(), 2), [[True, False], [False, False]] * 2),
    "matrix": _five(pa.list_(pa.list_(pa.float32(), 2), 1), [[[1, 2]], [[3, 4]], [[5, 6]]]),
}
VECTORS_OF_MOMENTS = {
    "vector of days": _five(pa.list_(pa.timestamp("us"), 1), [[day] for day in _DAYS])
}
VECTORS_OF_TEXT = {
    "vector of text": _five(pa.list_(pa.string(), 2), [["a", "bc"], ["", "d"], ["e", "f"]])
}
JAGGED = {
    f"{name} of {inner}": _five(
        make(inner), [[NUMBERS[str(inner)][1].as_py()], [], NUMBERS[str(inner)][:3].to_pylist()]
    )
    for name, make in (("list", pa.list_), ("large list", pa.large_list))
    for inner in (pa.int64(), pa.float32(), pa.bool_())
}
NESTED = {
    "lists of vectors": _five(pa.list_(pa.list_(pa.int32(), 2)), [[[1, 2]], [], [[3, 4], [5, 6]]]),
    "vectors of lists": _five(pa.list_(pa.list_(pa.int32()), 1), [[[1, 2]], [[]], [[3]]]),
    "lists of lists": _five(pa.list_(pa.list_(pa.int32())), [[[1, 2], []], [], [[3]]]),
    "lists of text": _five(pa.list_(pa.string()), [["a"], [], ["b", ""]]),
}
ANYTHING = {
    "null": pa.nulls(5),
    "date64[ms]": _five(pa.date64(), [day.date() for day in _DAYS]),
    "time32[s]": _five(pa.time32("s"), [dt.time(1, 2, 3), dt.time(23)] * 2),
    "time64[ns]": _five(pa.time64("ns"), [dt.time(1, 2, 3), dt.time(23)] * 2),
    "timestamp with a zone": _five(
        pa.timestamp("us", "Europe/Zurich"), [day.replace(tzinfo=dt.UTC) for day in _DAYS[:2]] * 2
    ),
    "binary": _five(pa.binary(), [b"ab", b"\xff\0", b"cd"]),
    "binary of a size": _five(pa.binary(2), [b"ab", b"\xff\0", b"cd"]),
    "decimal": _five(pa.decimal128(20, 2), [decimal.Decimal("1.25"), decimal.Decimal("-9.5")] * 2),
    "struct": _five(
        pa.struct([("x", pa.int32()), ("y", pa.string())]),
        [{"x": 1, "y": "a"}, {"x": 2, "y": ""}] * 2,
    ),
    "struct of lists": _five(
        pa.struct([("x", pa.list_(pa.int8()))]), [{"x": [1, 2]}, {"x": []}] * 2
    ),
    "lists of structs": _five(
        pa.list_(pa.struct([("x", pa.int32())])), [[{"x": 1}], [], [{"x": 2}, {"x": 3}]]
    ),
    "lists of half": _five(pa.list_(pa.float16()), [[np.float16(1)], [], [np.float16(2)]]),
    "lists of days": _five(pa.list_(pa.timestamp("ns")), [_DAYS[:1], [], _DAYS[1:2]]),
    "list view": _five(pa.list_view(pa.float32()), [[1], [], [2, 3]]),
    "map": _five(pa.map_(pa.string(), pa.int32()), [[("a", 1)], [], [("b", 2), ("c", 3)]]),
    "uuid": _extension(pa.uuid(), [uuid.UUID(int=i).bytes for i in range(3)]),
    "tensor": _extension(pa.fixed_shape_tensor(pa.float32(), [2]), [[1, 2], [3, 4], [5, 6]]),
}
NO_PARQUET = {  # Arrow does not write these to Parquet
    "interval": _five(pa.month_day_nano_interval(), [(1, 2, 3), (0, 0, 0)] * 2),
    "run ends": pa.RunEndEncodedArray.from_arrays([2, 5], pa.array([1.5, 2.5])),
    "union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0, 1, 0], pa.int8()), [pa.array(range(5)), pa.array([*"abcde"])]
    ),
}
# The values of a dictionary are kept, not the dictionary.
DICTIONARIES = {
    "dictionary of text": pa.array([*"babca"]).dictionary_encode(),
    "dictionary of numbers": pa.array([2.5, 1.5, 2.5, 2.5, 1.5]).dictionary_encode(),
}
TYPES = {
    **NUMBERS, **HALF, **MOMENTS, **TEXT, **VECTORS, **VECTORS_OF_MOMENTS, **VECTORS_OF_TEXT,
    **JAGGED, **NESTED, **ANYTHING, **NO_PARQUET, **DICTIONARIES,
}  # fmt: skip
_NUMERIC = {*NUMBERS, *VECTORS, "dictionary of numbers"}
HELD = {  # by suffix, the types whose values the format keeps; others it refuses
    ".arrow": {*TYPES},
    ".parquet": {*TYPES} - {*NO_PARQUET},
    ".root": {*_NUMERIC, *TEXT, *JAGGED, "dictionary of text"},
    ".rntuple.root": {
        *_NUMERIC, *TEXT, *JAGGED, *NESTED, *VECTORS_OF_TEXT, "dictionary of text",
    },
    ".h5": {*_NUMERIC, *HALF, *TEXT, *VECTORS_OF_TEXT, "dictionary of text"},
    ".npz": {*_NUMERIC, *HALF, *MOMENTS, *VECTORS_OF_MOMENTS},
}  # fmt: skip


def write_column(folder: Path, form: str, array: Any, *cuts: int) -> Path:
    """Writes a file with the column `k`, in several tables, divided at `cuts`."""
    path = folder / f"k{form}"
    column = as_arrow(array)
    ends = (0, *cuts, len(column))
    tables = [pa.table({"k": column[low:high]}) for low, high in itertools.pairwise(ends)]
    rows = Rows(tables[0].schema, len(column), lambda: tables, lambda: "{}",
                ntuple=form == ".rntuple.root")  # fmt: skip
    write(path, rows, folder)
    return path


def read_column(path: Path, name: str = "k") -> list[Any]:
    """The values of a column as Python objects, read by the format's own library."""
    if path.suffix == ".parquet":
        return list(pq.read_table(path)[name].to_pylist())
    if path.suffix == ".arrow":
        return list(pa.ipc.open_file(path).read_all()[name].to_pylist())
    if path.suffix == ".root":
        with uproot.open(path) as file:
            return list(file["Events"][name].array().tolist())
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            text = h5py.check_string_dtype(file[name].dtype)
            return list((file[name].asstr() if text else file[name])[:].tolist())
    with np.load(path) as arrays:
        values = arrays[name]
    if values.dtype.kind not in "mM":
        return list(values.tolist())
    flat = pa.array(values.reshape(-1)).to_pylist()  # NumPy returns nanoseconds as integers
    return flat if values.ndim == 1 else [[value] for value in flat]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_kept_by_the_formats_that_hold_it(tmp_path: Path, name: str, form: str) -> None:
    """Others refuse it in one line that names the column, and leave no file."""
    array = TYPES[name]
    if name in HELD[form]:
        assert read_column(write_column(tmp_path, form, array, 2)) == array.to_pylist()
        return
    with pytest.raises(DataError, match="k") as caught:
        write_column(tmp_path, form, array, 2)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob(f"k{form}")] and not [*tmp_path.glob("*.partial")]


def read_array(path: Path) -> np.ndarray[Any, Any]:
    """The column `k` as an array, read by the format's own library."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            values: np.ndarray[Any, Any] = arrays["k"]
    elif path.suffix == ".h5":
        with h5py.File(path) as file:
            values = file["k"][:]
    else:
        with uproot.open(path) as file:
            assert file["Events"].keys() == ["k"]
            values = ak.to_numpy(file["Events"]["k"].array())
    return values


@pytest.mark.parametrize("form", [".npz", ".h5", ".root", ".rntuple.root"])
def test_dtypes_and_shapes_are_kept(tmp_path: Path, form: str) -> None:
    for name in {*NUMBERS, *VECTORS, *MOMENTS} & HELD[form]:
        values = read_array(write_column(tmp_path, form, TYPES[name]))
        flat = TYPES[name]
        while pa.types.is_fixed_size_list(flat.type):
            flat = flat.flatten()
        expected = flat.to_numpy(zero_copy_only=False)
        assert values.dtype == expected.dtype, name
        np.testing.assert_array_equal(values, expected.reshape(values.shape))
        assert len(values) == 5


# -- nulls ---------------------------------------------------------------------------------------


def nulled(value: Any, depth: int) -> Any:
    """A value with a null at this depth, in its first entry or item.

    Raises LookupError if it has no such depth.
    """
    if depth == 0:
        return None
    if isinstance(value, dict):
        first = next(iter(value))
        return {**value, first: nulled(value[first], depth - 1)}
    if isinstance(value, list):
        return [nulled(value[0], depth - 1), *value[1:]]
    raise LookupError(depth)


def with_nulls() -> dict[str, Any]:
    """Columns by type and depth; of five rows, the third has the null."""
    arrays = {**NUMBERS, **HALF, **MOMENTS, **TEXT, **VECTORS, **VECTORS_OF_MOMENTS,
              **VECTORS_OF_TEXT, **JAGGED, **NESTED}  # fmt: skip
    for name in ("struct", "struct of lists", "lists of structs"):
        arrays[name] = ANYTHING[name]
    columns = {}
    for name, array in arrays.items():
        for depth in range(4):
            rows = array.to_pylist()
            full = next(row for row in rows if row or row == 0)
            try:
                rows[2] = nulled(full, depth)
            except LookupError:
                break
            columns[f"{name}, {depth}"] = pa.array(rows, array.type)
    indices = pa.array([0, 0, 1, 0, 0], pa.int8())
    for suffix, values in (("", [1.5, None]), (" of text", ["a", None])):
        dictionary = pa.DictionaryArray.from_arrays(indices, pa.array(values))
        columns[f"a null in a dictionary{suffix}"] = dictionary
    return columns


NULLS = with_nulls()


def parquet_keeps_nulls(name: str) -> bool:
    """Arrow writes, but cannot read, a null in the place of a vector or of a list of numbers."""
    vector = pa.types.is_fixed_size_list(NULLS[name].type) and name.endswith(", 0")
    return not vector and name not in ("lists of vectors, 1", "matrix, 1")


@pytest.mark.parametrize("name", NULLS)
def test_nulls_are_kept_or_refused(tmp_path: Path, name: str) -> None:
    """Arrow keeps a null at any depth, and Parquet most of them."""
    array = NULLS[name]
    assert read_column(write_column(tmp_path, ".arrow", array, 1)) == array.to_pylist()
    if parquet_keeps_nulls(name):
        assert read_column(write_column(tmp_path, ".parquet", array, 1)) == array.to_pylist()
        return
    problem = r"'k' has 1 nulls, which Parquet cannot store: write Arrow"
    with pytest.raises(DataError, match=problem):
        write_column(tmp_path, ".parquet", array, 1)


@pytest.mark.parametrize("form", [".root", ".rntuple.root", ".h5", ".npz"])
@pytest.mark.parametrize("name", NULLS)
def test_formats_of_numbers_refuse_nulls(tmp_path: Path, name: str, form: str) -> None:
    """They count them if they hold the type. Nulls in rows that are not written do not count."""
    array, holds_type = NULLS[name], name.partition(",")[0] in HELD[form]
    problem = "'k' has 1 nulls" if holds_type else "column 'k'"
    with pytest.raises(DataError, match=problem):
        write_column(tmp_path, form, array, 1)
    if holds_type:
        rest = array[3:]
        assert read_column(write_column(tmp_path, form, rest)) == rest.to_pylist()


def test_text_with_a_nul_is_no_text_of_hdf5(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'k': .*NUL"):
        write_column(tmp_path, ".h5", pa.array(["a\0b"]))


# -- in whole jobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form for form in FORMS if form != ".rntuple.root"])
@pytest.mark.parametrize("source", [".arrow", ".parquet"])
def test_kept_columns_of_every_type(
    tmp_path: Path, production: Registry, form: str, source: str
) -> None:
    """In several batches and row groups; each row group has its own dictionary."""
    kept = {name: pa.concat_arrays([TYPES[name]] * 40) for name in HELD[form] & HELD[source]}
    if "dictionary of text" in kept:
        kept["dictionary of text"] = pa.array([f"word {i}" for i in range(200)]).dictionary_encode()
    for name in ("struct", "struct of lists", "lists of structs"):  # their fields may be kept
        kept.pop(name, None)
    table = pa.table({**{name: columns(200)[name] for name in FEATURES}, **kept})
    rows = tmp_path / f"rows{source}"
    if source == ".parquet":
        pq.write_table(table, rows, row_group_size=70)
    else:
        with pa.ipc.new_file(rows, table.schema) as file:
            file.write_table(table, 70)
    out = tmp_path / f"out{form}"
    pipeline.apply(REF, rows, out, keep=[*kept], registry=production)
    for name, array in kept.items():
        assert read_column(out, name) == array.to_pylist(), name


def test_fields_of_structs_are_kept(tmp_path: Path, production: Registry) -> None:
    """If a struct is null, each of its fields is."""
    rows: list[Any] = [{"x": 1, "day": _DAYS[0]}, None, {"x": None, "day": None}] * 70
    lists: list[Any] = [[{"pt": 1.5}, {"pt": None}], None, [], [None], [{"pt": 2.5}]] * 42
    struct = pa.array(rows, pa.struct([("x", pa.int32()), ("day", pa.timestamp("us"))]))
    table = pa.table(
        {
            **{name: columns(210)[name] for name in FEATURES},
            "s": struct,
            "jets": pa.array(lists, pa.list_(pa.struct([("pt", pa.float32())]))),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=80)
    keep = ["s.*", "jets.pt"]
    out = tmp_path / "out.arrow"
    pipeline.apply(REF, tmp_path / "rows.parquet", out, keep=keep, registry=production)
    assert read_column(out, "s.x") == [row and row["x"] for row in rows]
    assert read_column(out, "s.day") == [row and row["day"] for row in rows]
    assert read_column(out, "jets.pt") == [
        row if row is None else [item and item["pt"] for item in row] for row in lists
    ]


def test_a_name_of_a_column_and_of_a_field_is_refused(tmp_path: Path, production: Registry) -> None:
    """Only where it is read."""
    file = tmp_path / "rows.parquet"
    struct = pa.array([{"b": 1}, {"b": 2}], pa.struct([("b", pa.int32())]))
    rows = {name: columns(2)[name] for name in FEATURES} | {"s": struct, "s.b": [3, 4], "o": [5, 6]}
    pq.write_table(pa.table(rows), file)
    with pytest.raises(DataError, match=r"several columns called s\.b"):
        pipeline.apply(REF, file, tmp_path / "o.parquet", keep=["s.b"], registry=production)
    assert not (tmp_path / "o.parquet").exists()
    pipeline.apply(REF, file, tmp_path / "o.parquet", keep=["o"], registry=production)
    assert read_column(tmp_path / "o.parquet", "o") == [5, 6]


def test_a_name_of_a_dataset_and_of_a_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.h5"
    with h5py.File(file, "w") as made:
        made["a"] = np.array([(1,), (2,)], dtype=[("b", np.int32)])
        made["a.b"], made["c"] = [3, 4], [5, 6]
    with open_source(file) as source:
        assert source.head(["c"], 2)["c"].tolist() == [5, 6]
        with pytest.raises(DataError, match=r"several columns called a\.b"):
            source.head(["a.b"], 2)


def test_hdf5_refuses_a_kept_field_with_a_null(tmp_path: Path, production: Registry) -> None:
    struct = pa.array([{"x": 1}, None], pa.struct([("x", pa.int32())]))
    rows, out = tmp_path / "rows.parquet", tmp_path / "o.h5"
    pq.write_table(pa.table({**{name: columns(2)[name] for name in FEATURES}, "s": struct}), rows)
    with pytest.raises(DataError, match="nulls, which HDF5 cannot store"):
        pipeline.apply(REF, rows, out, keep=["s.x"], registry=production)


@pytest.mark.parametrize("null_at", [3, 900], ids=["early", "late"])
def test_what_a_format_cannot_hold_leaves_nothing(
    tmp_path: Path, production: Registry, null_at: int
) -> None:
    """The advice in the error works with the same output path: no folder is left there."""
    rows = columns(1000)
    vectors: list[Any] = [[5, 6]] * 1000
    vectors[null_at] = [5, None]
    table = {name: pa.array(rows[name]) for name in FEATURES}
    table["v"] = pa.array(vectors, pa.list_(pa.int32(), 2))
    pq.write_table(pa.table(table), tmp_path / "rows.parquet", row_group_size=100)
    out = tmp_path / "out"
    command = ("apply", REF, tmp_path / "rows.parquet", "--registry", production.uri, "--keep", "v")
    for form in ("npz", "h5", "root"):
        message = refusal(*command, "--out", out, "--format", form)
        assert "'v' has 1 nulls" in message and "write Parquet or Arrow" in message
        assert not out.exists()
    cli(*command, "--out", out, "--format", "parquet")
    assert read_column(out / "rows.parquet", "v") == vectors


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_dots_at_the_ends_of_a_name_are_part_of_it(tmp_path: Path, suffix: str) -> None:
    file, names = tmp_path / f"rows{suffix}", [".pt", "pt."]
    if suffix == ".parquet":
        pq.write_table(pa.table({name: pa.array([1.0]) for name in names}), file)
    else:
        np.savez(file, allow_pickle=False, **{name: np.ones(1) for name in names})
    with open_source(file) as source:
        assert list(source.columns) == names
