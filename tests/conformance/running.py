"""Runs the cases: each engine by Python, the first one also by C++."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engines import Portable, Target, engine
from runtime.session.session import Session
from soa import Collection, Column
from soa.signature_lines import describe
from stages.reference.answers import random_inputs
from tests.conformance.cases import Array, Case, Columns
from tests.models.building import build, exported
from tests.models.cplusplus import execute, run

HERE, CPU = Path(__file__).parent, torch.device("cpu")


@dataclass(frozen=True)
class Ran:
    """The answers of each engine by Python, and of the first one by C++."""

    case: Case
    python: dict[str, Columns]
    cpp: Columns


def program(prefix: Path, folder: Path) -> None:
    """Compiles score.cpp with the installed library."""
    execute(
        "g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include",
        "-o", folder / "score", HERE / "score.cpp",
        f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lsoa_model",
    )  # fmt: skip


def ran(case: Case, score: Path, folder: Path, files: dict[str, Path] | None = None) -> Ran:
    """Runs a case with the artifacts `files`, or with its own."""
    files = files or made(case, folder)
    python = {
        name: by_python(case, Session(case.signature, engine(name).open(file, CPU)))
        for name, file in files.items()
    }
    first = files[case.engines[0]].parent
    (first / "arguments.txt").write_text(describe(case.signature, None))
    return Ran(case, python, by_cpp(case, score, first, folder / "columns"))


def made(case: Case, folder: Path) -> dict[str, Path]:
    """The artifact of each engine. Those of a constant model are made without a reference."""
    inputs = random_inputs(case.signature, 1, dict(case.ranges))
    if not case.constant:
        return build(case.model(), case.signature, folder, case.engines, inputs).files
    program = exported(case.model(), case.signature, inputs, folder / "program.pt2")
    files = {}
    for name in case.engines:
        (folder / name).mkdir()
        source = Portable(program, None)
        listed = engine(name).compile(source, Target.parse("cpu"), {}, folder / name)
        files[name] = folder / name / listed[0]
    return files


def by_python(case: Case, session: Session) -> Columns:
    """The answers of a session."""
    inputs, outputs = collections(case)
    session.run(inputs, outputs)
    return columns_of(outputs)


def collections(case: Case) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """The inputs with their columns, and the outputs."""
    signature, rows = case.signature, case.rows
    every = {
        name: Collection(layout, rows[signature.rows_of[name]])
        for name, layout in signature.layouts.items()
    }
    for name, columns in case.given.items():
        for column, values in columns.items():
            every[name][column][...] = values
    return (
        {name: every[name] for name in signature.input_collections},
        {name: every[name] for name in signature.output_collections},
    )


def columns_of(collections: dict[str, Collection]) -> Columns:
    """Copies of the columns, by collection and name."""
    return {
        name: {column.name: np.array(event[column.name]) for column in event.layout.columns}
        for name, event in collections.items()
    }


def by_cpp(case: Case, score: Path, artifact: Path, file: Path) -> Columns:
    """The answers of score.cpp, which reads the inputs from a file and writes the outputs to
    another one, component after component."""
    inputs, outputs = collections(case)
    file.write_bytes(b"".join(part for event in inputs.values() for part in written(event)))
    words = [f"in:{name}={event.n}" for name, event in inputs.items()]
    words += [f"out:{name}={event.n}" for name, event in outputs.items()]
    done = run(score, artifact, file, *words)
    assert done.returncode == 0, done.stderr
    content = memoryview(Path(f"{file}.out").read_bytes())
    for event in outputs.values():
        for column in event.layout.columns:
            for k in range(column.components):
                values = component(event, column, k)
                size = values.nbytes
                values[...] = np.frombuffer(content[:size], values.dtype).reshape(values.shape)
                content = content[size:]
    assert not content
    return columns_of(outputs)


def written(event: Collection) -> list[bytes]:
    """The bytes of each component."""
    return [
        component(event, column, k).tobytes()
        for column in event.layout.columns
        for k in range(column.components)
    ]


def component(event: Collection, column: Column, k: int) -> Array:
    """A component of a column, in its memory."""
    values: Array = event.span(column.name, k).tensor().numpy()
    return values
