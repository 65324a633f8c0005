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
from typing import Any, NoReturn

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
from pipeline.applying.run import make_thread_executor
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
    rows = columns(1000)
    source = write_rows(tmp_path / f"rows{suffix}", rows)
    out = tmp_path / "out"
    report = answer(
        "apply", REF, source, "--out", out, "--keep", "ev*", "--keep", "hit", registry=production
    )
    assert [Path(path).parent for path in report["outputs"]] == [out]
    assert (report["rows"], report["found"], report["spent"]["rows"]) == (1000, 0, 1000)
    scored = out / source.name
    require_scored(scored, rows, ("event", "hit"))
    assert sorted(out.iterdir()) == [scored]


@pytest.fixture
def scored(tmp_path: Path, production: Registry) -> Path:
    """The answers for twenty rows of `rows.npz`."""
    source, out = write_rows(tmp_path / "rows.npz", columns(20)), tmp_path / "scored.npz"
    pipeline.apply(REF, source, out, registry=production)
    return out


def test_a_file_says_where_its_answers_are_from(
    tmp_path: Path, production: Registry, scored: Path
) -> None:
    about = json.loads(cli("explain", scored, "--json").stdout)
    assert (about["model"], about["version"], about["rows"]) == ("tagger", 1, 20)
    assert about["digest"] == production.find(REF).digest
    assert about["inputs"][0]["path"] == str(tmp_path / "rows.npz")
    assert about["columns"] == {f"jets/{name}": name for name in FEATURES}


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_show_explains_a_file_of_answers(scored: Path, options: tuple[str, ...]) -> None:
    assert cli("show", scored, *options).stdout == cli("explain", scored, *options).stdout


def test_an_explanation_names_who_promoted_the_version(scored: Path) -> None:
    assert "promoted by" in cli("explain", scored).stdout


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".root", ".h5", ".npz"])
def test_a_file_without_rows_gives_columns_without_rows(
    tmp_path: Path, production: Registry, suffix: str
) -> None:
    source = write_rows(tmp_path / f"none{suffix}", columns(0))
    pipeline.apply(REF, source, tmp_path / "out", keep=["event"], registry=production)
    answers = read_rows(tmp_path / "out" / source.name)
    assert {*answers} == {"event", *CLASSES}
    assert all(len(values) == 0 for values in answers.values())


@pytest.mark.parametrize("rows", [0, 50])
def test_empty_row_groups_add_no_rows(tmp_path: Path, production: Registry, rows: int) -> None:
    """A skim leaves such groups if it writes the selected rows of each batch."""
    values = columns(rows)
    table = pa.table(arrow(values))
    source = tmp_path / "skim.parquet"
    with pq.ParquetWriter(source, table.schema) as file:
        for row_group in (table[:0], table, table[:0], table[:0]):
            file.write_table(row_group)
    pipeline.apply(REF, source, tmp_path / "out.npz", keep=["event"], registry=production)
    require_scored(tmp_path / "out.npz", values, ("event",))
    assert len(read_about(tmp_path / "out.npz").inputs) == 1


