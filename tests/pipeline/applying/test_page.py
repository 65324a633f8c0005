"""The page of a run of `apply`: what it did, and the distribution of the answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pipeline
from registry.store.registry import Registry
from tests.models.mlps import CLASSES
from tests.models.project import cli
from tests.models.scored import columns, read_rows, write_rows
from tests.pipeline.report.test_pages import check

REF = "tagger@production"


@pytest.mark.parametrize("suffix", [".parquet", ".npz", ".root"])
def test_each_answer_is_counted_once(tmp_path: Path, production: Registry, suffix: str) -> None:
    """This holds although some formats are written in several passes over the parts."""
    sources = [write_rows(tmp_path / f"{i}{suffix}", columns(300)) for i in range(2)]
    out = tmp_path / f"all{suffix}"
    report = pipeline.apply(REF, sources, out, registry=production, histograms=True)
    rows = read_rows(out)
    assert {*report.histograms} == {*CLASSES}
    for name, histogram in report.histograms.items():
        assert (histogram.finite, histogram.nonfinite) == (600, 0)
        values = np.asarray(rows[name], "float64")
        assert (histogram.least, histogram.largest) == (values.min(), values.max())
        assert histogram.mean == pytest.approx(values.mean())


@pytest.fixture
def command(tmp_path: Path, production: Registry) -> tuple[object, ...]:
    """A job whose page is `pages/run.html`; its file's name is HTML that must be escaped."""
    source = write_rows(tmp_path / "<b>rows.parquet", columns(100))
    out, page = tmp_path / "out", tmp_path / "pages" / "run.html"
    where = ("--out", out, "--keep", "event", "--html", page, "--registry", production.uri)
    return ("apply", REF, source, *where)


def test_the_page_of_a_run(tmp_path: Path, command: tuple[object, ...]) -> None:
    answer = json.loads(cli(*command, "--json").stdout)
    assert "histograms" not in answer
    text = (tmp_path / "pages" / "run.html").read_text()
    page = check(text)
    for phrase in ("100 rows scored by tagger/1", "production", "a second", "event", "written",
                   "<b>rows.parquet"):  # fmt: skip
        assert phrase in page.text, phrase
    assert len(page.all("svg")) == len(CLASSES)
    assert str(tmp_path) not in text


def test_the_page_of_a_run_that_finds_all_done(tmp_path: Path, command: tuple[object, ...]) -> None:
    cli(*command)
    file = tmp_path / "pages" / "run.html"
    assert f"wrote {file}" in cli(*command).stdout
    page = check(file.read_text())
    assert "100 rows scored by tagger/1, none of them now" in page.text
    assert "already complete" in page.text and not page.all("svg")


@pytest.mark.parametrize("name", ["rows.parquet", "out.parquet"])
def test_no_page_in_place_of_data(tmp_path: Path, production: Registry, name: str) -> None:
    source, out = write_rows(tmp_path / "rows.parquet", columns(10)), tmp_path / "out.parquet"
    content = source.read_bytes()
    where = ("--out", out, "--html", tmp_path / name, "--registry", production.uri)
    assert str(tmp_path / name) in cli("apply", REF, source, *where, code=2).stderr
    assert source.read_bytes() == content and not out.exists()
