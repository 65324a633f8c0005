"""A version notices that its columns moved: in files, in jobs, and in sessions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.feather import write_feather

import pipeline
from pipeline.applying import count_files
from pipeline.errors import DataError
from registry.store.registry import Registry
from runtime.errors import LoadError
from runtime.session import Session
from runtime.watch import Counts, Watcher
from soa.records import read_record
from tests.models import project
from tests.models.forked import ended
from tests.models.project import Built, answer, cli, refusal
from tests.models.shared import made_once
from tests.models.versions import copy_of

ROWS = 4000


def drawn(seed: int, rows: int = ROWS) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Normal columns of different means and widths."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(k, 1 + k, rows).astype(np.float32) for k, name in enumerate("abcdef")
    }


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Built:
    """jets/1, whose reference has rows of a file, in production."""

    def make(folder: Path) -> None:
        config = project.CONFIG.replace("[aoti, torchscript, exported]", "[exported]")
        config = config.replace("reference: {many", "reference: {file: rows.npz, many")
        written = project.write_project(folder, config=config)
        rows = {f"jets/{name}": values for name, values in drawn(0).items()}
        np.savez(folder / "rows.npz", allow_pickle=False, **rows)
        built = project.build(written)
        registry = Registry(written.registry)
        registry.promote(registry.find(built.answer["version"]), "production", project.PASSED)

    folder = made_once(tmp_path_factory, "watched", make)
    return project.copied(folder, tmp_path_factory.mktemp("watched"))


@pytest.fixture
def store(watched: Built, tmp_path: Path) -> Registry:
    """A copy of the registry of `watched` for this test."""
    return copy_of(watched.project.folder / "store", tmp_path / "store")


def file_of(folder: Path, seed: int = 1, **shifts: float) -> Path:
    """A file of data like the reference's, with these shifts added to some columns."""
    rows = {name: own + np.float32(shifts.get(name, 0)) for name, own in drawn(seed).items()}
    np.savez(folder / f"{seed}.npz", allow_pickle=False, **rows)
    return folder / f"{seed}.npz"


def watcher_of(session: Session) -> Watcher:
    """The session's watcher, which there must be."""
    assert isinstance(session.watcher, Watcher)
    return session.watcher


def test_a_file_like_the_reference_passes(store: Registry, tmp_path: Path) -> None:
    drift = answer("drift", "jets@production", file_of(tmp_path), registry=store)
    assert drift["beyond"] == []
    assert {column["column"] for column in drift["columns"]} == {
        *(f"jets/{name}" for name in "abcdef"), *(f"tags/{name}" for name in "xyz")
    }  # fmt: skip
    assert {column["values"] for column in drift["columns"]} == {ROWS}


def test_a_column_that_moved_is_named(store: Registry, tmp_path: Path) -> None:
    moved = file_of(tmp_path, c=1000)
    drift = answer("drift", "jets@production", moved, registry=store, code=1)
    assert drift["beyond"][0] == "jets/c"
    assert not {"jets/a", "jets/b", "jets/d", "jets/e", "jets/f"} & set(drift["beyond"])


def test_the_table_shows_where_the_values_went(store: Registry, tmp_path: Path) -> None:
    where = ("--registry", store.uri)
    table = cli("drift", "jets@production", file_of(tmp_path, c=1000), *where, code=1).stdout
    assert re.search(r"jets/c .*above: 0 % to 100 %", table)


def test_a_user_sets_the_limit_of_a_distance(store: Registry, tmp_path: Path) -> None:
    moved = file_of(tmp_path, c=1000)
    assert answer("drift", "jets/1", moved, "--limit", "100", registry=store)["beyond"] == []


def count_a_job(store: Registry, folder: Path, counts: Path) -> Path:
    """Scores a file whose column `b` moved, writes its counts, and returns the job's page."""
    page = folder / "page.html"
    cli("apply", "jets@production", file_of(folder, b=5), "--out", folder / "out",
        "--counts", counts, "--html", page, "--registry", store.uri)  # fmt: skip
    return page


