"""Files scored by a version: rows out are rows in, equal to eager, in every format."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uproot
from torch import Tensor, nn

import pipeline
from pipeline.applying.outputs import Rows, write
from pipeline.applying.plan import Piece, Plan, Scored
from pipeline.applying.run import locally, read_about
from pipeline.errors import ApplyError, DataError
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.model.trees import load_trees
from tests.campaigns.apply import campaign
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.forked import in_a_child
from tests.models.mlps import CLASSES, FEATURES
from tests.models.project import answer, cli, described, refusal
from tests.models.scored import (
    SUFFIXES,
    arrow,
    columns,
    eager,
    read_rows,
    require_scored,
    write_rows,
)
from tests.models.versions import promoted

REF = "tagger@production"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_out_are_rows_in(tmp_path: Path, production: Registry, suffix: str) -> None:
    given = columns(1000)
    source = write_rows(tmp_path / f"rows{suffix}", given)
    out = tmp_path / "out"
    done = answer(
        "apply", REF, source, "--out", out, "--keep", "ev*", "--keep", "hit", registry=production
    )
    assert [Path(path).parent for path in done["outputs"]] == [out]
    assert (done["rows"], done["found"], done["spent"]["rows"]) == (1000, 0, 1000)
    made = out / source.name
    require_scored(made, given, ("event", "hit"))
    assert sorted(out.iterdir()) == [made]
    about = json.loads(cli("explain", made, "--json").stdout)
    assert (about["model"], about["version"], about["rows"]) == ("tagger", 1, 1000)
    assert about["digest"] == production.find(REF).digest
    assert about["inputs"][0]["path"] == str(source)
    assert about["columns"] == {f"jets/{name}": name for name in FEATURES}
    assert "promoted by" in cli("explain", made).stdout


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".root", ".h5", ".npz"])
def test_no_rows_are_no_rows(tmp_path: Path, production: Registry, suffix: str) -> None:
    source = write_rows(tmp_path / f"none{suffix}", columns(0))
    pipeline.apply(REF, source, tmp_path / "out", keep=["event"], registry=production)
    found = read_rows(tmp_path / "out" / source.name)
    assert {*found} == {"event", *CLASSES}
    assert all(len(each) == 0 for each in found.values())


@pytest.mark.parametrize("rows", [0, 50])
def test_empty_row_groups(tmp_path: Path, production: Registry, rows: int) -> None:
    """As a skim leaves them, which writes whatever passed of each batch."""
    given = columns(rows)
    table = pa.table(arrow(given))
    source = tmp_path / "skim.parquet"
    with pq.ParquetWriter(source, table.schema) as file:
        for part in (table[:0], table, table[:0], table[:0]):
            file.write_table(part)
    pipeline.apply(REF, source, tmp_path / "out.npz", keep=["event"], registry=production)
    require_scored(tmp_path / "out.npz", given, ("event",))
    assert len(read_about(tmp_path / "out.npz")["inputs"]) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".root", ".h5", ".npz"])
def test_many_files_become_one(tmp_path: Path, production: Registry, suffix: str) -> None:
    whole = columns(900)
    files = [
        write_rows(
            tmp_path / f"{i}{kind}", {n: v[300 * i : 300 * i + 300] for n, v in whole.items()}
        )
        for i, kind in enumerate((".parquet", ".root", ".npz"))
    ]
    out = tmp_path / f"all{suffix}"
    done = pipeline.apply(REF, files, out, keep=["event"], registry=production, threads=2)
    assert (done.outputs, done.rows) == ((str(out),), 900)
    require_scored(out, whole, ("event",))
    assert [Path(each["path"]) for each in read_about(out)["inputs"]] == files


def test_a_version_that_was_looked_up_before(tmp_path: Path, production: Registry) -> None:
    """With `prefer-cache` the registry need not be there again, nor MLflow be imported."""
    source = write_rows(tmp_path / "rows.npz", columns(20))
    database = Path(production.uri.removeprefix("sqlite:///"))
    cached = ("apply", REF, source, "--lookup", "prefer-cache", "--out")
    answer(*cached, tmp_path / "one.npz", registry=production)
    database.rename(tmp_path / "away.db")
    answer(*cached, tmp_path / "two.npz", registry=production)
    require_scored(tmp_path / "two.npz", columns(20))
    refused(production, source, "--out", tmp_path / "three.npz")


def test_columns_have_other_names_in_the_file(tmp_path: Path, production: Registry) -> None:
    given = columns(50)
    renamed = {f"Jet_{name}": given[name] for name in FEATURES}
    renamed["other"] = renamed.pop("Jet_a")
    source = write_rows(tmp_path / "rows.parquet", renamed)
    where = ("--columns", "jets/*=Jet_*", "--columns", "jets/a=other")
    answer("apply", REF, source, "--out", tmp_path / "out.npz", *where, registry=production)
    require_scored(tmp_path / "out.npz", given)
    nested = {f"jets_{name}": given[name] for name in FEATURES}
    source = write_rows(tmp_path / "named.h5", nested)
    pipeline.apply(REF, source, tmp_path / "named.npz", registry=production)
    require_scored(tmp_path / "named.npz", given)


@pytest.mark.parametrize("suffix", [".parquet", ".root", ".rntuple.root"])
def test_items_of_jagged_columns_are_rows(
    tmp_path: Path, production: Registry, suffix: str
) -> None:
    """As jets of NanoAOD for a tagger of jets: the answers are cut into the same events."""
    counts = np.random.default_rng(4).integers(0, 5, 400)
    given = columns(int(counts.sum()))
    events = {name: ak.unflatten(given[name], counts) for name in FEATURES}
    source = write_rows(tmp_path / f"events{suffix}", {**events, "met": columns(400)["a"]}, 90)
    pipeline.apply(REF, source, tmp_path / "out", keep=["met", "a"], registry=production)
    found = read_rows(tmp_path / "out" / source.name)
    for name, expected in zip(CLASSES, eager(given).T, strict=True):
        assert ak.num(found[name]).tolist() == counts.tolist()
        np.testing.assert_allclose(ak.flatten(found[name]), expected, atol=1e-5, rtol=1e-4)
    assert ak.flatten(found["a"]).tolist() == given["a"].tolist()
    assert found["met"].tolist() == columns(400)["a"].tolist()


# -- a job that ends early ------------------------------------------------------------------------


class Enough(ApplyError):
    pass


def stopping(after: int) -> Any:
    """Scores so many pieces, and then dies."""

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        for i, done in enumerate(locally(1)(plan, pieces)):
            if i == after:
                raise Enough
            yield done

    return execute


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Eight files of a hundred rows."""
    whole = columns(800)
    return [
        write_rows(
            tmp_path / f"{i}.parquet", {n: v[100 * i : 100 * i + 100] for n, v in whole.items()}
        )
        for i in range(8)
    ]


