"""Hooks of the site (mkdocs.yml).

README.md is its first page. Pages and files outside docs/ that a page links to are part of it, and
their links are made to fit. So each text stands in one place, and its links work in both. The page
on the command has what each command's --help prints.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from mkdocs.structure.files import File

from pipeline.cli.main import main

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")


def place(file: Path) -> str:
    """Where a file of the repository is in the site."""
    path = file.relative_to(ROOT).as_posix()
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def linked(page: Path) -> dict[str, Path]:
    """The files of the repository that a page links to, by the text of the link."""
    found = {link: (page.parent / link).resolve() for link in LINK.findall(page.read_text())}
    return {link: file for link, file in found.items() if file.is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [ROOT / "README.md", *(Path(f.abs_src_path) for f in files.documentation_pages())]
    seen = set(pages)
    while pages:
        page = pages.pop()
        for file in (page, *linked(page).values()):
            if files.get_file_from_path(place(file)) is None:
                files.append(File.generated(config, place(file), abs_src_path=str(file)))
            if file.suffix == ".md" and file not in seen:
                seen.add(file)
                pages.append(file)
    return files


def commands() -> str:
    """What `pipeline COMMAND --help` prints, in the groups of `pipeline --help`."""
    text = ""
    for title, group in main.sections.items():
        text += f"\n## {title}\n"
        for command in group:
            text += command_help(command, f"pipeline {command.name}")
            for inner in getattr(command, "commands", {}).values():
                text += command_help(inner, f"pipeline {command.name} {inner.name}")
    return text


def command_help(command: click.Command, name: str) -> str:
    shown = click.Context(command, info_name=name, max_content_width=80).get_help()
    return f"\n### {name}\n\n```text\n{shown}\n```\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "reference/command.md":
        return markdown + commands()
    targets = linked(Path(page.file.abs_src_path))
    folder = posixpath.dirname(page.file.src_uri)

    def fit(link: re.Match[str]) -> str:
        file = targets.get(link[0])
        return posixpath.relpath(place(file), folder or ".") if file else link[0]

    return LINK.sub(fit, markdown)