def test_a_job_counts_its_rows(store: Registry, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    page = count_a_job(store, tmp_path, counts)
    assert sum(read_record(Counts, counts.read_bytes()).columns["jets/b"]) == ROWS
    drift = answer("drift", "jets@production", counts, registry=store, code=1)
    assert "jets/b" in drift["beyond"]
    assert "distance from the reference" in page.read_text()


def test_the_counts_of_jobs_are_added(store: Registry, tmp_path: Path) -> None:
    folder, page = tmp_path / "kept", tmp_path / "drift.html"
    folder.mkdir()
    count_a_job(store, tmp_path, folder / "counts.json")
    (folder / "again.json").write_bytes((folder / "counts.json").read_bytes())
    drift = answer("drift", "jets/1", folder, "--html", page, registry=store, code=1)
    assert drift["columns"][0]["values"] == 2 * ROWS
    text = page.read_text()
    assert "jets/b" in text
    assert text.count("<svg") == sum(column["significant"] for column in drift["columns"])


@pytest.fixture(autouse=True)
def counts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a folder of counts of its own."""
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path / "counts"))


def call_50_times(session: Session) -> None:
    """Each call has 20 rows of zeros; half of the calls are in `run_many`."""
    jets, tags = session.collection("jets", 20), session.collection("tags", 20)
    binding = session.bind(jets, tags)
    for _ in range(25):
        binding()
        session.run_many([binding])


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 50, 50), (0.5, 10, 40)])
def test_a_session_counts_a_share_of_its_calls(
    store: Registry, share: float, least: int, most: int
) -> None:
    with pipeline.load("jets@production", registry=store, watch=share) as session:
        call_50_times(session)
        counts = watcher_of(session).counts
    assert least <= counts.calls <= most
    assert counts.columns["jets/a"][3] == 20 * counts.calls  # zeros


def test_a_session_that_counts_no_call_has_no_watcher(store: Registry) -> None:
    with pipeline.load("jets@production", registry=store, watch=0.0) as session:
        assert session.watcher is None


def test_the_counts_of_sessions_are_added(store: Registry) -> None:
    for _ in range(2):
        with pipeline.load("jets@production", registry=store, watch=1.0) as session:
            call_50_times(session)
            watcher_of(session).write()
    drift = answer("drift", "jets@production", registry=store, code=1)
    assert drift["calls"] == 100
    assert set(drift["beyond"]) >= {f"jets/{name}" for name in "abcdef"}


def test_the_environment_asks_for_counts_and_names_their_folder(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path))
    monkeypatch.setenv("PIPELINE_WATCH", "1")
    with pipeline.load("jets@production", registry=store) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        assert watcher_of(session).counts.calls == 1
        assert watcher_of(session).file.parent == tmp_path


def test_an_empty_name_of_the_folder_is_as_none(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", "")
    with pipeline.load("jets@production", registry=store, watch=1) as session:
        assert watcher_of(session).file.parent == Path("pipeline-counts").absolute()


def test_an_empty_share_in_the_environment_counts_nothing(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_WATCH", "")
    with pipeline.load("jets@production", registry=store) as session:
        assert session.watcher is None


def test_a_share_in_the_environment_that_is_no_number_is_refused(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_WATCH", "often")
    with pytest.raises(LoadError, match="PIPELINE_WATCH=often"):
        pipeline.load("jets@production", registry=store)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"watch": 2}, "watch=2"),
        (
            {"watch": 0.1, "device": "triton://h:1"},
            r"^watch with 'triton://h:1': only sessions on this host",
        ),
        ({"watch": 0.1, "site": "site.yaml"}, r"^watch with a site: only sessions on this host"),
    ],
    ids=["share above 1", "server", "site"],
)
def test_a_session_that_cannot_be_watched_is_refused(
    store: Registry, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LoadError, match=problem):
        pipeline.load("jets@production", registry=store, **options)


def _run_and_count(registry: str) -> None:
    """Counts one call of five rows in this process."""
    with pipeline.load("jets@production", registry=registry, watch=1.0) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        watcher_of(session).write()


def test_processes_write_files_of_their_own(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path / "counts"))
    assert [ended(lambda: _run_and_count(store.uri)) for _ in range(2)] == [0, 0]
    assert len([*(tmp_path / "counts").glob("*.json")]) == 2
    drift = cli("drift", "jets/1", "--registry", store.uri, "--json", code=1).stdout
    assert json.loads(drift)["calls"] == 2


def test_test_mode_counts_too(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path))
    with pipeline.load("jets/1", mode="test", registry=store, watch=1) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        assert watcher_of(session).counts.calls == 1


def test_rows_that_a_short_file_repeats_count_once(watched: Built, tmp_path: Path) -> None:
    """A file of 40 rows fills a reference of 1,000 or more."""
    short = project.write_project(tmp_path / "short", config=watched.project.config.read_text())
    rows = {f"jets/{name}": values for name, values in drawn(0, 40).items()}
    np.savez(short.folder / "rows.npz", allow_pickle=False, **rows)
    built = project.build(short)
    profile = json.loads(built.bundle.file("reports/columns.json").read_text())
    assert {sum(column["counts"]) for column in profile["columns"].values()} == {40}


def test_drift_of_a_version_with_a_random_reference_is_refused(jets: Built, tmp_path: Path) -> None:
    """Data need not look like it."""
    where = ("--mode", "test", "--registry", jets.project.registry)
    assert "rows of yours" in refusal("drift", "jets/1", file_of(tmp_path), *where)


def test_a_session_with_a_random_reference_cannot_be_watched(jets: Built) -> None:
    with pytest.raises(LoadError, match="rows of yours"):
        pipeline.load("jets/1", mode="test", registry=jets.project.registry, watch=1)


def test_the_environment_does_not_watch_a_session_with_a_random_reference(
    jets: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set for all sessions, and must not stop this one."""
    monkeypatch.setenv("PIPELINE_WATCH", "1")
    with pipeline.load("jets/1", mode="test", registry=jets.project.registry) as session:
        assert session.watcher is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [('{"columns": {"jets/a": {"edges": [2, 1], "counts": [0,0,0,0,0,0,1]}}}', "ascend"),
     ("nothing", "columns.json"), ('{"columns": 1}', "columns")],
)  # fmt: skip
def test_a_damaged_profile_is_refused(
    content: str, problem: str, watched: Built, tmp_path: Path
) -> None:
    def edit(folder: Path, _: object) -> None:
        (folder / "reports" / "columns.json").write_text(content)

    forged = project.resealed(watched.bundle, tmp_path / "forged", edit)
    assert problem in refusal("drift", forged.path, file_of(tmp_path), "--mode", "test")


