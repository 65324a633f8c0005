"""Pages need no other files, fit any screen, and do not execute text of others."""

from __future__ import annotations

import html.parser
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.report.figures import error_figure, kept_of, ulp_figure
from pipeline.report.pages import bench_page, difference_page, publish, version_page
from registry.bundle.bundle import Bundle
from registry.bundle.digests import seal
from registry.bundle.manifest import Manifest
from registry.history.event_log import Event
from registry.promotion import Decision
from registry.store.registry import Registry
from registry.version import PROMOTION, Promotion, Version
from runtime.checked import Deviation, Tolerance, combine, compare
from soa.records import as_record
from stages.histogram import Histogram
from stages.reports import (
    BenchmarkReport,
    CaseReport,
    Curve,
    NotDrawn,
    Residual,
    Roc,
    Timing,
    ValidationReport,
)
from tests.fuzz.hostile import require_plain
from tests.fuzz.test_records import MANIFEST, SOUND, V3, compared, opened
from tests.models import bundles

HOSTILE = "<script>alert(1)</script> \x1b[31m \u202elive\u202c </svg> {{ 7 * 7 }} $x_1$ \U0001d54f"
WHEN = datetime(2026, 11, 23, 10, 20, 30, tzinfo=UTC)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BAND = Tolerance(1e-5, 1e-4)
_VOID = {"meta", "br", "link", "img", "hr"}


class Read(html.parser.HTMLParser):
    """The elements of a page; they must be closed in the reverse order of opening."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def check(page: str) -> Read:
    """Checks what must hold for every page."""
    read = Read(page)
    require_plain(page)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in read.seen}
    assert not re.search(r"url\((?!#)|@import", page)
    for tag, attributes in read.seen:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "xlink:href", "src", "action"):
            assert str(attributes.get(name, "#"))[0] in "#/"
    ids = [str(attributes["id"]) for _, attributes in read.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in read.all("svg"):
        assert attributes["role"] == "img" and attributes["aria-label"]
    assert all(attributes.get("scope") in ("row", "col") for attributes in read.all("th"))
    assert read.all("html") == [{"lang": "en"}]
    assert len(read.all("h1")) == len(read.all("main")) == 1
    return read


def version(**tags: str) -> Version:
    at, by = {V3: "verified"}, {V3: "aoti"}
    return Version("jets", 3, "ab" * 32, ("production",), at, by, {}, WHEN, "r", "", tags)


def page_of(
    data: Mapping[str, Any] = MANIFEST,
    at: Version | None = None,
    events: Sequence[Event] = (),
    **reports: object,
) -> str:
    """The page of a bundle with this manifest and these reports."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / "bundle"
        bundles.write_bundle(place, as_record(Manifest, data))
        for name, said in reports.items():
            (place / f"reports/{name}.json").write_text(json.dumps({V3: said}))
        seal(place)
        return version_page(Bundle.open(place), at, events)


def full_page(text: str = "good") -> str:
    decision = Decision("speed", False, text, "1.1", f"slow: {text}", override=text)
    promotion = Promotion("production", text, WHEN.isoformat(), (decision,))
    event = Event("promotion", "jets", {}, {"production": 3}, "production", 3, reason=text,
                  time=WHEN, state="done")  # fmt: skip
    made = version(**{PROMOTION + "production": promotion.to_json()})
    tried = (report("aoti"), ValidationReport.failed("exported", text))
    times = {
        "n=10": {"aoti": Timing(11.5, 11, 12, 7)},
        "n=1000": {"aoti": Timing(210, 200, 220, 7)},
    }
    return page_of(
        {**MANIFEST, "description": text}, made, [event],
        validation={each.engine: each.to_dict() for each in tried},
        benchmark=BenchmarkReport(times, "aoti").to_dict(),
    )  # fmt: skip


def test_the_page_of_a_version_has_its_facts() -> None:
    read = check(full_page("seen by Ada"))
    for said in ("jets/3", "@production", "aoti", "exported failed", "Speed", "speed", "overridden",
                 "2026-11-23 10:20:30", "seen by Ada", "probabilities"):  # fmt: skip
        assert said in read.text, said


