"""Files scored by a version: the same rows, with eager's answers, in every format."""

from __future__ import annotations

import fnmatch
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import uproot
from torch import Tensor, nn

import pipeline
from pipeline.applying.job import Piece, Plan, Scored
from pipeline.applying.origin_record import read_about
from pipeline.applying.outputs import Rows, write
from pipeline.applying.run import locally
from pipeline.applying.sources import ABOUT
from pipeline.errors import ApplyError, DataError
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.model.trees import load_trees
from tests.campaigns.apply import campaign
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.forked import in_a_child
from tests.models.mlps import CLASSES, FEATURES, PointwiseFirst
from tests.models.project import Built, answer, cli, described, refusal
from tests.models.scored import (
    SUFFIXES,
    arrow,
    columns,
    eager,
    read_rows,
    require_scored,
    write_parts,
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


def test_a_file_says_where_its_answers_are_from(tmp_path: Path, production: Registry) -> None:
    source, made = write_rows(tmp_path / "rows.npz", columns(20)), tmp_path / "made.npz"
    pipeline.apply(REF, source, made, registry=production)
    about = json.loads(cli("explain", made, "--json").stdout)
    assert (about["model"], about["version"], about["rows"]) == ("tagger", 1, 20)
    assert about["digest"] == production.find(REF).digest
    assert about["inputs"][0]["path"] == str(source)
    assert about["columns"] == {f"jets/{name}": name for name in FEATURES}
    assert cli("show", made).stdout == cli("explain", made).stdout
    assert json.loads(cli("show", made, "--json").stdout) == about
    assert "promoted by" in cli("show", made).stdout


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".root", ".h5", ".npz"])
def test_no_rows_are_no_rows(tmp_path: Path, production: Registry, suffix: str) -> None:
    source = write_rows(tmp_path / f"none{suffix}", columns(0))
    pipeline.apply(REF, source, tmp_path / "out", keep=["event"], registry=production)
    found = read_rows(tmp_path / "out" / source.name)
    assert {*found} == {"event", *CLASSES}
    assert all(len(each) == 0 for each in found.values())


@pytest.mark.parametrize("rows", [0, 50])
def test_empty_row_groups(tmp_path: Path, production: Registry, rows: int) -> None:
    """A skim leaves such groups if it writes the selected rows of each batch."""
    given = columns(rows)
    table = pa.table(arrow(given))
    source = tmp_path / "skim.parquet"
    with pq.ParquetWriter(source, table.schema) as file:
        for part in (table[:0], table, table[:0], table[:0]):
            file.write_table(part)
    pipeline.apply(REF, source, tmp_path / "out.npz", keep=["event"], registry=production)
    require_scored(tmp_path / "out.npz", given, ("event",))
    assert len(read_about(tmp_path / "out.npz").inputs) == 1


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
    assert [Path(each.path) for each in read_about(out).inputs] == files


def test_a_version_that_was_looked_up_before(tmp_path: Path, production: Registry) -> None:
    """With `prefer-cache` the second job needs neither the registry nor MLflow."""
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
    """As with NanoAOD and a tagger of jets: the answers are divided into the same events."""
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


NANO = {**{f"Jet_{name}": name for name in FEATURES[1:]}, "Jet_btag": "f", "Jet_a": "a"}


def nano(kind: str, path: Path, rows: int = 300) -> Path:
    """Writes events with the tagger's columns as `Jet_*`, and others, in this kind of file."""
    draw = np.random.default_rng(4)
    counts, muons = draw.integers(0, 5, rows), draw.integers(0, 3, rows)
    given = columns(int(counts.sum()))
    jets = {name: ak.unflatten(given[own], counts) for name, own in NANO.items()}
    flat = {"nJet": counts.astype("i4"), "met": columns(rows)["a"]}
    muon = {"Muon_pt": ak.unflatten(columns(int(muons.sum()))["b"], muons)}
    if kind == "tree":
        with uproot.recreate(path) as file:
            types = {n: ak.Array(v).type.content for n, v in {**flat, **jets, **muon}.items()}
            named = file.mktree("Events", types, counter_name=lambda name: f"n{name[:-3]}"
                                if name.startswith("Muon") else "nJet")  # fmt: skip
            named.extend({**flat, **jets, **muon})
    elif kind == "structs":
        records = ak.zip({name.removeprefix("Jet_"): each for name, each in jets.items()})
        table = {"met": flat["met"], "Jet": records, **muon}
        pq.write_table(pa.table(arrow(table)), path)
    else:
        names = [name for name in flat if kind == "lists and counts" or name != "nJet"]
        pq.write_table(pa.table(arrow({**{n: flat[n] for n in names}, **jets, **muon})), path)
    return path


