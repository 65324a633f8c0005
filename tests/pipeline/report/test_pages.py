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

from pipeline.report.figures import deviations_to_draw, error_figure, ulp_figure
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


class Page(html.parser.HTMLParser):
    """The elements and the text of a page; each element must be closed in the one it opened in."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check(source: str) -> Page:
    """Checks what must hold for every page: no other files, no scripts, accessible elements."""
    page = Page(source)
    require_plain(source)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not re.search(r"url\((?!#)|@import", source)
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "xlink:href", "src", "action"):
            assert str(attributes.get(name, "#"))[0] in "#/"
    ids = [str(attributes["id"]) for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("svg"):
        assert attributes["role"] == "img" and attributes["aria-label"]
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    return page


def version(**tags: str) -> Version:
    """jets/3 in production, with these tags."""
    status, engines = {V3: "verified"}, {V3: "aoti"}
    return Version("jets", 3, "ab" * 32, ("production",), status, engines, {}, WHEN, "r", "", tags)


def page_of(
    data: Mapping[str, Any] = MANIFEST,
    registered: Version | None = None,
    events: Sequence[Event] = (),
    **reports: object,
) -> str:
    """The page of a bundle with this manifest and these reports of the target V3."""
    with TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        bundles.write_bundle(bundle, as_record(Manifest, data))
        for name, report in reports.items():
            (bundle / f"reports/{name}.json").write_text(json.dumps({V3: report}))
        seal(bundle)
        return version_page(Bundle.open(bundle), registered, events)


def full_page(text: str = "good") -> str:
    """A page with every part; `text` stands wherever others may write."""
    decision = Decision("speed", False, text, "1.1", f"slow: {text}", override=text)
    promotion = Promotion("production", text, WHEN.isoformat(), (decision,))
    event = Event("promotion", "jets", {}, {"production": 3}, "production", 3, reason=text,
                  time=WHEN, state="done")  # fmt: skip
    registered = version(**{PROMOTION + "production": promotion.to_json()})
    validations = (report("aoti"), ValidationReport.failed("exported", text))
    times = {
        "n=10": {"aoti": Timing(11.5, 11, 12, 7)},
        "n=1000": {"aoti": Timing(210, 200, 220, 7)},
    }
    return page_of(
        {**MANIFEST, "description": text}, registered, [event],
        validation={validation.engine: validation.to_dict() for validation in validations},
        benchmark=BenchmarkReport(times, "aoti").to_dict(),
    )  # fmt: skip


def test_the_page_of_a_version_has_its_facts() -> None:
    page = check(full_page("seen by Ada"))
    for fact in ("jets/3", "@production", "aoti", "exported failed", "Speed", "speed", "overridden",
                 "2026-11-23 10:20:30", "seen by Ada", "probabilities"):  # fmt: skip
        assert fact in page.text, fact


def test_the_plot_of_a_version_has_its_numbers_as_text() -> None:
    (plot,) = check(full_page()).all("svg")
    assert "aoti: 11.5 µs at 10, 210 µs at 1,000" in str(plot["aria-label"])


def test_text_of_others_is_text() -> None:
    page = check(full_page(HOSTILE))
    assert "<script>alert(1)</script> \\x1b[31m \\u202elive\\u202c </svg> {{ 7 * 7 }}" in page.text


def test_a_bundle_without_benchmarks_has_a_page_without_plots() -> None:
    """It need not be registered."""
    page = check(page_of())
    assert "Agreement" in page.text and not page.all("svg")


@pytest.fixture
def difference() -> dict[str, Any]:
    """A bundle, and one with a hostile description."""
    data = json.loads(json.dumps(MANIFEST)) | {"description": HOSTILE}
    return compared(SOUND, opened(as_record(Manifest, data)))


def test_the_page_of_a_difference_shows_hostile_text_as_text(difference: dict[str, Any]) -> None:
    check(difference_page(difference))


def test_the_page_of_a_difference_names_no_folder_of_the_user(difference: dict[str, Any]) -> None:
    difference["a"]["ref"] = "/home/ada/bundle"
    assert "ada" not in difference_page(difference)


def test_the_page_of_a_benchmark_has_a_plot() -> None:
    times = {f"n={n}": {HOSTILE: Timing(n * 1.0, n * 0.9, n * 1.2, 7)} for n in (1, 10)}
    page = check(bench_page(HOSTILE, {V3: BenchmarkReport(times, HOSTILE)}))
    assert "$x_1$" in page.text and len(page.all("svg")) == 1


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


def contrast(color: str, other: str) -> float:
    """The contrast of two colours by WCAG 2, from 1 to 21."""
    dark, light = sorted((luminance(color), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """The relative luminance of `#rgb` or `#rrggbb` by WCAG 2: 0 is black and 1 is white."""
    digits = color[1:] if len(color) == 7 else "".join(digit * 2 for digit in color[1:])
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_mlflow_keeps_the_page(empty: Registry, tmp_path: Path) -> None:
    bundles.write_bundle(tmp_path / "bundle", as_record(Manifest, MANIFEST))
    bundle = Bundle.open(tmp_path / "bundle")
    registered = empty.register(bundle)
    file = publish(empty, registered, bundle, tmp_path / "reports")
    assert file == tmp_path / "reports" / "jets-1.html"
    with empty.client() as client:
        stored = client.download_artifacts(str(registered.run_id), "report.html", str(tmp_path))
    assert Path(stored).read_text() == file.read_text()
    check(file.read_text())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_the_screen_of_a_browser(width: int, tmp_path: Path) -> None:
    """Only tables are wider than the screen, and can be scrolled; plots are drawn, and no script
    of the page runs. The page lies in a frame, which another page measures by a script."""
    (tmp_path / "report.html").write_text(full_page(HOSTILE + " long" * 40), encoding="utf-8")
    frame = """<iframe id=f src=report.html style="width:%dpx;height:900px;border:0"></iframe>
        <script>onload = () => {
        const d = f.contentDocument, e = d.documentElement, box = x => x.getBoundingClientRect()
        document.title = JSON.stringify({
            wide: e.scrollWidth, inner: e.clientWidth, scripts: d.scripts.length,
            plot: box(d.querySelector("svg")).height,
            left: [...d.querySelectorAll("h2")].map(x => box(x).left)})
        }</script>"""
    (tmp_path / "look.html").write_text(frame % width)
    process = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path}/profile",
         f"--window-size={width + 50},1000", (tmp_path / "look.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search("<title>(.*)</title>", process.stdout)
    assert title is not None, process.stderr
    measured: dict[str, Any] = json.loads(title[1])
    assert measured["wide"] <= measured["inner"] and measured["inner"] > 0.9 * width
    assert measured["scripts"] == 0 and measured["plot"] > 150
    assert all(0 <= left < width / 3 for left in measured["left"])


def report(engine: str, *cases: tuple[int, Deviation]) -> ValidationReport:
    """The report on an engine with these deviations of the output x, by the number of rows."""
    tried = tuple(CaseReport({"n": rows}, {"x": deviation}, ()) for rows, deviation in cases)
    worst = combine([deviation for _, deviation in cases])
    return ValidationReport(engine, True, None, tried, {"x": worst})


def deviation_of_100() -> Deviation:
    """Of a hundred values, each of which is off by about 1e-5."""
    ones = torch.ones(100)
    return compare(ones + 1e-5, ones, BAND, False)


def cases_of_five_sizes() -> list[tuple[int, Deviation]]:
    """Half of the values have 0 ULP, and others 2 or 3 (bin 2), 4 to 7 (bin 3)."""
    deviation = replace(deviation_of_100(), ulp_bins=(5, 0, 4, 1))
    return [(rows, replace(deviation, elements=10 * rows)) for rows in (1, 2, 31, 32, 33)]


def test_each_value_is_in_one_bin_of_each_figure() -> None:
    deviation = deviation_of_100()
    assert sum(deviation.ulp_bins) == sum(deviation.error_bins) == 100


def test_the_chosen_artifact_is_shown_at_its_largest_sizes_and_others_over_all() -> None:
    cases = cases_of_five_sizes()
    shown = deviations_to_draw("x", [report("aoti", *cases), report("lanes", *cases)], "aoti")
    names = ["aoti, 33 rows", "aoti, 32 rows", "aoti, 31 rows", "lanes"]
    assert [curve.name for curve in shown] == names


def test_a_chosen_artifact_with_few_values_is_shown_all_the_same() -> None:
    few = replace(deviation_of_100(), elements=3)
    shown = deviations_to_draw("x", [report("aoti", (1, few))], "aoti")
    assert [curve.name for curve in shown] == ["aoti, 1 row"]


def test_the_figures_have_their_shares_as_text() -> None:
    cases = cases_of_five_sizes()
    shown = deviations_to_draw("x", [report("aoti", *cases), report("lanes", *cases)], "aoti")
    ulps, errors = ulp_figure("all of it", shown), error_figure("all of it", shown)
    assert ulps is not None and errors is not None
    for name in ("aoti, 33 rows", "lanes"):
        assert f"; {name}: 50% from 0, 40% from 2, 10% from 4" in ulps.svg
    assert "lanes: 100% from 1e-5" in errors.svg


def test_a_report_without_bins_has_no_figures() -> None:
    """As reports of older versions."""
    older = [
        (rows, replace(deviation, ulp_bins=(), error_bins=()))
        for rows, deviation in cases_of_five_sizes()
    ]
    shown = deviations_to_draw("x", [report("aoti", *older)], "aoti")
    assert ulp_figure("all of it", shown) is error_figure("all of it", shown) is None


def test_values_that_are_the_models_own_need_no_plot() -> None:
    same = compare(torch.ones(100), torch.ones(100), BAND, False)
    shown = deviations_to_draw("x", [report("aoti", (100, same))], "aoti")
    assert error_figure("all of it", shown) is ulp_figure("all of it", shown) is None


CLASSES = [0, 1, 2, 1]
"""The model's class of each of four rows."""