def test_the_plot_of_a_version_says_its_numbers() -> None:
    (plot,) = check(full_page()).all("svg")
    assert "aoti: 11.5 µs at 10, 210 µs at 1,000" in str(plot["aria-label"])


def test_text_of_others_is_text() -> None:
    read = check(full_page(HOSTILE))
    assert "<script>alert(1)</script> \\x1b[31m \\u202elive\\u202c </svg> {{ 7 * 7 }}" in read.text


def test_without_benchmarks_and_without_a_registry() -> None:
    read = check(page_of())
    assert "Agreement" in read.text and not read.all("svg")


def test_a_difference_and_a_benchmark() -> None:
    data = json.loads(json.dumps(MANIFEST)) | {"description": HOSTILE}
    found = compared(SOUND, opened(as_record(Manifest, data)))
    check(difference_page(found))
    found["a"]["ref"] = "/home/ada/bundle"
    assert "ada" not in difference_page(found)
    times = {f"n={n}": {HOSTILE: Timing(n * 1.0, n * 0.9, n * 1.2, 7)} for n in (1, 10)}
    read = check(bench_page(HOSTILE, {V3: BenchmarkReport(times, HOSTILE)}))
    assert "$x_1$" in read.text and len(read.all("svg")) == 1


def test_colours_can_be_read_in_both_schemes() -> None:
    """The contrasts that WCAG requires: 4.5 for text, 3 for lines."""
    schemes = re.findall(r":root \{([^}]*)\}", full_page())
    assert len(schemes) == 2
    for scheme in schemes:
        colors = dict(re.findall(r"--(\w+): (#\w+)", scheme))
        for name in ("text", "dim", "link", "good", "bad", *(f"s{i}" for i in range(7))):
            least = 3 if name[0] == "s" else 4.5
            for back in (colors["back"], colors["soft"]):
                assert contrast(colors[name], back) >= least, (name, back)


