"""Text from others stays plain text wherever it is shown: no terminal commands, no markup."""

from __future__ import annotations

import html.parser
import json
import logging
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from markdown_it import MarkdownIt

from pipeline.cli.main import main
from pipeline.errors import ConfigError
from pipeline.report.difference import describe_difference
from pipeline.report.pages import version_page
from pipeline.report.tables import show
from pipeline.report.versions import (
    describe_benchmark,
    describe_bundle,
    describe_decisions,
    describe_history,
    describe_validation,
    describe_versions,
)
from registry.bundle.bundle import Bundle
from registry.bundle.manifest import Manifest
from registry.history.event_log import Event
from registry.history.event_log import markdown as event_markdown
from registry.mlflow.description import markdown, parameters
from registry.promotion import Decision
from registry.store.registry import Registry
from registry.version import Version
from soa.errors import SoaPipelineError
from soa.records import as_record
from soa.text import in_html, in_markdown, logger, plain
from stages.reports import BenchmarkReport, Timing, ValidationReport
from tests.fuzz.hostile import printed, require_plain, texts
from tests.fuzz.test_records import DIGEST, MANIFEST, V3, compared, opened
from tests.models import bundles


@given(texts)
def test_plain_text_is_one_line_without_control_characters(text: str) -> None:
    shown = plain(text)
    require_plain(shown)
    assert "\n" not in shown
    assert plain(shown) == shown
    require_plain(plain(text, "\n"))


@pytest.mark.parametrize("text", ["ok [only for staging], never", "/etc", "é\u00a0ü"])
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


@given(texts)
def test_an_error_has_one_plain_line_for_each_problem(text: str) -> None:
    for error, lines in ((SoaPipelineError(text), 1), (ConfigError(text, text), 2)):
        require_plain(str(error))
        assert len(str(error).split("\n")) == lines


class _Data(html.parser.HTMLParser):
    """Collects the text of a page, and counts its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags = "", 0

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags += 1


@given(texts)
def test_html_shows_the_plain_text(text: str) -> None:
    parser = _Data()
    parser.feed(f"<td>{in_html(text)}</td>")
    parser.close()
    assert (parser.tags, parser.text) == (1, plain(text, "\n"))


@given(texts)
def test_markdown_shows_the_plain_text(text: str) -> None:
    """In a paragraph, and in a cell of a table."""
    shown = in_markdown(text)
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for source in (shown, f"| a |\n| --- |\n| {shown} |"):
        inline = [token for token in parser.parse(source) if token.type == "inline"]
        children = (inline[-1].children or []) if inline else []
        kinds = {child.type for child in children}
        assert kinds <= {"text", "text_special", "softbreak"}, source
        rendered = "".join(child.content for child in children)
        assert single_spaced(rendered) == single_spaced(plain(text, " "))


def single_spaced(text: str) -> str:
    """The text as a browser shows it, with one space for any number of them."""
    return re.sub(r"[ \t\n]+", " ", text).strip()


def everywhere(text: str) -> Bundle:
    """A bundle with that text in every free-text field of its manifest."""
    data = json.loads(json.dumps(MANIFEST))
    data["description"] = data["capture"]["torchscript_note"] = text
    data["provenance"] |= {
        "created": text, "git_commit": text, "config_sha256": text, "python": text,
        "tools": {"torch": text}, "host": {text: text},
    }  # fmt: skip
    data["tolerances"][text] = {"atol": 0.0, "rtol": 0.0}
    failed, valid = (data["targets"][V3]["candidates"][e] for e in ("exported", "aoti"))
    failed["reason"] = text
    valid |= {"facts": {text: [text]}, "options": {text: text}}
    valid["worst"][text] = valid["worst"]["probabilities"]
    return opened(as_record(Manifest, data))


@given(texts)
def test_the_texts_of_a_bundle_are_printed_plain(text: str) -> None:
    bundle = everywhere(text)
    with printed():
        show(describe_bundle(bundle, version(text)))
        show([describe_versions([version(text)])])
        show(describe_difference(compared(everywhere("x"), bundle)))


@given(texts)
def test_pages_and_mlflow_show_the_texts_of_a_bundle_plain(text: str) -> None:
    bundle = everywhere(text)
    pages = markdown(bundle), version_page(bundle, version(text))
    require_plain("".join([*pages, *parameters(bundle.manifest).values()]))


def version(text: str) -> Version:
    """A version with that text in each of its fields."""
    by_target = {V3: text}
    return Version(
        text, 1, DIGEST, (text,), by_target, by_target, {}, datetime.now(UTC), text, text,
        {"origin": json.dumps({"registry": text, "version": text})},
    )  # fmt: skip


@given(texts)
def test_an_event_and_its_decisions_are_shown_plain(text: str) -> None:
    decision = Decision(text, False, text, text, text, text)
    for kind in ("promotion", "approval", "build", "found", "removal"):
        event = Event(
            kind, text, {text: 1}, {text: 2}, text, 2, {text: text}, (decision,), (text,), text,
            text, {text: text}, text, by=text,
        )  # fmt: skip
        with printed():
            show([describe_history(text, [event])])
        require_plain(event_markdown(event))
    with printed():
        show(describe_decisions(text, [decision]))


@given(texts)
def test_reports_are_printed_plain(text: str) -> None:
    timing = {text: Timing(1.0, 1.0, 1.0, 1)}
    with printed():
        show(describe_validation(text, [ValidationReport.failed(text, text)]))
        show([describe_benchmark(text, BenchmarkReport({text: timing}, text, below=((5, text),)))])


@given(texts)
def test_a_log_record_is_one_plain_line(text: str) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    log, keep = logger("soa-pipeline fuzz"), Keep()
    log.addHandler(keep)
    try:
        log.warning("%s: %d, %s", text, 3, SoaPipelineError(text))
    finally:
        log.removeHandler(keep)
    (record,) = records
    require_plain(record.getMessage())
    assert "\n" not in record.getMessage()


# -- through the commands --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Registry:
    """jets/1, in production."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "registry.db").write_bytes(empty_database.read_bytes())
    store = Registry(f"sqlite:///{folder}/registry.db")
    bundles.write_bundle(folder / "bundle", Manifest.from_json(json.dumps(MANIFEST)))
    version = store.register(Bundle.open(folder / "bundle"))
    store.promote(version, "production", [Decision("digests", True, "", "", "")])
    return store


