"""The command for those who run a version in C++."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Answer, command, opened_at

if TYPE_CHECKING:
    from registry.store import Registry


@command()
@click.argument("ref", required=False)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The header. Default: MODEL.hpp here.",
)  # fmt: skip
@click.option("--source", is_flag=True, help="Print the folder of the C++ library, for cmake -S.")
def cxx(ref: str | None, out: Path | None, source: bool, registry: Registry) -> Answer:
    """Write a typed C++ header of REF: its columns by name, and a `load` that asks for its digest.

    CMake builds and installs the library it needs: cmake -S "$(pipeline cxx --source)" -B build
    """
    if source or ref is None:
        if ref is not None or not source:
            raise click.UsageError("give either a REF or --source")
        from engines import native

        folder = str(Path(native.__file__).parent / "library")
        return Answer({"source": folder}, [folder])
    from soa.files import write_whole
    from soa.typed_header import typed_header

    opened = opened_at(ref, registry)
    file = out or Path(f"{opened.bundle.manifest.name}.hpp")
    text = typed_header(opened.signature, opened.name, opened.label, opened.bundle.digest)
    write_whole(file, text)
    return Answer({"header": str(file), "digest": opened.bundle.digest}, [f"wrote {file}"])
