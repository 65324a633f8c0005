"""The documentation builds as a site, with warnings as errors, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("mkdocs", "material", "mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site. Building it fails for any warning."""
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder


def test_links_lead_somewhere(site: Path) -> None:
    """Also links in tables and headings and to files, which MkDocs does not check."""
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            path, _, name = link.partition("#")
            if re.match(r"[a-z]+:", path) or page.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, link)
            if name and target.suffix == ".html":
                assert name in names[target], (page.name, link)


def test_the_site_describes_the_command(site: Path) -> None:
    command = (site / "reference/command.html").read_text()
    for name in ("init", "run", "promote", "apply", "registry-gc", "doctor"):
        assert f'id="pipeline-{name}"' in command, name


def test_the_site_describes_the_api(site: Path) -> None:
    api = (site / "reference/api.html").read_text()
    for name in ("load", "Session", "Collection", "Layout", "Registry", "apply"):
        assert re.search(rf'id="[\w.]*\.{name}"', api), name


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        elements = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        urls = re.findall(r'\b(?:src|href)="([^"]+)"', "\n".join(elements))
        assert not [url for url in urls if url.startswith(("http:", "https:", "//"))], page