def classified(*classes: int) -> Deviation:
    """Of an artifact that gives the rows these classes, each with certainty."""
    return compare(torch.eye(3)[[*classes]], torch.eye(3)[CLASSES], BAND, True)


def test_a_row_of_another_class_is_in_a_table() -> None:
    page = check(agreement_page(classified(0, 2, 2, 2)))
    assert re.search(r"the model's class\s*now z\s*y\s*2\s", page.text)


def test_changed_classes_that_were_not_recorded_have_no_table() -> None:
    text = agreement_page(replace(classified(0, 2, 2, 2), reclassified=()))
    assert "the model's class" not in text


def test_values_that_are_the_models_own_are_said_in_a_sentence() -> None:
    assert "all 12 values of aoti" in agreement_page(classified(*CLASSES))


def test_close_values_that_change_no_class_are_said_in_a_sentence() -> None:
    text = agreement_page(replace(classified(*CLASSES), max_abs=0.1))
    assert "no row changes its class" in text


def agreement_page(deviation: Deviation) -> str:
    """The page of a version whose chosen artifact has this deviation."""
    validation = ValidationReport("aoti", True, None, worst={"probabilities": deviation})
    return page_of(validation={"aoti": validation.to_dict()})


def test_each_metric_has_a_plot_or_a_sentence_why_there_is_none() -> None:
    nothing = Histogram.over(np.array([math.nan]))
    curves: dict[str, Curve] = {
        "auc": Roc((0.5, 1.0), (0.1, 1.0)),
        "perfect": Roc((0.5, 1.0), (0.0, 1.0)),
        "own": NotDrawn("<b>it is odd"),
        "width": Residual(Histogram.over(np.arange(9.0)).plus(np.arange(9.0))),
        "relative": Residual(nothing, relative=True),
    }
    page = check(metrics_page(curves))
    assert len(page.all("svg")) == 2  # of auc and width
    sentences = [line for line in page.text.splitlines() if "is not drawn: " in line]
    assert all(line.endswith(".") for line in sentences)
    names = [line.removeprefix(f"{V3}: ").partition(" is not drawn")[0] for line in sentences]
    assert sorted(names) == ["older", "own", "perfect", "relative"]
    assert f"{V3}: own is not drawn: <b>it is odd." in sentences


def test_metrics_without_recorded_curves_are_not_drawn() -> None:
    assert metrics_page({}).count("is not drawn: ") == len(METRICS)


METRICS = ("auc", "perfect", "own", "width", "older")


def metrics_page(curves: Mapping[str, Curve]) -> str:
    """The page of a version with metrics, of which these curves are recorded."""
    data = json.loads(json.dumps(MANIFEST))
    data["targets"][V3]["metrics"] = dict.fromkeys(METRICS, 0.5)
    return page_of(data, metrics={name: asdict(curve) for name, curve in curves.items()})
