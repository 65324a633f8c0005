"""The commands that build a version, add a target to it, and write its C++ header."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import Answer, command, make_say, open_ref, show_steps
from pipeline.cli.completion import complete_refs

if TYPE_CHECKING:
    from pipeline.building import Added, RunResult
    from pipeline.report import Part
    from registry.store import Registry


def _work_option(text: str) -> Callable[[Any], Any]:
    """Returns the decorator that adds the option `--work`. `text`: the end of its help."""
    return click.option(
        "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("pipeline-work"),
        show_default=True, help=f"Folder for the results of the stages{text}",
    )  # fmt: skip


@command()
@click.argument("config", type=click.Path(dir_okay=False))
@_work_option("; keep it, and re-runs are quick.")
@click.option(
    "--quick", is_flag=True, help="For work in progress: build only one engine, in seconds."
)
def run(config: str, work: Path, quick: bool, registry: Registry) -> Answer:
    """Build, validate, package and register the model that CONFIG describes.

    If nothing has changed, a second run does no work. A run interrupted by Ctrl-C can be continued:
    give the same command again.
    """
    from engines.processes import collect_garbage_seldom
    from pipeline.building import run as run_pipeline

    collect_garbage_seldom()
    with show_steps() as show, redirect_stdout(sys.stderr):  # the user's factory may print
        result = run_pipeline(config, registry, work, make_say(), quick, show)
    targets = result.bundle.manifest.targets
    data = {
        "version": result.version.ref,
        "digest": result.bundle.digest,
        "bundle": str(result.bundle.path),
        "worked": list(result.worked),
        "report": None if result.report is None else str(result.report),
        "targets": {t: {"status": r.status, "chosen": r.chosen} for t, r in targets.items()},
    }
    return Answer(data, _describe_run(result))


def _describe_run(result: RunResult) -> Iterator[Part]:
    """Yields the lines and tables of `run`: what was built, what failed, and what to do next."""
    from pipeline.report import describe_build, describe_failures

    ref = result.version.ref
    if not result.worked:
        yield f"{ref} is up to date: nothing to do ({result.seconds:.1f} s)"
        return
    yield from describe_build(result.bundle)
    yield f"registered {ref} in {result.seconds:.1f} s"
    if result.report is not None:
        yield f"report: {result.report}"
    failed = list(describe_failures(result.bundle))
    yield from failed
    before = "mend this and run again, or, as it is: " if failed else ""
    yield f"next: {before}pipeline promote {ref} --to production"


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option(
    "--target", required=True, metavar="TARGET",
    help="cpu/x86-64-v2, -v3, -v4, cpu/aarch64, cuda/sm_90, rocm/gfx90a …; this host must run it.",
)  # fmt: skip
@click.option(
    "--engine", "engines", multiple=True, metavar="ENGINE",
    help="Only this engine; may be repeated. Default: the engines of the version's config.",
)  # fmt: skip
@_work_option(", as for `run`.")
def build(
    ref: str, target: str, engines: tuple[str, ...], work: Path, registry: Registry
) -> Answer:
    """Build REF for one more TARGET, here, and add it to the version.

    The build uses the portable program of the version, and validates the result against the
    version's reference. Bundle and digest do not change; the new files are stored next to the
    bundle, with separate digests.
    """
    from pipeline.building import build as build_version

    with show_steps() as show:
        added = build_version(registry, ref, target, engines, work, make_say(), show)
    record = added.annex.record
    data = {
        "version": added.version.ref,
        "digest": added.version.digest,
        "target": added.target,
        "annex": added.annex.digest,
        "status": record.record.status,
        "chosen": record.record.chosen,
        "notes": record.notes,
    }
    return Answer(data, _describe_added(added))


def _describe_added(added: Added) -> Iterator[Part]:
    """Yields the lines and tables of `build`: the new target, and what to do next."""
    from pipeline.report import describe_build

    yield from describe_build(added.bundle, only=added.target)
    version, choice = added.version, added.annex.record.record.choice()
    yield f"{version.ref} has {added.target} now ({choice})"
    if version.promotion("production") is not None:
        yield f"next: pipeline promote {version.ref} --to production lets it into production"


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option(
    "--as", "language", type=click.Choice(["cpp", "cuda", "hip"]), default="cpp",
    show_default=True, help="C++ for CPUs, or with a kernel for NVIDIA's or AMD's GPUs.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The header file. Default: ./MODEL.h.",
)  # fmt: skip
@_work_option(", as for `run`.")
def source(ref: str, language: str, out: Path | None, work: Path, registry: Registry) -> Answer:
    """Write the network of REF as one C++17 header, for your own loop or kernel.

    It includes no other file of ours. `row` computes one row, `rows` whole columns, and `self_test`
    computes rows of the reference again and compares the bits. The header is an artifact of REF:
    validated on the whole reference, sealed, and added to REF the first time.
    """
    open_ref(ref, registry)  # before the imports, which take seconds: a wrong name is said at once
    from pipeline.building import write_header

    with show_steps() as show:
        header = write_header(registry, ref, language, out, work, make_say(), show)
    same = f", the bits of {', '.join(header.compared)}" if header.compared else ""
    return Answer(
        {
            "version": header.ref, "target": header.target, "header": str(header.file),
            "namespace": header.namespace, "self_test_rows": header.rows,
            "same_bits": header.compared,
        },
        [f"wrote {header.file}: namespace {header.namespace}{same}; its self-test passes here"],
    )  # fmt: skip


@command()
@click.argument("ref", required=False, shell_complete=complete_refs)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The header file. Default: ./MODEL.hpp.",
)  # fmt: skip
@click.option("--source", is_flag=True, help="Print the folder of the C++ library, for cmake -S.")
def cxx(ref: str | None, out: Path | None, source: bool, registry: Registry) -> Answer:
    """Write a typed C++ header of REF: its columns by name, and a `load` that checks the digest.

    CMake builds and installs the library that the header needs:
    cmake -S "$(pipeline cxx --source)" -B build
    """
    if source and ref is None:
        from engines import native

        folder = str(Path(native.__file__).parent / "library")
        return Answer({"source": folder}, [folder])
    if source or ref is None:
        raise click.UsageError("give either a REF or --source")
    from engines.native import typed_header
    from soa.files import write_whole

    opened = open_ref(ref, registry)
    file = out or Path(f"{opened.bundle.manifest.name}.hpp")
    text = typed_header(opened.signature, opened.name, opened.label, opened.bundle.digest)
    write_whole(file, text)
    return Answer({"header": str(file), "digest": opened.bundle.digest}, [f"wrote {file}"])
