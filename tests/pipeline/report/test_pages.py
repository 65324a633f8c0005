"""Pages: whole in themselves, read by people on any screen, and no text of others acts in them."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.report.figures import ulp_figure
from pipeline.report.pages import bench_page, difference_page, publish, version_page
from registry.bundle.bundle import Bundle
from registry.bundle.manifest import Manifest
from registry.history.event_log import Event
from registry.promotion import Decision
from registry.store.registry import Registry
from registry.version import PROMOTION, Promotion, Version
from runtime.checked import Tolerance, compare
from soa.records import as_record
from stages.reports import BenchmarkReport, Timing, ValidationReport
from tests.fuzz.hostile import require_plain
from tests.fuzz.test_records import MANIFEST, SOUND, V3, compared, opened
from tests.models import bundles

HOSTILE = "<script>alert(1)</script> \x1b[31m \u202elive\u202c </svg> {{ 7 * 7 }} $x_1$ \U0001d54f"
WHEN = datetime(2026, 11, 23, 10, 20, 30, tzinfo=UTC)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BAND = Tolerance(1e-5, 1e-4)
_VOID = {"meta", "br", "link", "img", "hr"}


class Read(html.parser.HTMLParser):
    """What a page has, element by element; closed in the order in which they were opened."""

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
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def check(page: str) -> Read:
    """What holds for every page."""
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


def full_page(text: str = "good") -> str:
    decision = Decision("speed", False, text, "1.1", f"slow: {text}", override=text)
    promotion = Promotion("production", text, WHEN.isoformat(), (decision,))
    event = Event("promotion", "jets", {}, {"production": 3}, "production", 3, reason=text,
                  time=WHEN, state="done")  # fmt: skip
    data = json.loads(json.dumps(MANIFEST)) | {"description": text}
    data["targets"][V3]["candidates"]["exported"]["reason"] = text
    bundle = opened(as_record(Manifest, data))
    return version_page(bundle, version(**{PROMOTION + "production": promotion.to_json()}), [event])


def test_a_version() -> None:
    read = check(full_page())
    for said in ("jets/3", "@production", "aoti", "exported failed", "Speed", "speed", "overridden",
                 "2026-11-23 10:20:30", "x", "probabilities"):  # fmt: skip
        assert said in read.text, said
    (plot,) = read.all("svg")
    assert "aoti: 11.5 µs at 10, 210 µs at 1,000" in str(plot["aria-label"])


def test_text_of_others_is_text() -> None:
    read = check(full_page(HOSTILE))
    assert "<script>alert(1)</script> \\x1b[31m \\u202elive\\u202c </svg> {{ 7 * 7 }}" in read.text


def test_without_benchmarks_and_without_a_registry() -> None:
    data = json.loads(json.dumps(MANIFEST))
    for candidate in data["targets"][V3]["candidates"].values():
        candidate["benchmark"] = {}
    read = check(version_page(opened(as_record(Manifest, data))))
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
    """WCAG: 4.5 for text, 3 for lines."""
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
    """Nothing is wider than the screen but tables, which scroll by themselves; plots are drawn."""
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


def test_how_far_values_are_off() -> None:
    """A curve over powers of two of ULPs; reports of earlier releases have none."""
    made = compare(torch.linspace(1, 2, 100) + 1e-5, torch.linspace(1, 2, 100), BAND, False)
    reports = [ValidationReport("aoti", True, None, worst={"x": made})]
    assert sum(made.ulp_bins) == 100
    spread = replace(made, ulp_bins=(5, 0, 3, 1))
    figure = ulp_figure("all of it", "x", [replace(reports[0], worst={"x": spread})])
    assert figure is not None
    assert 'aria-label="all of it; aoti: 5 at 0, 3 at 2, 1 at 4"' in figure.svg
    older = replace(made, ulp_bins=())
    assert ulp_figure("all of it", "x", [replace(reports[0], worst={"x": older})]) is None
