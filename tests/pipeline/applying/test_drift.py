"""A version notices that its columns moved: in files, in jobs, and in sessions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        made = project.write_project(folder, config=config)
        rows = {f"jets/{name}": values for name, values in drawn(0).items()}
        np.savez(folder / "rows.npz", allow_pickle=False, **rows)
        built = project.build(made)
        registry = Registry(made.registry)
        registry.promote(registry.find(built.answer["version"]), "production", project.PASSED)

    folder = made_once(tmp_path_factory, "watched", make)
    return project.copied(folder, tmp_path_factory.mktemp("watched"))


@pytest.fixture
def store(watched: Built, tmp_path: Path) -> Registry:
    return copy_of(watched.project.folder / "store", tmp_path / "store")


def file_of(folder: Path, seed: int = 1, **changed: float) -> Path:
    """A file of data, with `changed` added to some columns."""
    rows = {name: own + np.float32(changed.get(name, 0)) for name, own in drawn(seed).items()}
    np.savez(folder / f"{seed}.npz", allow_pickle=False, **rows)
    return folder / f"{seed}.npz"


def of(session: Session) -> Watcher:
    assert isinstance(session.watcher, Watcher)
    return session.watcher


def test_a_file_like_the_reference_passes(store: Registry, tmp_path: Path) -> None:
    found = answer("drift", "jets@production", file_of(tmp_path), registry=store)
    assert found["beyond"] == []
    assert {each["column"] for each in found["columns"]} == {
        *(f"jets/{name}" for name in "abcdef"), *(f"tags/{name}" for name in "xyz")
    }  # fmt: skip
    assert {each["values"] for each in found["columns"]} == {ROWS}


def test_a_column_that_moved_is_named(store: Registry, tmp_path: Path) -> None:
    file = file_of(tmp_path, c=1000)
    found = answer("drift", "jets@production", file, registry=store, code=1)
    assert found["beyond"][0] == "jets/c"
    assert not {"jets/a", "jets/b", "jets/d", "jets/e", "jets/f"} & set(found["beyond"])
    shown = cli("drift", "jets@production", file, "--registry", store.uri, code=1).stdout
    assert re.search(r"jets/c .*above: 0 % to 100 %", shown)
    loose = answer("drift", "jets/1", file, "--limit", "100", registry=store)
    assert loose["beyond"] == []


def test_a_job_counts_its_rows(store: Registry, tmp_path: Path) -> None:
    counts, page = tmp_path / "kept" / "counts.json", tmp_path / "page.html"
    (tmp_path / "kept").mkdir()
    cli("apply", "jets@production", file_of(tmp_path, b=5), "--out", tmp_path / "out",
        "--counts", counts, "--html", page, "--registry", store.uri)  # fmt: skip
    assert sum(read_record(Counts, counts.read_bytes()).columns["jets/b"]) == ROWS
    once = answer("drift", "jets@production", counts, registry=store, code=1)
    assert "jets/b" in once["beyond"]
    assert "distance from the reference" in page.read_text()
    # Two jobs add up, and a page says what moved.
    (tmp_path / "kept" / "again.json").write_bytes(counts.read_bytes())
    both = answer("drift", "jets/1", tmp_path / "kept", "--html", page, registry=store, code=1)
    assert both["columns"][0]["values"] == 2 * once["columns"][0]["values"]
    text = page.read_text()
    assert "jets/b" in text
    assert text.count("<svg") == sum(each["significant"] for each in both["columns"])


@pytest.fixture(autouse=True)
def counts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path / "counts"))


def called_50_times(session: Session) -> None:
    """Each call has 20 rows of zeros."""
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
        called_50_times(session)
        counts = of(session).counts
    assert least <= counts.calls <= most
    assert counts.columns["jets/a"][3] == 20 * counts.calls  # zeros


def test_a_session_that_counts_no_call_has_no_watcher(store: Registry) -> None:
    with pipeline.load("jets@production", registry=store, watch=0.0) as session:
        assert session.watcher is None


def test_the_counts_of_sessions_are_added(store: Registry) -> None:
    for _ in range(2):
        with pipeline.load("jets@production", registry=store, watch=1.0) as session:
            called_50_times(session)
            of(session).write()
    shown = answer("drift", "jets@production", registry=store, code=1)
    assert shown["calls"] == 100
    assert set(shown["beyond"]) >= {f"jets/{name}" for name in "abcdef"}


def test_the_environment_asks_too(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path))
    monkeypatch.setenv("PIPELINE_WATCH", "1")
    with pipeline.load("jets@production", registry=store) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        assert of(session).counts.calls == 1
        assert of(session).file.parent == tmp_path
    monkeypatch.setenv("PIPELINE_COUNTS", "")  # empty is as not set
    with pipeline.load("jets@production", registry=store) as session:
        assert of(session).file.parent == Path("pipeline-counts").absolute()
    monkeypatch.setenv("PIPELINE_WATCH", "")
    with pipeline.load("jets@production", registry=store) as session:
        assert session.watcher is None
    monkeypatch.setenv("PIPELINE_WATCH", "often")
    with pytest.raises(LoadError, match="PIPELINE_WATCH=often"):
        pipeline.load("jets@production", registry=store)
    with pytest.raises(LoadError, match="watch=2"):
        pipeline.load("jets@production", registry=store, watch=2)
    with pytest.raises(LoadError, match=r"^watch with 'triton://h:1': only sessions on this host"):
        pipeline.load("jets@production", registry=store, watch=0.1, device="triton://h:1")
    with pytest.raises(LoadError, match=r"^watch with a site: only sessions on this host"):
        pipeline.load("jets@production", registry=store, watch=0.1, site="site.yaml")


def _run_and_count(registry: str) -> None:
    with pipeline.load("jets@production", registry=registry, watch=1.0) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        of(session).write()


def test_processes_write_files_of_their_own(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path / "counts"))
    assert [ended(lambda: _run_and_count(store.uri)) for _ in range(2)] == [0, 0]
    assert len([*(tmp_path / "counts").glob("*.json")]) == 2
    shown = cli("drift", "jets/1", "--registry", store.uri, "--json", code=1).stdout
    assert json.loads(shown)["calls"] == 2


def test_test_mode_counts_too(
    store: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_COUNTS", str(tmp_path))
    with pipeline.load("jets/1", mode="test", registry=store, watch=1) as session:
        session.run(session.collection("jets", 5), session.collection("tags", 5))
        assert of(session).counts.calls == 1


def test_rows_that_a_short_file_repeats_count_once(watched: Built, tmp_path: Path) -> None:
    """A file of 40 rows fills a reference of 1,000 or more."""
    made = project.write_project(tmp_path / "short", config=watched.project.config.read_text())
    rows = {f"jets/{name}": values for name, values in drawn(0, 40).items()}
    np.savez(made.folder / "rows.npz", allow_pickle=False, **rows)
    built = project.build(made)
    profile = json.loads(built.bundle.file("reports/columns.json").read_text())
    assert {sum(each["counts"]) for each in profile["columns"].values()} == {40}


def test_a_version_without_a_profile(
    jets: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reference is random: no command says that data moved away from it."""
    where = ("--registry", jets.project.registry)
    assert "rows of yours" in refusal(
        "drift", "jets/1", file_of(tmp_path), "--mode", "test", *where
    )
    with pytest.raises(LoadError, match="rows of yours"):
        pipeline.load("jets/1", mode="test", registry=jets.project.registry, watch=1)
    monkeypatch.setenv("PIPELINE_WATCH", "1")
    with pipeline.load("jets/1", mode="test", registry=jets.project.registry) as session:
        assert session.watcher is None


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"columns": {"jets/a": {"edges": [2, 1], "counts": [0,0,0,0,0,0,1]}}}', "ascend"),
     ("nothing", "columns.json"), ('{"columns": 1}', "columns")],
)  # fmt: skip
def test_a_damaged_profile_is_refused(
    content: str, said: str, watched: Built, tmp_path: Path
) -> None:
    def edit(folder: Path, _: object) -> None:
        (folder / "reports" / "columns.json").write_text(content)

    forged = project.resealed(watched.bundle, tmp_path / "forged", edit)
    assert said in refusal("drift", forged.path, file_of(tmp_path), "--mode", "test")


def test_data_and_counts_at_once(store: Registry, tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text("{}")
    result = cli("drift", "jets/1", file_of(tmp_path), tmp_path / "counts.json", "--registry",
                 store.uri, code=2)  # fmt: skip
    assert "two commands" in result.stderr


def test_a_null_is_found_in_its_rows(store: Registry, tmp_path: Path) -> None:
    """Groups of 100 rows are shorter than the batches that rows are read in."""
    table = {name: pa.array(values) for name, values in drawn(1, 1000).items()}
    table["b"] = pa.array([None if i == 250 else 1.0 for i in range(1000)], pa.float32())
    pq.write_table(pa.table(table), tmp_path / "rows.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"rows.parquet, rows 200 to "):
        count_files(
            "jets@production", [tmp_path / "rows.parquet"], columns={}, fill={}, tree=None,
            mode="production", registry=store,
        )  # fmt: skip


def test_a_file_without_rows(store: Registry, tmp_path: Path) -> None:
    """A job on it is complete; there is nothing to compare with the reference."""
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
        of(session).write()
