"""The commands that show versions, and what this host can do; they change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import Answer, command, html_option, open_ref, print_answer, write_page
from pipeline.cli.applying import explain_file
from pipeline.cli.completion import complete_names, complete_refs

if TYPE_CHECKING:
    from pipeline.report import Part
    from registry.store import Registry
    from registry.version import Version
    from runtime.opening import Opened


@command()
@click.argument("name", required=False, shell_complete=complete_names)
def ls(name: str | None, registry: Registry) -> Answer:
    """List all models with their versions, or the versions of NAME."""
    names = [name] if name else [model.name for model in registry.list()]
    versions_of = {model: registry.versions(model) for model in names}
    versions = [version for of_model in versions_of.values() for version in of_model]

    def describe() -> Iterator[Part]:
        from pipeline.report import describe_versions

        if versions:
            yield describe_versions(versions)
        elif name:
            yield f"{name} has no version"
        else:
            yield "the registry is empty: fill it with `pipeline run CONFIG`"

    data = {model: [*map(_describe_version, of_model)] for model, of_model in versions_of.items()}
    return Answer(data, describe())


def _describe_version(version: Version) -> dict[str, Any]:
    """Returns a version as data for JSON."""
    return {
        "version": version.ref,
        "digest": version.digest,
        "aliases": list(version.aliases),
        "targets": dict(version.targets),
        "chosen": dict(version.chosen),
        "annexes": dict(version.annexes),
        "created": version.created.isoformat(),
        "source": version.source,
    }


@command()
@click.argument("ref", metavar="REF|FILE", shell_complete=complete_refs)
@click.argument("other", metavar="[REF]", required=False, shell_complete=complete_refs)
@click.option("--bom", "document", flag_value="bom", help="Print a CycloneDX bill of materials.")
@click.option("--provenance", "document", flag_value="provenance", help="Print SLSA provenance.")
@html_option
def show(
    ref: str, other: str | None, html: Path | None, document: str | None, registry: Registry
) -> Answer:
    """Show one version, what changed between two, or how a scored FILE was made.

    With one REF: blocks, targets, candidates, deviations, times, provenance. With two: what changed
    from the first to the second, in weights, config, blocks, targets, deviations, times and tools.
    Nothing is measured again: deviations and times were recorded when each was built. With a FILE
    that `pipeline apply` wrote: the version that made it, its gates, its inputs.
    """
    if document is not None:
        if other is not None or html is not None:
            raise click.UsageError(f"--{document} prints one version as JSON, and nothing else")
        return _export_document(ref, document, registry)
    if other is not None:
        return _compare_versions(ref, other, html, registry)
    if _is_file(ref):
        if html is not None:
            raise click.UsageError("--html is for versions: `pipeline apply --html` draws a job")
        return explain_file(Path(ref))
    from pipeline.report import describe_bundle
    from stages.reference import read_proof

    opened = open_ref(ref, registry)
    bundle, version = opened.bundle, opened.version
    page_lines = write_page(html, lambda: _make_page(opened, registry))
    counts, notes = read_proof(bundle)
    data = {
        "version": _describe_version(version) if version else None,
        "manifest": json.loads(bundle.manifest.to_json()),  # trusted
        "annexes": {
            target: {"digest": annex.digest, **json.loads(annex.record.to_json())}  # trusted
            for target, annex in bundle.annexes.items()
        },
        "reference": {"outputs": [asdict(output) for output in counts], "notes": notes},
    }
    return Answer(data, page_lines or describe_bundle(bundle, version))


def _export_document(ref: str, kind: str, registry: Registry) -> Answer:
    """Returns the answer with a version in a format of other tools: `bom` is a CycloneDX bill of
    materials, `provenance` is SLSA provenance. It is JSON with `--json` and without."""
    from pipeline.report import bill_of_materials, build_provenance
    from registry.bundle import Bundle

    bundle = Bundle.open(open_ref(ref, registry).bundle.path, verify=False)  # without annexes
    data = bill_of_materials(bundle) if kind == "bom" else build_provenance(bundle)
    return Answer(data, json.dumps(data, indent=1).splitlines())


def _is_file(ref: str) -> bool:
    """True if a REF is the path of a file. A name without a slash or a suffix is a model's, even if
    a file is called so."""
    return ("/" in ref or bool(Path(ref).suffix)) and Path(ref).is_file()


def _make_page(opened: Opened, registry: Registry) -> str:
    """Make the page about a version with its history, or about a bundle in a folder."""
    from pipeline.report import version_page  # it imports torch, and `show` alone does not

    version = opened.version
    events = registry.history(version.name) if version else []
    return version_page(opened.bundle, version, events)


@command()
@click.argument("a", shell_complete=complete_refs)
@click.argument("b", shell_complete=complete_refs)
@html_option
def diff(a: str, b: str, html: Path | None, registry: Registry) -> Answer:
    """Show what changed from A to B."""
    return _compare_versions(a, b, html, registry)


def _compare_versions(a: str, b: str, html: Path | None, registry: Registry) -> Answer:
    """Returns the answer that says what changed from version A to B; writes the page `html`."""
    from pipeline.report import describe_difference, difference_page
    from pipeline.report import diff as compare

    difference = compare(registry, a, b)
    page_lines = write_page(html, lambda: difference_page(difference))
    return Answer(difference, [*describe_difference(difference), *page_lines])


@command()
def doctor(registry: Registry) -> Answer:
    """Say what this host can build and run, and what to do about the rest.

    Exits with 1 if something necessary is missing.
    """
    from pipeline.cli.doctor import examine

    findings = list(examine(registry))
    lines = []
    for finding in findings:
        cure = f" — {finding.cure}" if finding.cure else ""
        lines.append(f"{finding.status:8} {finding.what:14} {finding.found}{cure}")
    passed = all(finding.status != "missing" for finding in findings)
    return Answer([asdict(finding) for finding in findings], lines, passed)


@command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True,
              help="0: any free port.")  # fmt: skip
def ui(host: str, port: int, registry: Registry) -> None:
    """Show the registry in a browser: models, versions, history, two versions side by side.

    It only reads. It serves until Ctrl-C. There is no password, so only this host can connect,
    unless --host says otherwise.
    """
    from pipeline.report import open_listener, serve_site

    registry.list()  # raises an error now if the registry cannot be reached
    with open_listener(host, port) as listener, suppress(KeyboardInterrupt):
        bound_port = listener.getsockname()[1]  # with --port 0, the one that was free
        host_in_url = f"[{host}]" if ":" in host else host  # brackets around IPv6
        url = f"http://{host_in_url}:{bound_port}/"
        print_answer(Answer({"url": url}, [f"{registry.shown} is at {url}; Ctrl-C ends it"]))
        serve_site(registry, host, listener)