def test_data_and_counts_in_one_command_are_refused(store: Registry, tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text("{}")
    result = cli("drift", "jets/1", file_of(tmp_path), tmp_path / "counts.json", "--registry",
                 store.uri, code=2)  # fmt: skip
    assert "two commands" in result.stderr


def test_a_null_is_found_in_its_rows(store: Registry, tmp_path: Path) -> None:
    """The file's batches of 100 rows are shorter than those that a piece is read in."""
    table = {name: pa.array(values) for name, values in drawn(1, 1000).items()}
    table["b"] = pa.array([None if i == 750 else 1.0 for i in range(1000)], pa.float32())
    write_feather(pa.table(table), tmp_path / "rows.arrow", chunksize=100)
    with pytest.raises(DataError, match=r"rows.arrow, rows 700 to "):
        count_files(
            "jets@production", [tmp_path / "rows.arrow"], columns={}, fill={}, tree=None,
            mode="production", registry=store,
        )  # fmt: skip


def test_a_file_without_rows_leaves_nothing_to_compare(store: Registry, tmp_path: Path) -> None:
    """A job on it is complete; its counts are refused by `drift`."""
    np.savez(tmp_path / "0.npz", allow_pickle=False, **drawn(1, 0))
    where = ("--registry", store.uri)
    counts, page = tmp_path / "counts.json", tmp_path / "page.html"
    out = ("--out", tmp_path / "out", "--counts", counts, "--html", page)
    cli("apply", "jets@production", tmp_path / "0.npz", *out, *where)
    assert page.is_file()
    assert "no value" in refusal("drift", "jets@production", counts, *where)


def test_a_call_without_rows_is_written(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path))
    with pipeline.load("jets@production", registry=store, watch=1) as session:
        session.run(session.collection("jets", 0), session.collection("tags", 0))
        watcher_of(session).write()
        assert watcher_of(session).file.is_file()