def test_a_job_goes_on_where_it_was(
    tmp_path: Path, production: Registry, parts: list[Path]
) -> None:
    out = tmp_path / "all.parquet"
    with pytest.raises(Enough):
        pipeline.apply(REF, parts, out, registry=production, execute=stopping(3))
    (folder,) = tmp_path.glob(".all*")
    assert not out.exists()
    cut, short, *_ = sorted(folder.glob("*.arrow"))
    assert "a part of a job" in refusal("explain", cut)
    cut.write_bytes(cut.read_bytes()[:100])  # as a machine leaves it that went down
    whole = pa.ipc.open_file(short).read_all()
    with pa.ipc.new_file(short, whole.schema) as file:
        file.write_table(whole[:7])
    (folder / "00000-000000000000.arrow.1234.partial").touch()
    seen: list[tuple[int, int]] = []
    done = pipeline.apply(
        REF, parts, out, registry=production, progress=lambda *rows: seen.append(rows)
    )
    assert 100 <= done.found < 800 and done.found + done.spent.rows == done.rows == 800
    assert seen[0] == (done.found, 800) and seen[-1] == (800, 800)
    require_scored(out, columns(800))
    assert not folder.exists()
    written = out.stat().st_mtime_ns
    again = pipeline.apply(REF, parts, out, registry=production)
    assert (again.found, again.spent.rows, out.stat().st_mtime_ns) == (800, 0, written)