def part_of(rows: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some of the rows, from `start` to before `stop`."""
    return {name: values[start:stop] for name, values in rows.items()}


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".root", ".h5", ".npz"])
def test_many_files_become_one(tmp_path: Path, production: Registry, suffix: str) -> None:
    """The files are of different formats."""
    rows = columns(900)
    files = [
        write_rows(tmp_path / f"{i}{kind}", part_of(rows, 300 * i, 300 * i + 300))
        for i, kind in enumerate((".parquet", ".root", ".npz"))
    ]
    out = tmp_path / f"all{suffix}"
    report = pipeline.apply(REF, files, out, keep=["event"], registry=production, threads=2)
    assert (report.outputs, report.rows) == ((str(out),), 900)
    require_scored(out, rows, ("event",))
    assert [Path(source.path) for source in read_about(out).inputs] == files


def test_a_cached_lookup_needs_no_registry(tmp_path: Path, production: Registry) -> None:
    """Without `--lookup prefer-cache`, the same job is refused when the registry is away."""
    source = write_rows(tmp_path / "rows.npz", columns(20))
    database = Path(production.uri.removeprefix("sqlite:///"))
    cached = ("apply", REF, source, "--lookup", "prefer-cache", "--out")
    answer(*cached, tmp_path / "one.npz", registry=production)
    database.rename(tmp_path / "away.db")
    answer(*cached, tmp_path / "two.npz", registry=production)
    require_scored(tmp_path / "two.npz", columns(20))
    refused(production, source, "--out", tmp_path / "three.npz")


def test_options_say_which_column_of_the_file_is_meant(
    tmp_path: Path, production: Registry
) -> None:
    """A pattern for all columns, and another name for one of them."""
    rows = columns(50)
    renamed = {f"Jet_{name}": rows[name] for name in FEATURES}
    renamed["other"] = renamed.pop("Jet_a")
    source = write_rows(tmp_path / "rows.parquet", renamed)
    where = ("--columns", "jets/*=Jet_*", "--columns", "jets/a=other")
    answer("apply", REF, source, "--out", tmp_path / "out.npz", *where, registry=production)
    require_scored(tmp_path / "out.npz", rows)


def test_columns_named_after_their_collection_are_found(
    tmp_path: Path, production: Registry
) -> None:
    rows = columns(50)
    source = write_rows(tmp_path / "named.h5", {f"jets_{name}": rows[name] for name in FEATURES})
    pipeline.apply(REF, source, tmp_path / "named.npz", registry=production)
    require_scored(tmp_path / "named.npz", rows)


@pytest.mark.parametrize("suffix", [".parquet", ".root", ".rntuple.root"])
def test_items_of_jagged_columns_are_rows(
    tmp_path: Path, production: Registry, suffix: str
) -> None:
    """As with NanoAOD and a tagger of jets: the answers are divided into the same events."""
    counts = np.random.default_rng(4).integers(0, 5, 400)
    items = columns(int(counts.sum()))
    events = {name: ak.unflatten(items[name], counts) for name in FEATURES}
    source = write_rows(tmp_path / f"events{suffix}", {**events, "met": columns(400)["a"]}, 90)
    pipeline.apply(REF, source, tmp_path / "out", keep=["met", "a"], registry=production)
    answers = read_rows(tmp_path / "out" / source.name)
    for name, expected in zip(CLASSES, eager(items).T, strict=True):
        assert ak.num(answers[name]).tolist() == counts.tolist()
        np.testing.assert_allclose(ak.flatten(answers[name]), expected, atol=1e-5, rtol=1e-4)
    assert ak.flatten(answers["a"]).tolist() == items["a"].tolist()
    assert answers["met"].tolist() == columns(400)["a"].tolist()


NANO = {**{f"Jet_{name}": name for name in FEATURES[1:]}, "Jet_btag": "f", "Jet_a": "a"}


def write_nano(kind: str, path: Path, rows: int = 300) -> Path:
    """Writes events with the tagger's columns as `Jet_*`, and others, in this kind of file."""
    draw = np.random.default_rng(4)
    jet_counts, muon_counts = draw.integers(0, 5, rows), draw.integers(0, 3, rows)
    items = columns(int(jet_counts.sum()))
    jets = {name: ak.unflatten(items[own], jet_counts) for name, own in NANO.items()}
    flat = {"nJet": jet_counts.astype("i4"), "met": columns(rows)["a"]}
    muons = {"Muon_pt": ak.unflatten(columns(int(muon_counts.sum()))["b"], muon_counts)}
    if kind == "tree":
        events = {**flat, **jets, **muons}
        with uproot.recreate(path) as file:
            types = {name: ak.Array(values).type.content for name, values in events.items()}
            file.mktree("Events", types, counter_name=counter_of).extend(events)
    elif kind == "structs":
        records = ak.zip({name.removeprefix("Jet_"): values for name, values in jets.items()})
        pq.write_table(pa.table(arrow({"met": flat["met"], "Jet": records, **muons})), path)
    else:
        if kind == "lists":
            del flat["nJet"]
        pq.write_table(pa.table(arrow({**flat, **jets, **muons})), path)
    return path


def counter_of(column: str) -> str:
    """The branch with the number of items: `nMuon` for `Muon_pt`."""
    return "nMuon" if column.startswith("Muon") else "nJet"


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
    source = write_nano(kind, tmp_path / ("rows.root" if kind == "tree" else "rows.parquet"))
    dot = "." if kind == "structs" else "_"
    pairs = {f"jets/{own}": f"Jet{dot}{name[4:]}" for name, own in NANO.items() if own != "f"}
    pairs["jets/f"] = f"Jet{dot}btag"
    out = tmp_path / "out.root"
    pipeline.apply(REF, source, out, columns=pairs, keep=keep, registry=production)
    with uproot.open(source if kind == "tree" else out) as before, uproot.open(out) as file:
        tree = file["Events"]
        kept = {*keep}
        if kind != "structs":
            kept = {name for word in keep for name in fnmatch.filter(read_rows(source), word)}
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


TRACKS = np.array([2, 0, 1] * 300, "i4")


def write_tracks(path: Path, hits: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Writes rows with `ntrk`, as many items of `trk_pt`, and these numbers of `trk_hits`."""
    rows = columns(900)
    jagged = {"trk_hits": ak.unflatten(rows["a"], hits), "trk_pt": ak.unflatten(rows["b"], TRACKS)}
    written = {**{name: rows[name] for name in FEATURES}, "ntrk": TRACKS, **jagged}
    write_rows(path, written)
    return written


def test_names_that_do_not_say_what_the_rows_have(tmp_path: Path, production: Registry) -> None:
    """By its name `trk_hits` has `ntrk` items. The first rows have not: it gets its own counter."""
    source, out = tmp_path / "early.parquet", tmp_path / "early.root"
    rows = write_tracks(source, TRACKS[::-1])
    answer("apply", REF, source, "--out", out, "--keep", "*trk*", registry=production)
    with uproot.open(out) as file:
        tree = file["Events"]
        assert tree["trk_pt"].count_branch.name == "ntrk"
        assert tree["trk_hits"].count_branch.name == "ntrk_hits"
        for column in ("ntrk", "trk_hits", "trk_pt"):
            assert tree[column].array().tolist() == rows[column].tolist()


def test_rows_that_differ_from_the_counter_already_written_are_refused(
    tmp_path: Path, production: Registry
) -> None:
    """By its name `trk_hits` has `ntrk` items. Only the last rows have not."""
    source = tmp_path / "late.parquet"
    write_tracks(source, np.append(TRACKS[:600], TRACKS[600:][::-1]))
    before = files_in(tmp_path)
    assert "'ntrk'" in refused(
        production, source, "--out", tmp_path / "late.root", "--keep", "*trk*"
    )
    assert files_in(tmp_path) == before


def test_items_that_are_not_the_same(tmp_path: Path, production: Registry) -> None:
    """The total is the same, but not the number in each row."""
    rows: dict[str, Any] = {name: ak.unflatten(columns(90)[name], [2, 1] * 30) for name in FEATURES}
    rows["d"] = ak.unflatten(columns(90)["d"], [1, 2] * 30)
    source = write_rows(tmp_path / "rows.parquet", rows)
    message = refused(production, source, "--out", tmp_path / "out")
    assert "'a' and 'd' differ in their items per row" in message


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
    answers = read_rows(out)
    assert answers["run"].tolist() == [*range(400)]
    np.testing.assert_allclose(answers["ht"], ak.sum(pt[:, :4], axis=1) + event, rtol=1e-5)
    np.testing.assert_allclose(answers["heavy"], ak.sum((pt * mass)[:, :4], axis=1), rtol=1e-5)


def test_one_column_is_not_two(tmp_path: Path, events: Registry) -> None:
    """`pt` of a file could be the jets' or the event's: the user has to choose."""
    jets = ak.unflatten(columns(40)["a"], [2] * 20)
    rows = {"pt": jets, "jets_mass": jets, "met": columns(20)["b"]}
    source = write_rows(tmp_path / "rows.parquet", rows)
    command = ("apply", "events@production", source, "--out", tmp_path / "out.npz")
    assert "would both be 'pt'" in refusal(*command, "--registry", events.uri)
    report = answer(*command, "--columns", "events/pt=met", registry=events)
    assert report["rows"] == 20


LEAST, MOST = 8, 64


@pytest.mark.parametrize("rows", [LEAST - 5, MOST, 2 * MOST + 3])
def test_fewer_rows_than_a_run_takes(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory, rows: int
) -> None:
    """In the whole file, never, and in the last batch."""
    signature = mlp_signature(MOST, lowest=LEAST)
    promoted(empty, served.shared(tmp_path_factory, "least", PointwiseFirst(1), signature))
    source, out = write_rows(tmp_path / "rows.npz", columns(rows)), tmp_path / "out.npz"
    pipeline.apply("least@production", source, out, registry=empty)
    require_scored(out, columns(rows))


@pytest.fixture
def unlike(tmp_path: Path) -> list[Path]:
    """Two files; `event` is a whole number in the first, a float in the second."""
    rows = columns(50)
    return [
        write_rows(tmp_path / "1.npz", rows),
        write_rows(tmp_path / "2.npz", {**rows, "event": rows["event"].astype("f8")}),
    ]


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".root"])
def test_files_of_other_types_do_not_become_one(
    tmp_path: Path, production: Registry, unlike: list[Path], suffix: str
) -> None:
    message = refused(production, *unlike, "--keep", "event", "--out", tmp_path / f"both{suffix}")
    assert "2.npz" in message and "int64" in message and "double" in message
    assert not [*tmp_path.glob("*both*")]


def test_files_of_other_types_become_one_each(
    tmp_path: Path, production: Registry, unlike: list[Path]
) -> None:
    out = tmp_path / "out"
    answer("apply", REF, *unlike, "--keep", "event", "--out", out, registry=production)
    require_scored(out / "2.npz", columns(50), ("event",))


def test_parts_of_a_file_that_was_changed_have_other_names(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    """The new job ignores files that a worker of the old job still writes."""

    def names_of_parts() -> list[str]:
        names: list[str] = []

        def note_names(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
            names.extend(piece.part for piece in pieces)
            raise StoppedError

        with pytest.raises(StoppedError):
            pipeline.apply(
                REF, eight_files, tmp_path / "o.npz", registry=production, execute=note_names
            )
        return names

    before = names_of_parts()
    write_rows(eight_files[7], columns(100, seed=2))
    after = names_of_parts()
    assert before[:7] == after[:7] and before[7] != after[7]


# -- a job that ends early ------------------------------------------------------------------------


class StoppedError(ApplyError):
    """Ends a job where a test wants it to end."""


def stopping(after: int) -> Any:
    """An `execute` that scores this many pieces, and then raises."""

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        for i, scored_piece in enumerate(make_thread_executor(1)(plan, pieces)):
            if i == after:
                raise StoppedError
            yield scored_piece

    return execute


@pytest.fixture
def eight_files(tmp_path: Path) -> list[Path]:
    """Eight files of a hundred rows."""
    return write_parts(tmp_path, 8)


def test_a_job_goes_on_where_it_was(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    """Parts that are cut off or too short are scored again; others stay."""
    out = tmp_path / "all.parquet"
    with pytest.raises(StoppedError):
        pipeline.apply(REF, eight_files, out, registry=production, execute=stopping(3))
    (folder,) = tmp_path.glob(".all*")
    assert not out.exists()
    cut, short, *_ = sorted(folder.glob("*.arrow"))
    cut.write_bytes(cut.read_bytes()[:100])  # as after a power failure
    whole = pa.ipc.open_file(short).read_all()
    with pa.ipc.new_file(short, whole.schema) as file:
        file.write_table(whole[:7])
    (folder / "00000-000000000000.arrow.1234.partial").touch()
    progress: list[tuple[int, int]] = []
    report = pipeline.apply(
        REF, eight_files, out, registry=production, progress=lambda *rows: progress.append(rows)
    )
    assert 100 <= report.found < 800 and report.found + report.spent.rows == report.rows == 800
    assert progress[0] == (report.found, 800) and progress[-1] == (800, 800)
    require_scored(out, columns(800))
    assert not folder.exists()


def test_a_part_of_a_job_is_not_explained(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    with pytest.raises(StoppedError):
        pipeline.apply(
            REF, eight_files, tmp_path / "all.npz", registry=production, execute=stopping(1)
        )
    part, *_ = tmp_path.glob(".all*/*.arrow")
    assert "a part of a job" in refusal("explain", part)


def test_a_job_that_is_done_writes_nothing_again(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    out = tmp_path / "all.parquet"
    pipeline.apply(REF, eight_files, out, registry=production)
    written = out.stat().st_mtime_ns
    again = pipeline.apply(REF, eight_files, out, registry=production)
    assert (again.found, again.spent.rows, out.stat().st_mtime_ns) == (800, 0, written)


def test_outputs_that_are_done_stay_done(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        pipeline.apply(REF, eight_files, out, registry=production, execute=stopping(5))
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert times
    pipeline.apply(REF, eight_files, out, registry=production)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert sorted(path.name for path in out.iterdir()) == [path.name for path in eight_files]
    for i, path in enumerate(sorted(out.iterdir())):
        require_scored(path, part_of(columns(800), 100 * i, 100 * i + 100))


def test_a_command_that_did_nothing_names_the_output_as_not_written(
    tmp_path: Path, production: Registry
) -> None:
    source, out = write_rows(tmp_path / "rows.npz", columns(40)), tmp_path / "out"
    command = ("apply", REF, source, "--out", out, "--registry", production.uri)
    assert f"wrote {out / 'rows.npz'}" in cli(*command).stdout
    again = cli(*command).stdout
    assert "wrote" not in again and str(out / "rows.npz") in again
    report = json.loads(cli(*command, "--json").stdout)
    assert (report["outputs"], report["written"]) == ([str(out / "rows.npz")], [])


def test_a_short_job_without_a_terminal_has_no_progress(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    command = ("apply", REF, *eight_files, "--registry", production.uri, "--out", tmp_path / "out")
    assert cli(*command).stderr == ""


def test_a_long_job_without_a_terminal_has_lines_of_progress(
    tmp_path: Path, production: Registry, eight_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for batch systems, and not part of the answer."""
    monkeypatch.setattr("pipeline.cli.applying.EVERY_S", 0)
    command = ("apply", REF, *eight_files, "--registry", production.uri, "--threads", 1)
    result = cli(*command, "--out", tmp_path / "out", "--json")
    assert result.stderr.splitlines() == [f"{done} of 800 rows" for done in range(0, 801, 100)]
    assert json.loads(result.stdout)["rows"] == 800


def test_a_job_of_another_mode_is_another_job(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    """Test mode compares answers with the reference, so parts of the two must not be mixed."""
    out = tmp_path / "all.parquet"
    with pytest.raises(StoppedError):
        pipeline.apply(REF, eight_files, out, registry=production, mode="test", execute=stopping(3))
    with pytest.raises(ApplyError, match="the settings changed since"):
        pipeline.apply(REF, eight_files, out, registry=production)
    pipeline.apply(REF, eight_files, out, registry=production, mode="test")
    assert read_about(out).mode == "test"
    with pytest.raises(ApplyError, match="is there already"):
        pipeline.apply(REF, eight_files, out, registry=production)


@pytest.mark.parametrize("changed", ["version", "files", "settings"])
def test_a_job_does_not_go_on_as_another(
    tmp_path: Path, production: Registry, eight_files: list[Path], tagger: Bundle, changed: str
) -> None:
    out = tmp_path / "all.parquet"
    with pytest.raises(StoppedError):
        pipeline.apply(REF, eight_files, out, registry=production, execute=stopping(3))
    keep = []
    if changed == "version":
        promoted(production, described(tagger, tmp_path / "second", "another"))
    elif changed == "files":
        write_rows(eight_files[0], columns(100, seed=2))
    else:
        keep = ["event"]
    with pytest.raises(ApplyError, match=f"the {changed} changed since"):
        pipeline.apply(REF, eight_files, out, keep=keep, registry=production)
    assert not out.exists()


def test_a_file_that_changes_meanwhile_is_refused(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    def change_then_score(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        write_rows(eight_files[7], columns(100, seed=2))
        return make_thread_executor(1)(plan, pieces)

    out = tmp_path / "o.npz"
    with pytest.raises(ApplyError, match="was changed since the job began"):
        pipeline.apply(REF, eight_files, out, registry=production, execute=change_then_score)


def test_a_second_job_on_the_same_output_is_refused(
    tmp_path: Path, production: Registry, eight_files: list[Path]
) -> None:
    out = tmp_path / "all.parquet"

    def start_another(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        with pytest.raises(ApplyError, match="another job is writing there"):
            pipeline.apply(REF, eight_files, out, registry=production)
        return make_thread_executor(1)(plan, pieces)

    pipeline.apply(REF, eight_files, out, registry=production, execute=start_another)
    require_scored(out, columns(800))


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_stays(
    tmp_path: Path, production: Registry, eight_files: list[Path], links: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also without hard links, as on FAT and some network file systems."""

    def no_links(*_: object) -> NoReturn:
        raise PermissionError(1, "no")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    out = tmp_path / "all.parquet"

    def write_the_output(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        for scored_piece in make_thread_executor(1)(plan, pieces):
            out.write_text("mine")
            yield scored_piece

    with pytest.raises(ApplyError, match="appeared while the job ran"):
        pipeline.apply(REF, eight_files, out, registry=production, execute=write_the_output)
    assert out.read_text() == "mine"
    with pytest.raises(ApplyError, match="is there already"):
        pipeline.apply(REF, eight_files, out, registry=production)
    out.unlink()
    report = pipeline.apply(REF, eight_files, out, registry=production)
    assert report.found == report.rows == 800  # no row is scored again
    require_scored(out, columns(800))
    assert files_in(tmp_path) == sorted([*eight_files, out, tmp_path / "cwd"])


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, production: Registry) -> None:
    source = write_rows(tmp_path / "rows.npz", columns(40))
    (tmp_path / "out" / "rows.npz").mkdir(parents=True)
    assert "is a folder" in refused(production, source, "--out", tmp_path / "out", "--force")
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "rows.npz"]


# -- files of other programs ----------------------------------------------------------------------


def write_with_record(path: Path, record: Any) -> Path:
    """Writes a file with this in the place where outputs have the record of how they were made."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({ABOUT: record}), path)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["a"] = [1]
            file.attrs[ABOUT] = record
    elif path.suffix == ".root":
        with uproot.recreate(path) as file:
            file["Events"] = {"a": np.arange(3)}
            file[ABOUT] = record
    else:
        np.savez(path, a=np.arange(3), **{ABOUT: record})
    return path


TEXTS = ["", "null", "[]", "7", '"x"', '{"job": "x"}', "{", "[" * 300, '{"job": {"a": []}}']
STRANGE_RECORDS: list[tuple[str, Any]] = [
    *((suffix, text) for suffix in (".parquet", ".h5", ".root", ".npz") for text in TEXTS),
    *((suffix, b"\xff\xfe{}") for suffix in (".parquet", ".h5")),
    *((".h5", value) for value in (7, 1.5, [1, 2], np.bytes_(b"{}"))),
    (".h5", np.array(["{}", "{}"], object)),
    *((".npz", np.array(value)) for value in (7, [1, 2], ["{}"], b"\xff")),
    (".npz", np.array({"job": "x"}, object)),
    (".root", np.histogram([1.0, 2.0])),
    (".root", {"x": np.arange(3)}),
]


@pytest.mark.parametrize(("suffix", "record"), STRANGE_RECORDS, ids=lambda value: str(value)[:20])
def test_a_record_that_we_did_not_write_is_refused(
    tmp_path: Path, suffix: str, record: Any
) -> None:
    path = write_with_record(tmp_path / f"strange{suffix}", record)
    assert f"{path} does not say what made it" in refusal("explain", path)
    with pytest.raises(DataError):
        read_about(path)


def record_of(scored: Path) -> dict[str, Any]:
    """The record in an .npz file of how its answers were made."""
    with np.load(scored) as arrays:
        record: dict[str, Any] = json.loads(str(arrays[ABOUT]))
    return record


def test_a_record_is_read_wherever_it_lies(tmp_path: Path, scored: Path) -> None:
    copy = write_with_record(tmp_path / "copy.npz", json.dumps(record_of(scored)))
    assert cli("explain", copy).stdout == cli("explain", scored).stdout
    assert json.loads(cli("explain", copy, "--json").stdout) == record_of(scored)


def test_a_damaged_field_of_a_record_is_named(tmp_path: Path, scored: Path) -> None:
    """Each field is once missing and once of a wrong kind."""
    record = record_of(scored)
    for name in record:
        without = {key: value for key, value in record.items() if key != name}
        for damaged in (without, {**record, name: [{"\x1b[31m": [None]}]}):
            path = write_with_record(tmp_path / "damaged.npz", json.dumps(damaged))
            assert name in refusal("explain", path)


@pytest.mark.parametrize(
    ("suffix", "record"), [(".parquet", b"\xff"), (".h5", 7), (".npz", '{"job": "x"}')]
)
def test_a_file_that_others_wrote_is_replaced_by_force_only(
    tmp_path: Path, production: Registry, suffix: str, record: Any
) -> None:
    source = write_rows(tmp_path / "rows.npz", columns(20))
    out = write_with_record(tmp_path / f"out{suffix}", record)
    before = out.read_bytes()
    assert "is there already: --force" in refused(production, source, "--out", out)
    assert out.read_bytes() == before
    answer("apply", REF, source, "--out", out, "--force", registry=production)
    require_scored(out, columns(20))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.parquet")
    assert "not a plain file" in refusal("explain", tmp_path / "rows.parquet")


# -- what is refused ------------------------------------------------------------------------------


def refused(production: Registry, *arguments: object) -> str:
    """The one line with which `apply` refuses these arguments."""
    return refusal("apply", REF, *arguments, "--registry", production.uri)


def files_in(folder: Path) -> list[Path]:
    """All files except those of the registry and the cache."""
    return sorted(p for p in folder.rglob("*") if not {"cache", "store"} & {*p.parts})


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder of files that fit the tagger (`good`, `other/good`), and others that do not."""
    rows = columns(500)
    (tmp_path / "other").mkdir()
    for name in ("good.parquet", "other/good.parquet"):
        write_rows(tmp_path / name, rows)
    write_rows(tmp_path / "waves.npz", {**rows, "wave": np.zeros(500, "c8")})
    write_rows(tmp_path / "fewer.npz", {name: rows[name] for name in "abcde"})
    write_rows(tmp_path / "wider.npz", {**rows, "b": rows["b"].astype("f8")})
    write_rows(tmp_path / "text.npz", {**rows, "c": np.array(["x"] * 500)})
    lists = ak.unflatten(rows["a"], np.full(500, 1))
    write_rows(tmp_path / "jagged.parquet", {**rows, "a": lists})
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "out", "options", "problem"),
    [
        (
            "fewer.npz",
            "out",
            "",
            "fewer.npz has no 'f'; it has a, b, c, d, e: say which column it is",
        ),
        ("good.parquet fewer.npz", "out", "", "fewer.npz has no 'f'"),
        ("wider.npz", "out", "", "rows 0 to 256: column 'b' is float64, the layout says float32"),
        ("text.npz", "out", "", "column 'c' is"),
        ("jagged.parquet", "out", "", "'a' is jagged, 'b' is not"),
        ("good.parquet", "out", "--keep label", "has no 'label'"),
        ("good.parquet", "out", "--keep lab*", "no column fits it"),
        ("good.parquet", "out", "--columns jets/g=a", "--columns jets/g: the model reads"),
        ("good.parquet", "out", "--columns jets/a=g", "has no 'g'"),
        ("good.parquet other/good.parquet", "out", "", "two files would become"),
        ("good.parquet good.parquet", "out", "", "is named twice"),
        ("waves.npz", "out", "--keep wave", "Arrow has no complex64"),
        ("good.parquet", ".", "", "would replace what is read"),
        ("good.parquet", "other/..", "--force", "would replace what is read"),
        ("good.parquet", "out.csv", "", "a folder, or a file with one of .root, .parquet"),
        ("good.parquet", "good.parquet/out", "", "Not a directory"),
        ("none.root", "out", "", "none.root cannot be read: No such file"),
    ],
)
def test_a_refused_job_leaves_nothing(
    production: Registry, inputs: Path, sources: str, out: str, options: str, problem: str
) -> None:
    before = files_in(inputs)
    paths = [inputs / name for name in sources.split()]
    assert problem in refused(production, *paths, "--out", inputs / out, *options.split())
    assert files_in(inputs) == before


def test_a_file_without_a_record_is_not_explained(inputs: Path) -> None:
    assert "good.parquet does not say what made it" in refusal("explain", inputs / "good.parquet")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_off_in_the_middle_is_refused(
    tmp_path: Path, production: Registry, suffix: str
) -> None:
    source = write_rows(tmp_path / f"rows{suffix}", columns(1000))
    source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    assert str(source) in refused(production, source, "--out", tmp_path / "out")
    assert files_in(tmp_path) == sorted([source, tmp_path / "cwd"])


def test_a_root_file_without_room_for_its_head_is_closed(tmp_path: Path) -> None:
    table = pa.table({"a": [1.0]})
    rows = Rows(table.schema, 1, lambda: [table], lambda: "")

    def write_50_bytes() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
        try:
            write(tmp_path / "out.root", rows, tmp_path)
        except OSError as error:
            handles = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
            still_open = [file for file in map(os.readlink, handles) if "out.root" in file]
            raise ApplyError(f"{error.strerror}, {still_open}") from error

    assert in_a_child(write_50_bytes) == "ApplyError: File too large, []"
    assert not [*tmp_path.glob("out.root*")]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """The column `word` of `text.h5`, `text.npz`, `text.parquet` and `text.root`."""
    rows = {name: columns(300)[name] for name in FEATURES}
    words = [f"é{i}" * (i % 3) for i in range(300)]
    with h5py.File(tmp_path / "text.h5", "w") as file:
        for name, values in {**rows, "word": words}.items():
            file[name] = values
    np.savez(tmp_path / "text.npz", word=words, **rows)
    pq.write_table(pa.table({**rows, "word": words}), tmp_path / "text.parquet")
    with uproot.recreate(tmp_path / "text.root") as file:
        file["Events"] = {**rows, "word": ak.Array(words)}
    return words


@pytest.mark.parametrize(
    ("source", "suffix"),
    [
        (".h5", ".h5"), (".parquet", ".parquet"), (".root", ".root"),
        (".npz", ".h5"), (".h5", ".root"),
    ],
)  # fmt: skip
def test_text_is_kept(
    tmp_path: Path, production: Registry, texts: list[str], source: str, suffix: str
) -> None:
    out = tmp_path / f"out{suffix}"
    pipeline.apply(REF, tmp_path / f"text{source}", out, keep=["word"], registry=production)
    words = read_rows(out)["word"].tolist()
    assert [word.decode() if suffix == ".h5" else word for word in words] == texts


def test_text_is_no_input(tmp_path: Path, production: Registry, texts: list[str]) -> None:
    out = tmp_path / "o.h5"
    message = refused(production, tmp_path / "text.h5", "--columns", "jets/a=word", "--out", out)
    assert message and not out.exists()


def test_nulls_are_refused(tmp_path: Path, production: Registry) -> None:
    table = {name: pa.array(values) for name, values in columns(20).items() if name in FEATURES}
    table["a"] = pa.array([None] * 20, pa.float32())
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, rows 0 to 20: .*'a' has 20 nulls.*--fill a="):
        pipeline.apply(REF, tmp_path / "a.parquet", tmp_path / "out.npz", registry=production)


def test_nulls_among_items_are_refused(tmp_path: Path, production: Registry) -> None:
    items = ak.unflatten(columns(20)["a"], np.full(10, 2))
    lists: dict[str, Any] = {name: ak.to_arrow(items, extensionarray=False) for name in FEATURES}
    lists["b"] = pa.array([[1.0, 2.0]] * 9 + [[None, 1.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table(lists), tmp_path / "lists.parquet")
    with pytest.raises(DataError, match=r"lists.parquet, rows 0 to 10: .*has 1 nulls"):
        pipeline.apply(REF, tmp_path / "lists.parquet", tmp_path / "out.root", registry=production)


def test_nan_goes_through(tmp_path: Path, production: Registry) -> None:
    rows = columns(20)
    rows["a"][3] = np.nan
    source = write_rows(tmp_path / "nan.npz", rows)
    pipeline.apply(REF, source, tmp_path / "nan.parquet", registry=production)
    answers = np.asarray(read_rows(tmp_path / "nan.parquet")["x"])
    assert np.flatnonzero(np.isnan(answers)).tolist() == [3]


@pytest.fixture
def null_first(tmp_path: Path) -> dict[str, Any]:
    """The rows of `rows.parquet`, whose first `a` is null in the file and 2.5 here."""
    rows = {name: columns(20)[name] for name in FEATURES}
    table = {name: pa.array(values) for name, values in rows.items()}
    table["a"] = pa.array([None, *rows["a"][1:]], pa.float32())
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    rows["a"][0] = 2.5
    return rows


@pytest.mark.parametrize("name", ["a", "jets/a"])
def test_nulls_take_the_value_of_fill(
    tmp_path: Path, production: Registry, null_first: dict[str, Any], name: str
) -> None:
    """The column may be named as in the file or as in the model."""
    source, out = tmp_path / "rows.parquet", tmp_path / "out.npz"
    pipeline.apply(REF, source, out, fill={name: 2.5}, registry=production)
    require_scored(out, null_first)


def test_fill_is_an_option_of_the_command(
    tmp_path: Path, production: Registry, null_first: dict[str, Any]
) -> None:
    source, out = tmp_path / "rows.parquet", tmp_path / "out.npz"
    cli("apply", REF, source, "--out", out, "--fill", "a=2.5", "--registry", production.uri)
    require_scored(out, null_first)


@pytest.mark.parametrize("option", ["a", "=1", "a=b"])
def test_a_fill_that_is_no_name_and_number_is_refused(
    tmp_path: Path, production: Registry, null_first: dict[str, Any], option: str
) -> None:
    where = ("--out", tmp_path / "out.npz", "--registry", production.uri)
    cli("apply", REF, tmp_path / "rows.parquet", *where, "--fill", option, code=2)


def test_a_fill_of_a_column_that_the_model_lacks_is_refused(
    tmp_path: Path, production: Registry, null_first: dict[str, Any]
) -> None:
    source, out = tmp_path / "rows.parquet", tmp_path / "out.npz"
    with pytest.raises(ApplyError, match=r"--fill A: the model reads .*did you mean 'a'\?"):
        pipeline.apply(REF, source, out, fill={"A": 0}, registry=production)


def test_nulls_among_items_take_the_value_of_fill(
    tmp_path: Path, production: Registry, null_first: dict[str, Any]
) -> None:
    lists: dict[str, Any] = {
        name: ak.to_arrow(ak.unflatten(values, np.full(10, 2)), extensionarray=False)
        for name, values in null_first.items()
    }
    first = [None, null_first["a"][1]]
    lists["a"] = pa.array([first, *lists["a"].to_pylist()[1:]], pa.list_(pa.float32()))
    source, out = tmp_path / "lists.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table(lists), source)
    pipeline.apply(REF, source, out, fill={"a": 2.5}, registry=production)
    scores = read_rows(out)
    for name, expected in zip(CLASSES, eager(null_first).T, strict=True):
        np.testing.assert_allclose(np.concatenate(scores[name].to_list()), expected, atol=1e-5)


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
        table = {n: ak.to_arrow(values, extensionarray=False) for n, values in events.items()}
        table["a"] = pa.array(items, pa.list_(pa.float32()))
        file, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.npz"
        pq.write_table(pa.table(table), file)
        pipeline.apply(version.ref, file, out, fill={"a": 2.5}, mode="test", registry=registry)
        answers = np.load(out)
        scores[name] = [answers[key].tolist() for key in CLASSES]
    assert scores["null"] == scores["number"]


@pytest.mark.parametrize("name", ["coded.feather", "stream.arrows", "coded.arrow"])
def test_dictionaries_of_numbers_and_arrow_streams(
    tmp_path: Path, production: Registry, name: str
) -> None:
    rows = {feature: columns(700)[feature].round(1) for feature in FEATURES}
    table = pa.table(rows)
    if name.startswith("coded"):
        table = pa.table({n: pa.array(values).dictionary_encode() for n, values in rows.items()})
    source, out = tmp_path / name, tmp_path / "out.npz"
    if source.suffix == ".feather":
        pyarrow.feather.write_feather(table, source)
    else:
        with pa.ipc.new_stream(source, table.schema) as stream:
            stream.write_table(table, max_chunksize=250)
    pipeline.apply(REF, source, out, registry=production)
    require_scored(out, rows)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of three CSV files of thirty rows each, and a text that has no rows."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for i in range(3):
        rows = columns(30, seed=i)
        flat = {name: rows[name] for name in (*FEATURES, "event")}
        pd.DataFrame(flat).to_csv(folder / f"run{i}.csv", index=False)
    (folder / "notes.txt").write_text("no rows")
    return folder


@pytest.mark.parametrize("sources", ["{0}", "{0}/run*.csv"], ids=["folder", "pattern"])
@pytest.mark.parametrize("listed", [False, True], ids=["alone", "in a list"])
def test_text_is_read_from_folders_and_patterns(
    tmp_path: Path, production: Registry, runs: Path, sources: str, listed: bool
) -> None:
    """The numbers of a text are read as the dtypes of the model."""
    named, out = sources.format(runs), tmp_path / "out.npz"
    pipeline.apply(REF, [named] if listed else named, out, registry=production)
    files = [columns(30, seed) for seed in range(3)]
    whole = {name: np.concatenate([rows[name] for rows in files]) for name in FEATURES}
    require_scored(out, whole)


def test_answers_for_text_are_parquet_files(
    tmp_path: Path, production: Registry, runs: Path
) -> None:
    report = pipeline.apply(REF, runs, tmp_path, keep=["event"], registry=production)
    assert report.outputs == tuple(str(tmp_path / f"run{i}.parquet") for i in range(3))
    assert read_rows(tmp_path / "run1.parquet")["event"].to_list() == [*range(30)]


@pytest.mark.parametrize("name", ["empty", "runs/no*.csv"])
def test_no_files_at_all_are_refused(
    tmp_path: Path, production: Registry, runs: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ApplyError):
        pipeline.apply(REF, str(tmp_path / name), tmp_path / "no.npz", registry=production)


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
    rows = columns(30)
    rows["a"] = np.append(rows["a"][:29].round(), np.float32(4))
    pipeline.apply(REF, gap, tmp_path / "out.npz", fill={"a": 4}, registry=production)
    require_scored(tmp_path / "out.npz", rows)


def test_a_null_is_nan_for_trees(
    tmp_path: Path, empty: Registry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pandas writes NaN as null, and boosted trees read NaN as a missing value."""
    xgboost = pytest.importorskip("xgboost")
    rows = {name: columns(300)[name] for name in FEATURES}
    rows["b"][::5] = np.nan
    matrix = np.stack([*rows.values()], axis=1)
    table = xgboost.DMatrix(matrix, np.nan_to_num(matrix).sum(1) > 0, feature_names=[*FEATURES])
    booster = xgboost.train({"objective": "binary:logistic", "max_depth": 3}, table, 5)
    booster.save_model(tmp_path / "trees.json")
    signature = Signature.build(
        {"jets": mlp_signature().layouts["jets"], "tags": Layout([column("p", "float32")])},
        [Block("features", "jets", FEATURES)],
        [Block("p", "tags", ("p",))],
        {"n": RowRange(0, 64)},
    )
    model = load_trees(tmp_path / "trees.json")
    config = {"model": {"trees": "trees.json"}}
    promoted(empty, served.shared(tmp_path_factory, "trees", model, signature, config))
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["b"].null_count == 300 // 5
    out = tmp_path / "out.npz"
    pipeline.apply("trees@production", tmp_path / "rows.parquet", out, registry=empty)
    np.testing.assert_allclose(read_rows(out)["p"], booster.predict(table), atol=1e-6)


class Lengths(nn.Module):
    """The squared length of each vector, and `pt`."""

    def forward(self, hits: Tensor, pt: Tensor) -> Tensor:
        return (hits * hits).sum(1, keepdim=True) + pt


@pytest.fixture
def lengths(empty: Registry, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry with lengths/1 in production, a model of vectors of three numbers."""
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
    return empty


def vectors() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The columns `hits` and `pt` of 300 rows."""
    draw = np.random.default_rng(1)
    return draw.normal(size=(300, 3)).astype("f4"), draw.normal(size=300).astype("f4")


@pytest.mark.parametrize("suffix", [".parquet", ".root"])
def test_lists_of_one_length_are_a_models_vectors(
    tmp_path: Path, lengths: Registry, suffix: str
) -> None:
    """pandas writes vectors as lists."""
    hits, pt = vectors()
    source = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pd.DataFrame({"hits": [*hits], "pt": pt}).to_parquet(source)
    else:
        with uproot.recreate(source) as file:
            file.mkrntuple("Events", {"hits": ak.from_regular(ak.Array(hits)), "pt": pt})
    pipeline.apply("lengths@production", source, tmp_path / "out", registry=lengths)
    answers = np.asarray(read_rows(tmp_path / "out" / source.name)["y"])
    np.testing.assert_allclose(answers, (hits * hits).sum(1) + pt, atol=1e-5)


def test_lists_of_several_lengths_are_no_vectors(tmp_path: Path, lengths: Registry) -> None:
    hits, pt = vectors()
    source = tmp_path / "other.parquet"
    pd.DataFrame({"hits": [*hits[:299], hits[0, :2]], "pt": pt}).to_parquet(source)
    with pytest.raises(DataError, match=r"other\.parquet.*'hits' is jagged .*2 to 3 items"):
        pipeline.apply("lengths@production", source, tmp_path / "other.npz", registry=lengths)


@pytest.mark.long
def test_a_job_that_is_killed_and_started_again_scores_every_row(tmp_path: Path) -> None:
    summary = campaign(tmp_path / "job", rows=600_000, files=3, kills=2, seed=5)
    assert "600,000 rows of 3 files" in summary
