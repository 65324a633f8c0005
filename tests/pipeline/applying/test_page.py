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
    done = pipeline.apply(REF, sources, out, registry=production, histograms=True)
    rows = read_rows(out)
    assert {*done.histograms} == {*CLASSES}
    for name, found in done.histograms.items():
        assert (found.finite, found.nonfinite) == (600, 0)
        values = np.asarray(rows[name], "float64")
        assert (found.least, found.largest) == (values.min(), values.max())
        assert found.mean == pytest.approx(values.mean())


def test_a_run_and_one_that_finds_all_done(tmp_path: Path, production: Registry) -> None:
    source = write_rows(tmp_path / "<b>rows.parquet", columns(100))
    page = tmp_path / "pages" / "run.html"
    given = ("apply", REF, source, "--out", tmp_path / "out", "--keep", "event", "--html", page)
    where = ("--registry", production.uri)
    answer = json.loads(cli(*given, "--json", *where).stdout)
    assert "histograms" not in answer
    read = check(page.read_text())
    for said in ("100 rows scored by tagger/1", "production", "a second", "event", "written",
                 "<b>rows.parquet"):  # fmt: skip
        assert said in read.text, said
    assert len(read.all("svg")) == len(CLASSES)
    assert str(tmp_path) not in page.read_text()
    assert f"wrote {page}" in cli(*given, *where).stdout
    again = check(page.read_text())
    assert "100 rows scored by tagger/1, none of them now" in again.text
    assert "already complete" in again.text and not again.all("svg")


def test_no_page_in_place_of_data(tmp_path: Path, production: Registry) -> None:
    source = write_rows(tmp_path / "rows.parquet", columns(10))
    whole = source.read_bytes()
    out = tmp_path / "out.parquet"
    for taken in (source, out):
        said = cli("apply", REF, source, "--out", out, "--html", taken,
                   "--registry", production.uri, code=2)  # fmt: skip
        assert str(taken) in said.stderr
    assert source.read_bytes() == whole and not out.exists()