def test_outputs_that_are_done_stay_done(
    tmp_path: Path, production: Registry, parts: list[Path]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Enough):
        pipeline.apply(REF, parts, out, registry=production, execute=stopping(5))
    there = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert there
    pipeline.apply(REF, parts, out, registry=production)
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert sorted(path.name for path in out.iterdir()) == [path.name for path in parts]
    for i, path in enumerate(sorted(out.iterdir())):
        require_scored(path, {n: v[100 * i : 100 * i + 100] for n, v in columns(800).items()})


@pytest.mark.parametrize("changed", ["version", "files", "settings"])
def test_a_job_does_not_go_on_as_another(
    tmp_path: Path, production: Registry, parts: list[Path], tagger: Bundle, changed: str
) -> None:
    out = tmp_path / "all.parquet"
    with pytest.raises(Enough):
        pipeline.apply(REF, parts, out, registry=production, execute=stopping(3))
    keep = []
    if changed == "version":
        promoted(production, described(tagger, tmp_path / "second", "another"))
    elif changed == "files":
        write_rows(parts[0], columns(100, seed=2))
    else:
        keep = ["event"]
    with pytest.raises(ApplyError, match=f"the {changed} changed since"):
        pipeline.apply(REF, parts, out, keep=keep, registry=production)
    assert not out.exists()


def test_a_file_that_changes_meanwhile_is_refused(
    tmp_path: Path, production: Registry, parts: list[Path]
) -> None:
    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        write_rows(parts[7], columns(100, seed=2))
        return locally(1)(plan, pieces)

    with pytest.raises(ApplyError, match="was changed since the job began"):
        pipeline.apply(REF, parts, tmp_path / "o.npz", registry=production, execute=execute)


def test_one_job_at_a_time(tmp_path: Path, production: Registry, parts: list[Path]) -> None:
    out = tmp_path / "all.parquet"

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        with pytest.raises(ApplyError, match="another job is writing there"):
            pipeline.apply(REF, parts, out, registry=production)
        return locally(1)(plan, pieces)

    pipeline.apply(REF, parts, out, registry=production, execute=execute)
    require_scored(out, columns(800))


# -- what is refused ------------------------------------------------------------------------------


def refused(production: Registry, *given: object) -> str:
    return refusal("apply", REF, *given, "--registry", production.uri)


def files_in(folder: Path) -> list[Path]:
    """But for the registry, and what a load keeps on this host."""
    return sorted(p for p in folder.rglob("*") if not {"cache", "store"} & {*p.parts})


