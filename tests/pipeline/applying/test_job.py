"""How files are divided into batches, and which models can score them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Module

import pipeline
from pipeline.applying.columns import eigen_shape
from pipeline.applying.job import cut_file
from pipeline.applying.sources import open_source
from pipeline.errors import ApplyError, DataError
from registry.store.registry import Registry
from soa import Collection, Layout, eigen
from soa.memory import as_collection, to_arrow
from tests.models import served
from tests.models.scored import SUFFIXES, columns, write_rows
from tests.models.versions import promoted


def shape_of(entries: list[str], first: Any = None) -> object:
    """The shape of a struct with these entries, all float32 unless the first has another type."""
    types = [first or pa.float32(), *[pa.float32()] * (len(entries) - 1)]
    return eigen_shape(pa.struct([*zip(entries, types, strict=True)]))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=2))
def test_a_struct_has_a_shape_if_its_entries_are_those_of_to_arrow(shape: list[int]) -> None:
    layout = Layout([eigen("own", "float32", *shape)])
    names = [field.name for field in to_arrow(Collection(layout, 0)).schema.field("own").type]
    assert shape_of(names) == tuple(shape)
    for other in (names[1:] or ["x"], [*names, "e"], [*names, names[0]]):
        assert shape_of(other) != tuple(shape)
    if len(names) > 1:
        assert shape_of(names[::-1]) is None
        assert shape_of(names, pa.int32()) is None


def test_a_struct_whose_only_entry_is_a_late_one_has_no_shape() -> None:
    assert shape_of(["e999999999"]) is None


@pytest.fixture
def structs(tmp_path: Path) -> Path:
    """Ten rows: `v` has vectors with nulls in rows 3 (one entry) and 7; `other` is no vector."""
    vectors = [None if i == 7 else {"e0": i, "e1": None if i == 3 else 0.5} for i in range(10)]
    others = [{"e0": 1.0, "e1": 1}] * 10
    kind = pa.struct([("e0", pa.float32()), ("e1", pa.float32())])
    table = pa.table({"v": pa.array(vectors, kind), "other": pa.array(others)})
    pq.write_table(table, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_structs_of_one_type_are_a_column_and_others_are_several(structs: Path) -> None:
    with open_source(structs) as source:
        assert source.columns == ["v", "other.e0", "other.e1"]


def test_an_entry_of_a_struct_is_a_column_too(structs: Path) -> None:
    with open_source(structs) as source:
        assert "v.e0" in source and "v.e2" not in source


def test_structs_of_one_type_are_read_as_vectors(structs: Path) -> None:
    """Nulls stay nulls, also in batches that begin in the middle."""
    with open_source(structs) as source:
        batches = list(source.batches(["v", "v.e1"], 2, 9, 4))
    rows = [row for batch in batches for row in batch["v"].to_pylist()]
    assert rows == [[2, 0.5], [3, None], *([i, 0.5] for i in (4, 5, 6)), [None, None], [8, 0.5]]
    assert all(len(batch["v.e1"]) == len(batch["v"]) <= 4 for batch in batches)


@given(
    st.lists(st.integers(0, 500), max_size=20).map(lambda ends: [0, *sorted(ends)]),
    st.integers(1, 200),
    st.booleans(),
)
def test_pieces_follow_one_another(edges: list[int], rows: int, seeks: bool) -> None:
    """None but the last is too small. A file that seeks is cut anywhere, others at their edges."""
    ends = list(cut_file(edges, rows, seeks))
    assert (ends[0], ends[-1]) == (0, edges[-1])
    sizes = [stop - start for start, stop in pairwise(ends)]
    assert all(size > 0 for size in sizes)
    assert all(size >= rows for size in sizes[:-1])
    if seeks:
        assert all(size < 3 * rows for size in sizes)
    else:
        assert {*ends} <= {*edges}


CUTS = [(0, 700, 100), (0, 700, 1000), (150, 450, 70), (0, 0, 5)]
# A compressed file is read from its start.
WITHIN_FILES = [
    (suffix, *cut) for suffix in SUFFIXES for cut in CUTS if suffix != ".npz" or cut[0] == 0
]


@pytest.mark.parametrize(("suffix", "start", "stop", "most"), WITHIN_FILES)
def test_any_rows_of_a_file(tmp_path: Path, suffix: str, start: int, stop: int, most: int) -> None:
    rows = columns(700)
    path = write_rows(tmp_path / f"rows{suffix}", rows, 150)
    names = ["a", "event", "hit"]
    with open_source(path) as source:
        assert source.edges(names)[-1] == 700
        batches = list(source.batches(names, start, stop, most))
    assert all(len(batch["a"]) <= most for batch in batches)
    for name in names:
        shape = (-1, *rows[name].shape[1:])
        values = [np.asarray(batch[name].tolist()).reshape(shape) for batch in batches]
        np.testing.assert_array_equal(np.concatenate(values), rows[name][start:stop])


@pytest.mark.parametrize("model", [served.Coupled, served.Running])
def test_a_model_whose_rows_see_each_other_scores_no_file(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory, model: type[Module]
) -> None:
    name = model.__name__.lower()
    promoted(empty, served.shared(tmp_path_factory, name, model(), served.COUPLED))
    source = write_rows(tmp_path / "rows.npz", dict.fromkeys("xy", columns(100)["a"]))
    with pytest.raises(ApplyError, match="depends on the rows beside it"):
        pipeline.apply(f"{name}@production", source, tmp_path / "out.npz", registry=empty)
    assert not list(tmp_path.glob("*out*"))


def test_a_model_of_two_row_dimensions_scores_no_file(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    promoted(empty, served.shared(tmp_path_factory, "event", served.Event(), served.EVENT))
    rows = dict.fromkeys(("x", "y", "z", "weight"), columns(100)["a"])
    source = write_rows(tmp_path / "rows.npz", rows)
    with pytest.raises(ApplyError, match="row dimensions"):
        pipeline.apply("event@production", source, tmp_path / "out.npz", registry=empty)
    assert not list(tmp_path.glob("*out*"))


def mixed_rows() -> dict[str, Any]:
    """Rows of `served.MIXED`: every kind of dtype and shape."""
    draw = np.random.default_rng(3)
    return {
        "pt": draw.normal(size=500).astype("f4"),
        "dir": draw.normal(size=(500, 3)).astype("f4"),
        "cov": draw.normal(size=(500, 2, 3)),
        "flag": draw.random(500) < 0.5,
        "kind": draw.integers(-9, 9, 500).astype("i1"),
        "hits": draw.integers(0, 99, 500).astype("u2"),
        "run": draw.integers(0, 99, 500).astype("u4"),
        "half": draw.normal(size=500).astype("f2"),
    }


@pytest.fixture
def mixed(empty: Registry, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry with mixed/1, a model of every dtype and shape, in production."""
    promoted(empty, served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED))
    return empty