def run(registry: Registry, *arguments: str) -> str:
    """The output of a command, which succeeds, or fails with one line of ours."""
    result = CliRunner().invoke(main, [*arguments, "--registry", registry.uri])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    require_plain(result.output)
    assert "Traceback" not in result.output
    return result.output


# Texts that can be arguments of a command.
of_any_argument = pytest.mark.parametrize(
    "text",
    ["", "[/foo]", "\x1b[31mred\x1b]0;title\x07", "a\nb\r\nc", "../../etc", "A" * 10_000, "\udcff"],
)


@of_any_argument
def test_commands_print_others_texts_plain(registry: Registry, text: str, tmp_path: Path) -> None:
    """`run` checks what is printed."""
    run(registry, "approve", "jets/1", "--as", "ada", "--reason", text)
    run(registry, "approve", "jets/1", "--as", text)
    run(registry, "rollback", "jets", "--reason", text)
    with registry.client(write=True) as client:
        for key in ("target.cpu.x86-64-v2", "chosen.cpu.x86-64-v3", "origin", "promotion.mine"):
            if text.isprintable() or text[:1] < "\ud800":
                client.set_model_version_tag("jets", "1", key, text[:4000])
    for command in ("history", "ls"):
        assert "jets/1" in run(registry, command, "jets")
    for words in (("policy",), ("ls",), ("show", "jets/1"), ("show", "jets/1", "--json")):
        run(registry, *words)
    run(registry, "promote", "jets/1", "--to", text or "x", "--override", text, "--reason", text)
    for command in ("pull", "export"):
        run(registry, command, "jets/1", str(tmp_path / "out"))


@of_any_argument
def test_commands_print_the_names_of_folders_plain(
    registry: Registry, text: str, tmp_path: Path
) -> None:
    if "/" in text or len(text) >= 200:
        pytest.skip("no folder has this name")
    (tmp_path / f"x{text}").mkdir()
    for command in ("push", "import", "show"):
        run(registry, command, str(tmp_path / f"x{text}"))


@pytest.mark.parametrize(
    "reason", ["log in [/data/jets]", "ok [only for staging], never production"]
)
def test_the_history_has_a_reason_whole(registry: Registry, reason: str) -> None:
    """Although Rich takes brackets for markup."""
    run(registry, "approve", "jets/1", "--as", "ada", "--reason", reason)
    assert reason in " ".join(run(registry, "history", "jets").split())