@pytest.mark.parametrize(
    ("kind", "keep", "counters"),
    [
        ("tree", ["nJet", "Jet_*", "Muon_*", "met"], {"Jet": "nJet", "Muon": "nMuon", "": "nJet"}),
        ("lists and counts", ["Jet_btag", "Muon_pt"],
         {"Jet": "nJet", "Muon": "nMuon_pt", "": "nJet"}),
        ("lists", ["Jet_a", "Muon_pt"], {"Jet": "njets", "Muon": "nMuon_pt", "": "njets"}),
        ("structs", ["Jet.btag", "Jet.b"], {"Jet": "nJet", "": "nJet"}),
    ],
)  # fmt: skip
def test_a_tree_has_one_counter_for_columns_of_the_same_items(
    tmp_path: Path, production: Registry, kind: str, keep: list[str], counters: dict[str, str]
) -> None:
    """As in NanoAOD. "" stands for the answers, which have the items of the model's inputs."""
    source = nano(kind, tmp_path / ("rows.root" if kind == "tree" else "rows.parquet"))
    dot = "." if kind == "structs" else "_"
    pairs = {f"jets/{own}": f"Jet{dot}{name[4:]}" for name, own in NANO.items() if own != "f"}
    pairs["jets/f"] = f"Jet{dot}btag"
    out = tmp_path / "out.root"
    pipeline.apply(REF, source, out, columns=pairs, keep=keep, registry=production)
    with uproot.open(source if kind == "tree" else out) as before, uproot.open(out) as file:
        tree = file["Events"]
        kept = {name for word in keep for name in fnmatch.filter(read_rows(source), word)}
        if kind == "structs":
            kept = {*keep}
        assert {*tree.keys()} == kept | {*CLASSES} | {*counters.values()}
        for name in (*CLASSES, *kept):
            counter = tree[name].count_branch
            group = name.replace(".", "_").partition("_")[0] if name not in CLASSES else ""
            assert getattr(counter, "name", None) == counters.get(group), name
            if counter is not None:
                counts = ak.num(tree[name].array())
                assert counts.tolist() == tree[counter.name].array().tolist()
            if kind == "tree" and name in kept:
                assert tree[name].array().tolist() == before["Events"][name].array().tolist()


def test_names_that_do_not_say_what_the_rows_have(tmp_path: Path, production: Registry) -> None:
    """By its name `trk_hits` has `ntrk` items; in some rows, here early or late, it has not."""
    rows = columns(900)
    tracks = np.array([2, 0, 1] * 300, "i4")
    early, late = tracks[::-1], np.append(tracks[:600], tracks[600:][::-1])
    for name, hits in (("early", early), ("late", late)):
        jagged = {
            "trk_hits": ak.unflatten(rows["a"], hits),
            "trk_pt": ak.unflatten(rows["b"], tracks),
        }
        given = {**{n: rows[n] for n in FEATURES}, "ntrk": tracks, **jagged}
        source = write_rows(tmp_path / f"{name}.parquet", given)
        where = ("--out", tmp_path / f"{name}.root", "--keep", "*trk*")
        if name == "late":
            assert "'ntrk'" in refused(production, source, *where)
            assert files_in(tmp_path)[-2:] == [tmp_path / "early.root", tmp_path / "late.parquet"]
            continue
        answer("apply", REF, source, *where, registry=production)
        with uproot.open(tmp_path / "early.root") as file:
            tree = file["Events"]
            assert tree["trk_pt"].count_branch.name == "ntrk"
            assert tree["trk_hits"].count_branch.name == "ntrk_hits"
            for column in ("ntrk", *jagged):
                assert tree[column].array().tolist() == given[column].tolist()