def contrast(one: str, other: str) -> float:
    def light(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(c * 2 for c in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_mlflow_keeps_the_page(empty: Registry, tmp_path: Path) -> None:
    bundles.write_bundle(tmp_path / "bundle", as_record(Manifest, MANIFEST))
    bundle = Bundle.open(tmp_path / "bundle")
    made = empty.register(bundle)
    file = publish(empty, made, bundle, tmp_path / "reports")
    assert file == tmp_path / "reports" / "jets-1.html"
    with empty.client() as client:
        kept = client.download_artifacts(str(made.run_id), "report.html", str(tmp_path))
    assert Path(kept).read_text() == file.read_text()
    check(file.read_text())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Only tables are wider than the screen, and can be scrolled; plots are drawn."""
    (tmp_path / "report.html").write_text(full_page(HOSTILE + " long" * 40), encoding="utf-8")
    look = """<iframe id=f src=report.html style="width:%dpx;height:900px;border:0"></iframe>
        <script>onload = () => {
        const d = f.contentDocument, e = d.documentElement, box = x => x.getBoundingClientRect()
        document.title = JSON.stringify({
            wide: e.scrollWidth, inner: e.clientWidth, scripts: d.scripts.length,
            plot: box(d.querySelector("svg")).height,
            left: [...d.querySelectorAll("h2")].map(x => box(x).left)})
        }</script>"""
    (tmp_path / "look.html").write_text(look % width)
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path}/profile",
         f"--window-size={width + 50},1000", (tmp_path / "look.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search("<title>(.*)</title>", done.stdout)
    assert title is not None, done.stderr
    found: dict[str, Any] = json.loads(title[1])
    assert found["wide"] <= found["inner"] and found["inner"] > 0.9 * width
    assert found["scripts"] == 0 and found["plot"] > 150
    assert all(0 <= left < width / 3 for left in found["left"])


def report(engine: str, *cases: tuple[int, Deviation]) -> ValidationReport:
    tried = tuple(CaseReport({"n": rows}, {"x": found}, ()) for rows, found in cases)
    worst = combine([found for _, found in cases])
    return ValidationReport(engine, True, None, tried, {"x": worst})


def test_how_far_values_are_off() -> None:
    """Deviations of the chosen artifact at some sizes, and of others over all sizes."""
    ones = torch.ones(100)
    made = compare(ones + 1e-5, ones, BAND, False)
    assert sum(made.ulp_bins) == sum(made.error_bins) == 100
    bins = (5, 0, 4, 1)
    sizes = (1, 2, 31, 32, 33)
    some = [(n, replace(made, elements=10 * n, ulp_bins=bins)) for n in sizes]
    reports = [report("aoti", *some), report("lanes", *some)]
    kept = kept_of("x", reports, "aoti")
    shown = ["aoti, 33 rows", "aoti, 32 rows", "aoti, 31 rows", "lanes"]
    assert [each.name for each in kept] == shown
    few = kept_of("x", [report("aoti", (1, replace(made, elements=3)))], "aoti")
    assert [each.name for each in few] == ["aoti, 1 row"]
    figure = ulp_figure("all of it", kept)
    assert figure is not None
    for name in ("aoti, 33 rows", "lanes"):
        assert f"; {name}: 50% from 0, 40% from 2, 10% from 4" in figure.svg
    errors = error_figure("all of it", kept)
    assert errors is not None and "lanes: 100% from 1e-5" in errors.svg
    older = [(n, replace(found, ulp_bins=(), error_bins=())) for n, found in some]
    none = kept_of("x", [report("aoti", *older)], "aoti")
    assert ulp_figure("all of it", none) is error_figure("all of it", none) is None


def test_values_that_are_the_models_own_need_no_plot() -> None:
    same = compare(torch.ones(100), torch.ones(100), BAND, False)
    kept = kept_of("x", [report("aoti", (100, same))], "aoti")
    assert error_figure("all of it", kept) is ulp_figure("all of it", kept) is None


@pytest.mark.parametrize("found", [[0, 2, 2, 2], [0, 1, 2, 1]])
def test_rows_of_another_class(found: list[int]) -> None:
    """A table of changed classes, or one sentence if none changed; nothing without a record."""
    made = compare(torch.eye(3)[found], torch.eye(3)[[0, 1, 2, 1]], BAND, True)
    text = agreement_page(made)
    if found[1] == 1:
        assert "all 12 values of aoti" in text
        close = replace(made, max_abs=0.1)
        assert "no row changes its class" in agreement_page(close)
        return
    read = check(text)
    assert re.search(r"the model's class\s*now z\s*y\s*2\s", read.text)
    assert "the model's class" not in agreement_page(replace(made, reclassified=()))


def agreement_page(found: Deviation) -> str:
    """The page of a version whose chosen artifact has this deviation."""
    judged = ValidationReport("aoti", True, None, worst={"probabilities": found})
    return page_of(validation={"aoti": judged.to_dict()})


def test_of_each_metric_a_plot_or_why_there_is_none() -> None:
    half, nothing = Roc((0.5, 1.0), (0.1, 1.0)), Histogram.over(np.array([math.nan]))
    curves: dict[str, Curve] = {
        "auc": half,
        "perfect": Roc((0.5, 1.0), (0.0, 1.0)),
        "own": NotDrawn("<b>it is odd"),
        "width": Residual(Histogram.over(np.arange(9.0)).plus(np.arange(9.0))),
        "relative": Residual(nothing, relative=True),
    }
    read = check(metrics_page(curves))
    assert len(read.all("svg")) == 2
    said = [line for line in read.text.splitlines() if "is not drawn: " in line]
    assert all(line.endswith(".") for line in said)
    names = {line.removeprefix(f"{V3}: ").partition(" is not drawn")[0] for line in said}
    assert names == {"perfect", "own", "relative", "older"} and len(said) == 4
    assert f"{V3}: own is not drawn: <b>it is odd." in said
    assert metrics_page({}).count("is not drawn: ") == 5


def metrics_page(curves: Mapping[str, Curve]) -> str:
    """The page of a version with metrics, of which these curves are recorded."""
    data = json.loads(json.dumps(MANIFEST))
    names = ("auc", "perfect", "own", "width", "older")
    data["targets"][V3]["metrics"] = dict.fromkeys(names, 0.5)
    return page_of(data, metrics={name: asdict(curve) for name, curve in curves.items()})