def test_one_line_and_nothing_is_left(tmp_path: Path, production: Registry) -> None:
    given = columns(500)
    waves = write_rows(tmp_path / "waves.npz", {**given, "wave": np.zeros(500, "c8")})
    good = write_rows(tmp_path / "good.parquet", given)
    (tmp_path / "other").mkdir()
    same = write_rows(tmp_path / "other/good.parquet", given)
    fewer = write_rows(tmp_path / "fewer.npz", {n: given[n] for n in "abcde"})
    wider = write_rows(tmp_path / "wider.npz", {**given, "b": given["b"].astype("f8")})
    text = write_rows(tmp_path / "text.npz", {**given, "c": np.array(["x"] * 500)})
    mixed = ak.unflatten(given["a"], np.full(500, 1))
    jagged = write_rows(tmp_path / "jagged.parquet", {**given, "a": mixed})
    here = files_in(tmp_path)
    out = tmp_path / "out"
    for arguments, says in (
        (
            (fewer, "--out", out),
            "fewer.npz has no 'f'; it has a, b, c, d, e: say which column it is",
        ),
        ((good, fewer, "--out", out), "fewer.npz has no 'f'"),
        ((wider, "--out", out), "column 'b' is float64, the layout says float32"),
        ((text, "--out", out), "column 'c' is"),
        ((jagged, "--out", out), "'a' is jagged, 'b' is not"),
        ((good, "--out", out, "--keep", "label"), "has no 'label'"),
        ((good, "--out", out, "--keep", "lab*"), "no column fits it"),
        ((good, "--out", out, "--columns", "jets/g=a"), "--columns jets/g: the model reads"),
        ((good, "--out", out, "--columns", "jets/a=g"), "has no 'g'"),
        ((good, same, "--out", out), "two files would become"),
        ((good, good, "--out", out), "is named twice"),
        ((waves, "--out", out, "--keep", "wave"), "Arrow has no complex64"),
        ((good, "--out", tmp_path), "would replace what is read"),
        ((good, "--out", tmp_path / "other/..", "--force"), "would replace what is read"),
        ((good, "--out", tmp_path / "out.csv"), "a folder, or a file with one of .root, .parquet"),
        ((good, "--out", good / "out"), "Not a directory"),
        ((tmp_path / "none.root", "--out", out), "none.root cannot be read: No such file"),
        ((tmp_path, "--out", out), "files that are read are .root, .parquet"),
    ):
        assert says in refused(production, *arguments), arguments
        assert files_in(tmp_path) == here, arguments
    assert "good.parquet does not say what made it" in refusal("explain", good)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_off_in_the_middle(tmp_path: Path, production: Registry, suffix: str) -> None:
    source = write_rows(tmp_path / f"rows{suffix}", columns(1000))
    source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    assert str(source) in refused(production, source, "--out", tmp_path / "out")
    assert files_in(tmp_path) == sorted([source, tmp_path / "cwd"])


def test_outputs_that_are_there_stay(tmp_path: Path, production: Registry) -> None:
    given = columns(40)
    source = write_rows(tmp_path / "rows.npz", given)
    (tmp_path / "out").mkdir()
    made = tmp_path / "out" / "rows.npz"
    made.write_text("mine")
    assert "is there already: --force" in refused(production, source, "--out", tmp_path / "out")
    assert made.read_text() == "mine"
    answer("apply", REF, source, "--out", tmp_path / "out", "--force", registry=production)
    require_scored(made, given)


def test_a_root_file_without_room_for_its_head_is_closed(tmp_path: Path) -> None:
    table = pa.table({"a": [1.0]})
    rows = Rows(table.schema, 1, lambda: [table], lambda: "")

    def begin() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
        try:
            write(tmp_path / "out.root", rows, tmp_path)
        except OSError as error:
            handles = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
            held = [at for at in map(os.readlink, handles) if "out.root" in at]
            raise ApplyError(f"{error.strerror}, {held}") from error

    assert in_a_child(begin) == "ApplyError: File too large, []"
    assert not [*tmp_path.glob("out.root*")]


def test_jagged_answers_have_no_place_in_arrays(tmp_path: Path, production: Registry) -> None:
    given = columns(90)
    events = {name: ak.unflatten(given[name], np.full(30, 3)) for name in FEATURES}
    source = write_rows(tmp_path / "events.parquet", events)
    for suffix in ("h5", "npz"):
        with pytest.raises(DataError, match="is jagged: write Parquet, Arrow or ROOT"):
            pipeline.apply(REF, source, tmp_path / f"out.{suffix}", registry=production)