def test_items_that_are_not_the_same(tmp_path: Path, production: Registry) -> None:
    """The total is the same, but not the number in each row."""
    given: dict[str, Any] = {
        name: ak.unflatten(columns(90)[name], [2, 1] * 30) for name in FEATURES
    }
    given["d"] = ak.unflatten(columns(90)["d"], [1, 2] * 30)
    source = write_rows(tmp_path / "rows.parquet", given)
    said = refused(production, source, "--out", tmp_path / "out")
    assert "'a' and 'd' differ in their items per row" in said


@pytest.fixture
def events(empty: Registry, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry with events/1, a model of whole events, in production."""
    promoted(empty, served.shared(tmp_path_factory, "events", served.of_jets(), served.JETS))
    return empty


@pytest.mark.parametrize("kind", ["lists.parquet", "structs.parquet", "rows.root", "rows.arrow"])
def test_whole_events(tmp_path: Path, events: Registry, kind: str) -> None:
    """More events and items than a run takes; some events have more items than the model reads."""
    draw = np.random.default_rng(5)
    counts = draw.integers(0, 9, 400)
    pt, mass = (ak.unflatten(draw.random(counts.sum(), np.float32), counts) for _ in range(2))
    event = draw.random(400, np.float32)
    flat: dict[str, Any] = {"events_pt": event, "run": np.arange(400)}
    jets = {"jets_pt": pt, "jets_mass": mass}
    if kind == "structs.parquet":
        jets = {"jets": ak.zip({"pt": pt, "mass": mass})}
    source = write_rows(tmp_path / kind, {**flat, **jets}, 130)
    out = tmp_path / "out.npz"
    pipeline.apply("events@production", source, out, keep=["run"], registry=events)
    found = read_rows(out)
    assert found["run"].tolist() == [*range(400)]
    np.testing.assert_allclose(found["ht"], ak.sum(pt[:, :4], axis=1) + event, rtol=1e-5)
    np.testing.assert_allclose(found["heavy"], ak.sum((pt * mass)[:, :4], axis=1), rtol=1e-5)


def test_one_column_is_not_two(tmp_path: Path, events: Registry) -> None:
    """`pt` of a file could be the jets' or the event's: the user has to choose."""
    jets = ak.unflatten(columns(40)["a"], [2] * 20)
    given = {"pt": jets, "jets_mass": jets, "met": columns(20)["b"]}
    source = write_rows(tmp_path / "rows.parquet", given)
    out = ("apply", "events@production", source, "--out", tmp_path / "out.npz")
    assert "would both be 'pt'" in refusal(*out, "--registry", events.uri)
    done = answer(*out, "--columns", "events/pt=met", registry=events)
    assert done["rows"] == 20


def test_fewer_rows_than_a_run_takes(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    least = mlp_signature(64, lowest=8)
    promoted(empty, served.shared(tmp_path_factory, "least", PointwiseFirst(1), least))
    for rows in (3, 64, 131):
        source = write_rows(tmp_path / f"{rows}.npz", columns(rows))
        out = tmp_path / f"out{rows}.npz"
        pipeline.apply("least@production", source, out, registry=empty)
        require_scored(out, columns(rows))


def test_files_of_other_types_do_not_become_one(tmp_path: Path, production: Registry) -> None:
    given = columns(50)
    one = write_rows(tmp_path / "1.npz", given)
    two = write_rows(tmp_path / "2.npz", {**given, "event": given["event"].astype("f8")})
    out = ("--keep", "event", "--out")
    for suffix in (".npz", ".parquet", ".root"):
        said = refused(production, one, two, *out, tmp_path / f"both{suffix}")
        assert "2.npz" in said and "int64" in said and "double" in said
        assert not [*tmp_path.glob("*both*")]
    answer("apply", REF, one, two, *out, tmp_path / "out", registry=production)
    require_scored(tmp_path / "out/2.npz", given, ("event",))


def test_parts_of_a_file_that_was_changed_have_other_names(
    tmp_path: Path, production: Registry, parts: list[Path]
) -> None:
    """The new job ignores files that a worker of the old job still writes."""

    def names() -> list[str]:
        seen: list[str] = []

        def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            seen.extend(piece.part for piece in pieces)
            raise Enough

        with pytest.raises(Enough):
            pipeline.apply(REF, parts, tmp_path / "o.npz", registry=production, execute=execute)
        return seen

    before = names()
    write_rows(parts[7], columns(100, seed=2))
    after = names()
    assert before[:7] == after[:7] and before[7] != after[7]


# -- a job that ends early ------------------------------------------------------------------------


class Enough(ApplyError):
    pass


def stopping(after: int) -> Any:
    """Scores this many pieces, and then fails."""

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        for i, done in enumerate(locally(1)(plan, pieces)):
            if i == after:
                raise Enough
            yield done

    return execute


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Eight files of a hundred rows."""
    return write_parts(tmp_path, 8)


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
    cut.write_bytes(cut.read_bytes()[:100])  # as after a power failure
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


def test_what_a_command_says_that_did_nothing(tmp_path: Path, production: Registry) -> None:
    source, out = write_rows(tmp_path / "rows.npz", columns(40)), tmp_path / "out"
    command = ("apply", REF, source, "--out", out, "--registry", production.uri)
    assert f"wrote {out / 'rows.npz'}" in cli(*command).stdout
    again = cli(*command).stdout
    assert "wrote" not in again and str(out / "rows.npz") in again
    done = json.loads(cli(*command, "--json").stdout)
    assert (done["outputs"], done["written"]) == ([str(out / "rows.npz")], [])


def test_progress_without_a_terminal(
    tmp_path: Path, production: Registry, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error gets a line from time to time, for batch systems; none in a short job."""
    command = ("apply", REF, *parts, "--registry", production.uri, "--threads", 1, "--out")
    assert cli(*command, tmp_path / "short").stderr == ""
    monkeypatch.setattr("pipeline.cli.applying.EVERY_S", 0)
    said = cli(*command, tmp_path / "long", "--json")
    assert said.stderr.splitlines() == [f"{done} of 800 rows" for done in range(0, 801, 100)]
    assert json.loads(said.stdout)["rows"] == 800


def test_a_job_of_another_mode_is_another_job(
    tmp_path: Path, production: Registry, parts: list[Path]
) -> None:
    """Test mode compares answers with the reference, so parts of the two must not be mixed."""
    out = tmp_path / "all.parquet"
    with pytest.raises(Enough):
        pipeline.apply(REF, parts, out, registry=production, mode="test", execute=stopping(3))
    with pytest.raises(ApplyError, match="the settings changed since"):
        pipeline.apply(REF, parts, out, registry=production)
    pipeline.apply(REF, parts, out, registry=production, mode="test")
    assert read_about(out).mode == "test"
    with pytest.raises(ApplyError, match="is there already"):
        pipeline.apply(REF, parts, out, registry=production)


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


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_stays(
    tmp_path: Path, production: Registry, parts: list[Path], links: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also without hard links, as on FAT and some network file systems."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no")))
    out = tmp_path / "all.parquet"

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        for done in locally(1)(plan, pieces):
            out.write_text("mine")
            yield done

    with pytest.raises(ApplyError, match="appeared while the job ran"):
        pipeline.apply(REF, parts, out, registry=production, execute=execute)
    assert out.read_text() == "mine"
    with pytest.raises(ApplyError, match="is there already"):
        pipeline.apply(REF, parts, out, registry=production)
    out.unlink()
    done = pipeline.apply(REF, parts, out, registry=production)
    assert done.found == done.rows == 800  # no row is scored again
    require_scored(out, columns(800))
    assert files_in(tmp_path) == sorted([*parts, out, tmp_path / "cwd"])


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, production: Registry) -> None:
    source = write_rows(tmp_path / "rows.npz", columns(40))
    (tmp_path / "out" / "rows.npz").mkdir(parents=True)
    assert "is a folder" in refused(production, source, "--out", tmp_path / "out", "--force")
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "rows.npz"]


# -- files of other programs ----------------------------------------------------------------------


def tell(path: Path, said: Any) -> Path:
    """Writes a file whose record of how it was made is `said`, in the place used by outputs."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({ABOUT: said}), path)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["a"] = [1]
            file.attrs[ABOUT] = said
    elif path.suffix == ".root":
        with uproot.recreate(path) as file:
            file["Events"] = {"a": np.arange(3)}
            file[ABOUT] = said
    else:
        np.savez(path, a=np.arange(3), **{ABOUT: said})
    return path


TEXTS = ["", "null", "[]", "7", '"x"', '{"job": "x"}', "{", "[" * 300, '{"job": {"a": []}}']
STRANGE: list[tuple[str, Any]] = [
    *((suffix, text) for suffix in (".parquet", ".h5", ".root", ".npz") for text in TEXTS),
    *((suffix, b"\xff\xfe{}") for suffix in (".parquet", ".h5")),
    *((".h5", each) for each in (7, 1.5, [1, 2], np.bytes_(b"{}"), np.array(["{}", "{}"], object))),
    *((".npz", np.array(each)) for each in (7, [1, 2], ["{}"], b"\xff")),
    (".npz", np.array({"job": "x"}, object)),
    (".root", np.histogram([1.0, 2.0])),
    (".root", {"x": np.arange(3)}),
]


@pytest.mark.parametrize(("suffix", "said"), STRANGE, ids=lambda each: str(each)[:20])
def test_records_that_we_did_not_write(tmp_path: Path, suffix: str, said: Any) -> None:
    path = tell(tmp_path / f"strange{suffix}", said)
    assert f"{path} does not say what made it" in refusal("explain", path)
    with pytest.raises(DataError):
        read_about(path)


def test_damaged_records(tmp_path: Path, production: Registry) -> None:
    """Each field is once missing and once of a wrong kind; the complete record is read."""
    source, made = write_rows(tmp_path / "rows.npz", columns(20)), tmp_path / "made.npz"
    pipeline.apply(REF, source, made, registry=production)
    with np.load(made) as arrays:
        said = json.loads(str(arrays[ABOUT]))
    copy = tell(tmp_path / "copy.npz", json.dumps(said))
    assert cli("explain", copy).stdout == cli("explain", made).stdout
    assert json.loads(cli("explain", copy, "--json").stdout) == said
    for name in said:
        fewer = {key: value for key, value in said.items() if key != name}
        for damaged in (fewer, {**said, name: [{"\x1b[31m": [None]}]}):
            path = tell(tmp_path / "damaged.npz", json.dumps(damaged))
            assert name in refusal("explain", path)


def test_a_job_onto_files_that_others_wrote(tmp_path: Path, production: Registry) -> None:
    given = columns(20)
    source = write_rows(tmp_path / "rows.npz", given)
    for suffix, said in ((".parquet", b"\xff"), (".h5", 7), (".npz", '{"job": "x"}')):
        out = tell(tmp_path / f"out{suffix}", said)
        before = out.read_bytes()
        assert "is there already: --force" in refused(production, source, "--out", out)
        assert out.read_bytes() == before
        answer("apply", REF, source, "--out", out, "--force", registry=production)
        require_scored(out, given)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.parquet")
    assert "not a plain file" in refusal("explain", tmp_path / "rows.parquet")


# -- what is refused ------------------------------------------------------------------------------


def refused(production: Registry, *given: object) -> str:
    return refusal("apply", REF, *given, "--registry", production.uri)


def files_in(folder: Path) -> list[Path]:
    """All files except those of the registry and the cache."""
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
        ((wider, "--out", out), "rows 0 to 256: column 'b' is float64, the layout says float32"),
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


def test_text_is_kept(tmp_path: Path, production: Registry) -> None:
    """From and to the formats that have text."""
    given = {name: columns(300)[name] for name in FEATURES}
    words = [f"é{i}" * (i % 3) for i in range(300)]
    with h5py.File(tmp_path / "text.h5", "w") as file:
        for name, each in {**given, "word": words}.items():
            file[name] = each
    np.savez(tmp_path / "text.npz", word=words, **given)
    pq.write_table(pa.table({**given, "word": words}), tmp_path / "text.parquet")
    with uproot.recreate(tmp_path / "text.root") as file:
        file["Events"] = {**given, "word": ak.Array(words)}
    kinds = (".h5", ".parquet", ".root")
    for source, suffix in (*zip(kinds, kinds, strict=True), (".npz", ".h5"), (".h5", ".root")):
        out = tmp_path / f"{source[1:]}{suffix}"
        pipeline.apply(REF, tmp_path / f"text{source}", out, keep=["word"], registry=production)
        found = read_rows(out)["word"].tolist()
        assert [each.decode() if suffix == ".h5" else each for each in found] == words
    refused(
        production, tmp_path / "text.h5", "--columns", "jets/a=word", "--out", tmp_path / "o.h5"
    )


def test_nulls_are_refused_and_nan_goes_through(tmp_path: Path, production: Registry) -> None:
    given = columns(20)
    table = {name: pa.array(given[name]) for name in FEATURES}
    pq.write_table(
        pa.table({**table, "a": pa.array([None] * 20, pa.float32())}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"a.parquet, rows 0 to 20: .*'a' has 20 nulls.*--fill a="):
        pipeline.apply(REF, tmp_path / "a.parquet", tmp_path / "out.npz", registry=production)
    items = ak.unflatten(given["a"], np.full(10, 2))
    lists: dict[str, Any] = {name: ak.to_arrow(items, extensionarray=False) for name in FEATURES}
    lists["b"] = pa.array([[1.0, 2.0]] * 9 + [[None, 1.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table(lists), tmp_path / "lists.parquet")
    with pytest.raises(DataError, match=r"lists.parquet, rows 0 to 10: .*has 1 nulls"):
        pipeline.apply(REF, tmp_path / "lists.parquet", tmp_path / "out.root", registry=production)
    given["a"][3] = np.nan
    source = write_rows(tmp_path / "nan.npz", given)
    pipeline.apply(REF, source, tmp_path / "nan.parquet", registry=production)
    assert np.isnan(np.asarray(read_rows(tmp_path / "nan.parquet")["x"])).tolist() == [
        i == 3 for i in range(20)
    ]


def test_nulls_take_the_value_of_fill(
    tmp_path: Path, production: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = columns(20)
    table = {name: pa.array(given[name]) for name in FEATURES}
    table["a"] = pa.array([None, *given["a"][1:]], pa.float32())
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table(table), file)
    given["a"][0] = 2.5
    for name in ("a", "jets/a"):
        out = tmp_path / f"{name.replace('/', '-')}.npz"
        pipeline.apply(REF, file, out, fill={name: 2.5}, registry=production)
        require_scored(out, given)
    monkeypatch.setenv("PIPELINE_REGISTRY", production.uri)
    cli("apply", REF, file, "--out", tmp_path / "c.npz", "--fill", "a=2.5")
    require_scored(tmp_path / "c.npz", given)
    for wrong in ("a", "=1", "a=b"):
        cli("apply", REF, file, "--out", tmp_path / "d.npz", "--fill", wrong, code=2)
    with pytest.raises(ApplyError, match=r"--fill A: the model reads .*did you mean 'a'\?"):
        pipeline.apply(REF, file, tmp_path / "no.npz", fill={"A": 0}, registry=production)
    lists: dict[str, Any] = {
        name: ak.to_arrow(ak.unflatten(given[name], np.full(10, 2)), extensionarray=False)
        for name in FEATURES
    }
    first = [None, given["a"][1]]
    lists["a"] = pa.array([first, *lists["a"].to_pylist()[1:]], pa.list_(pa.float32()))
    pq.write_table(pa.table(lists), file)
    pipeline.apply(REF, file, tmp_path / "lists.parquet", fill={"a": 2.5}, registry=production)
    found = read_rows(tmp_path / "lists.parquet")
    for i, name in enumerate(CLASSES):
        answers = np.concatenate(found[name].to_list())
        np.testing.assert_allclose(answers, eager(given)[:, i], atol=1e-5)


def test_nulls_among_the_items_of_a_jagged_model_take_the_value_of_fill(
    tmp_path: Path, lists: Built, empty_database: Path
) -> None:
    shutil.copy(empty_database, tmp_path / "registry.db")
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    version = registry.register(lists.bundle)
    counts = np.tile([2, 0, 3, 1], 10)
    events = {
        name: ak.unflatten(values, counts) for name, values in columns(int(counts.sum())).items()
    }
    items = events["a"].to_list()
    scores = {}
    for name, first in (("null", None), ("number", 2.5)):
        items[0][0] = first
        table = {n: ak.to_arrow(each, extensionarray=False) for n, each in events.items()}
        table["a"] = pa.array(items, pa.list_(pa.float32()))
        file, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.npz"
        pq.write_table(pa.table(table), file)
        pipeline.apply(version.ref, file, out, fill={"a": 2.5}, mode="test", registry=registry)
        answers = np.load(out)
        scores[name] = [answers[key].tolist() for key in CLASSES]
    assert scores["null"] == scores["number"]


def test_dictionaries_of_numbers_and_arrow_streams(tmp_path: Path, production: Registry) -> None:
    given = columns(700)
    for name in FEATURES:
        given[name] = given[name].round(1)
    coded = pa.table({name: pa.array(given[name]).dictionary_encode() for name in FEATURES})
    pyarrow.feather.write_feather(coded, tmp_path / "coded.feather")
    plain = pa.table({name: pa.array(given[name]) for name in FEATURES})
    for place, table in ((tmp_path / "stream.arrows", plain), (tmp_path / "coded.arrow", coded)):
        with pa.ipc.new_stream(place, table.schema) as stream:
            stream.write_table(table, max_chunksize=250)
    for source in ("coded.feather", "stream.arrows", "coded.arrow"):
        out = tmp_path / f"{source}.npz"
        pipeline.apply(REF, tmp_path / source, out, registry=production)
        require_scored(out, given)


def test_text_folders_and_patterns(tmp_path: Path, production: Registry) -> None:
    """The numbers of a text are read as the dtypes of the model."""
    folder = tmp_path / "runs"
    folder.mkdir()
    parts = [columns(30, seed) for seed in (1, 2, 3)]
    for i, part in enumerate(parts):
        flat = {name: part[name] for name in (*FEATURES, "event")}
        pd.DataFrame(flat).to_csv(folder / f"run{i}.csv", index=False)
    (folder / "notes.txt").write_text("no rows")
    whole = {name: np.concatenate([part[name] for part in parts]) for name in FEATURES}
    pattern = str(folder / "run*.csv")
    ways: list[tuple[Any, str]] = [(folder, "a.npz"), (pattern, "b.npz"), ([pattern], "c.npz")]
    for source, out in ways:
        pipeline.apply(REF, source, tmp_path / out, registry=production)
        require_scored(tmp_path / out, whole)
    report = pipeline.apply(REF, folder, tmp_path, keep=["event"], registry=production)
    assert report.outputs == tuple(str(tmp_path / f"run{i}.parquet") for i in range(3))
    assert read_rows(tmp_path / "run1.parquet")["event"].to_list() == [*range(30)]
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", str(folder / "no*.csv")):
        with pytest.raises(ApplyError):
            pipeline.apply(REF, wrong, tmp_path / "no.npz", registry=production)


@pytest.fixture
def gap(tmp_path: Path) -> Path:
    """Thirty rows as text. `a` has whole numbers, and nothing in the last row."""
    frame = pd.DataFrame({name: columns(30)[name] for name in FEATURES})
    frame["a"] = [*frame["a"][:29].round().astype(int).astype(str), ""]
    frame.to_csv(tmp_path / "gap.csv", index=False)
    return tmp_path / "gap.csv"


def test_text_without_commas_is_refused(tmp_path: Path, production: Registry, gap: Path) -> None:
    gap.write_text(gap.read_text().replace(",", ";"))
    with pytest.raises(DataError, match="commas"):
        pipeline.apply(REF, gap, tmp_path / "out.npz", registry=production)


def test_a_gap_in_text_is_a_null(tmp_path: Path, production: Registry, gap: Path) -> None:
    with pytest.raises(DataError, match=r"gap.csv, rows 0 to 30: 'a' has 1 nulls"):
        pipeline.apply(REF, gap, tmp_path / "out.npz", registry=production)


def test_whole_numbers_in_text_are_the_models_floats(
    tmp_path: Path, production: Registry, gap: Path
) -> None:
    given = columns(30)
    given["a"] = np.append(given["a"][:29].round(), np.float32(4))
    pipeline.apply(REF, gap, tmp_path / "out.npz", fill={"a": 4}, registry=production)
    require_scored(tmp_path / "out.npz", given)


def test_a_null_is_nan_for_trees(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pandas writes NaN as null, and boosted trees read NaN as a missing value."""
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
    """pandas writes vectors as lists. If one row's list is longer, the error names it."""
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
