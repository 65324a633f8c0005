"""The installed C++ library, and programs that are built with it, as its users do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.session.session import Session
from tests.models.shared import made_once

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent / "lib"


def execute(*command: object) -> str:
    """The output of a command, which must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, build: Path, *settings: str) -> Path:
    """The build folder of a CMake project, built without optimisation, which would take longer."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    if not Path("/usr/include/openssl").is_dir() and not os.environ.get("OPENSSL_ROOT_DIR"):
        pytest.skip("OpenSSL has no headers here (libssl-dev)")
    execute("cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Quick", *settings)
    execute("cmake", "--build", build)
    return build


def installed(factory: pytest.TempPathFactory, *, shim: bool = False) -> Path:
    """The prefix into which the library was installed."""

    folder = made_once(factory, f"cplusplus-{shim:d}", lambda folder: install(folder, shim=shim))
    return folder / "prefix"


def install(folder: Path, *, shim: bool = False) -> Path:
    """Builds the library in a folder, and installs it into the `prefix` there. With the shim each
    file compiles by itself, as where users build it; without, the library is one file."""
    library = ROOT / "engines" / "native" / "library"
    settings = (
        "-DCMAKE_CXX_FLAGS=-Werror",
        "-DCMAKE_INSTALL_LIBDIR=lib",
        f"-DSOA_SHIM={shim:d}",
        f"-DCMAKE_UNITY_BUILD={not shim:d}",  # takes a third of the time
    )
    build = built(library, folder / "build", *settings)
    execute("cmake", "--install", build, "--prefix", folder / "prefix")
    return folder / "prefix"


class Answering:
    """A running program that answers each line with a line."""

    def __init__(self, program: Path, *arguments: object, **env: str) -> None:
        pipe = subprocess.PIPE
        command = [str(program), *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **env}
        )

    def __call__(self, line: str) -> str:
        """The program's answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer: str = self._process.stdout.readline().rstrip("\n")
        assert answer, f"the program died of {line}"
        return answer

    def close(self) -> None:
        """Ends the program, which must succeed."""
        self._process.communicate()
        assert self._process.returncode == 0


def run(
    program: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program; the loader finds torch's libraries unless `env` says otherwise."""
    command = [str(program), *map(str, arguments)]
    own = {**os.environ, "LD_LIBRARY_PATH": str(TORCH), **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=own)


def computed(session: Session, n: int) -> list[str]:
    """Python's answers to the inputs of examples/cpp/run_bundle.cpp, as lines `column row bits`."""
    inputs, outputs = session.collection("jets", n), session.collection("tags", n)
    rows = np.arange(n)
    for j, column in enumerate(inputs.layout.columns):
        for k in range(column.components if column.dtype == "float32" else 0):
            values = ((7 * rows + 13 * j + 3 * k) % 101).astype(np.float32) / np.float32(101)
            inputs.span(column.name, k).tensor().numpy()[...] = values + np.float32(1)
    session.run(inputs, outputs)
    expected = [
        f"{column.name}{f'.{k}' if column.kind == 'eigen' else ''} {i} {bits:08x}"
        for column in outputs.layout.columns
        for k in range(column.components)
        for i, bits in enumerate(outputs.span(column.name, k).tensor().numpy().view(np.uint32))
    ]
    assert len(expected) == 3 * n
    return expected