def test_nulls_are_refused_and_nan_goes_through(tmp_path: Path, production: Registry) -> None:
    given = columns(20)
    table = {name: pa.array(given[name]) for name in FEATURES}
    pq.write_table(
        pa.table({**table, "a": pa.array([None] * 20, pa.float32())}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match="'a' has 20 missing values"):
        pipeline.apply(REF, tmp_path / "a.parquet", tmp_path / "out.npz", registry=production)
    given["a"][3] = np.nan
    source = write_rows(tmp_path / "nan.npz", given)
    pipeline.apply(REF, source, tmp_path / "nan.parquet", registry=production)
    assert np.isnan(np.asarray(read_rows(tmp_path / "nan.parquet")["x"])).tolist() == [
        i == 3 for i in range(20)
    ]


def test_a_null_is_nan_for_trees(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pandas writes NaN as null, and boosted trees take NaN for a missing value."""
    xgboost = pytest.importorskip("xgboost")
    given = {name: columns(300)[name] for name in FEATURES}
    given["b"][::5] = np.nan
    rows = np.stack([*given.values()], axis=1)
    table = xgboost.DMatrix(rows, np.nan_to_num(rows).sum(1) > 0, feature_names=[*FEATURES])
    booster = xgboost.train({"objective": "binary:logistic", "max_depth": 3}, table, 5)
    booster.save_model(tmp_path / "trees.json")
    signature = Signature.build(
        {"jets": mlp_signature().layouts["jets"], "tags": Layout([column("p", "float32")])},
        [Block("features", "jets", FEATURES)],
        [Block("p", "tags", ("p",))],
        {"n": RowRange(0, 64)},
    )
    model = load_trees(tmp_path / "trees.json")
    said = {"model": {"trees": "trees.json"}}
    promoted(empty, served.shared(tmp_path_factory, "trees", model, signature, said))
    pd.DataFrame(given).to_parquet(tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["b"].null_count == 60
    out = tmp_path / "out.npz"
    pipeline.apply("trees@production", tmp_path / "rows.parquet", out, registry=empty)
    np.testing.assert_allclose(read_rows(out)["p"], booster.predict(table), atol=1e-6)


class Lengths(nn.Module):
    def forward(self, hits: Tensor, pt: Tensor) -> Tensor:
        return (hits * hits).sum(1, keepdim=True) + pt


def test_lists_of_one_length_are_a_models_vectors(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As pandas writes them; a row of another length is named, and no part of an output is left."""
    signature = Signature.build(
        {
            "jets": Layout([eigen("hits", "float32", 3), column("pt", "float32")]),
            "tags": Layout([column("y", "float32")]),
        },
        [Block("hits", "jets", ("hits",)), Block("pt", "jets", ("pt",))],
        [Block("y", "tags", ("y",))],
        {"n": RowRange(0, 64)},
    )
    promoted(empty, served.shared(tmp_path_factory, "lengths", Lengths(), signature))
    draw = np.random.default_rng(1)
    hits, pt = draw.normal(size=(300, 3)).astype("f4"), draw.normal(size=300).astype("f4")
    expected = (hits * hits).sum(1) + pt
    pd.DataFrame({"hits": [*hits], "pt": pt}).to_parquet(tmp_path / "rows.parquet")
    with uproot.recreate(tmp_path / "rows.root") as file:
        file.mkrntuple("Events", {"hits": ak.from_regular(ak.Array(hits)), "pt": pt})
    for name in ("rows.parquet", "rows.root"):
        pipeline.apply("lengths@production", tmp_path / name, tmp_path / "out", registry=empty)
        found = np.asarray(read_rows(tmp_path / "out" / name)["y"])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    other = pd.DataFrame({"hits": [*hits[:299], hits[0, :2]], "pt": pt})
    other.to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet.*'hits' is jagged .*2 to 3 items"):
        pipeline.apply(
            "lengths@production", tmp_path / "other.parquet", tmp_path / "other.npz", registry=empty
        )


@pytest.mark.long
def test_killed_and_started_again(tmp_path: Path) -> None:
    said = campaign(tmp_path / "job", rows=600_000, files=3, kills=2, seed=5)
    assert "600,000 rows of 3 files" in said