def scored(source: Path, out: Path, registry: Registry, **options: Any) -> dict[str, Any]:
    """The columns of the output for a file of such rows."""
    pipeline.apply("mixed@production", source, out, registry=registry, **options)
    with h5py.File(out) as file:
        return {name: file[name][:] for name in file}


def test_every_dtype_and_shape_is_scored(tmp_path: Path, mixed: Registry) -> None:
    """Eigen columns in a buffer and as separate ones; a collection that is read and written."""
    rows = mixed_rows()
    np.savez(tmp_path / "rows.npz", **rows)
    answers = scored(tmp_path / "rows.npz", tmp_path / "o.h5", mixed)
    assert answers["vec"].shape == (500, 2) and answers["mat"].shape == (500, 2, 2)
    np.testing.assert_allclose(answers["vec"], rows["dir"][:, :2] - rows["dir"][:, 1:], rtol=1e-6)
    np.testing.assert_allclose(answers["mat"], rows["cov"][..., :2] * 2 + rows["cov"][..., 1:])
    plain = [rows[name].astype("f4") for name in ("kind", "hits", "run", "half", "pt")]
    total = sum(plain) + np.square(rows["dir"]).sum(1)
    np.testing.assert_allclose(
        answers["sum"], np.where(rows["flag"], total, -total), rtol=1e-4, atol=1e-3
    )
    assert answers["count"].dtype == np.int32 and answers["ok"].dtype == np.bool_


def test_another_dtype_than_the_models_is_refused(tmp_path: Path, mixed: Registry) -> None:
    rows = mixed_rows()
    np.savez(tmp_path / "wrong.npz", **{**rows, "cov": rows["cov"].astype("f4")})
    with pytest.raises(DataError, match=r"wrong.npz, rows 0 to 256: .*'cov' is float32"):
        scored(tmp_path / "wrong.npz", tmp_path / "o.h5", mixed)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_dtype_and_shape_in_the_form_of_to_arrow_is_scored(
    tmp_path: Path, mixed: Registry, suffix: str
) -> None:
    """An Eigen column is a struct of its entries; columns and entries may be kept."""
    rows = mixed_rows()
    np.savez(tmp_path / "rows.npz", **rows)
    expected = scored(tmp_path / "rows.npz", tmp_path / "o.h5", mixed)
    parts = as_collection(rows, Layout([served.MIXED.layouts["parts"][name] for name in rows]))
    table, source = pa.Table.from_batches([to_arrow(parts)]), tmp_path / f"rows{suffix}"
    write = pq.write_table if suffix == ".parquet" else pyarrow.feather.write_feather
    write(table, source)
    answers = scored(source, tmp_path / "again.h5", mixed, keep=["cov", "dir.e2"])
    np.testing.assert_array_equal(answers.pop("cov"), rows["cov"])
    np.testing.assert_array_equal(answers.pop("dir.e2"), rows["dir"][:, 2])
    assert answers.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(answers[name], values)
