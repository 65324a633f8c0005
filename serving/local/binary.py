"""Where a tritonserver is, and what it needs around it to run this interpreter's packages."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import soa_pipeline
from serving.errors import ServerError

VARIABLE = "PIPELINE_TRITONSERVER"
_HOME = ".venv-triton"
_WHEEL_BINARY = "pytriton/tritonserver/bin/tritonserver"
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonBinary:
    """An executable; `libraries` are folders it needs on LD_LIBRARY_PATH.

    `backends` is its folder of backends, None for the server's own default; `stub` is the process
    that runs Python models, where it does not lie in the Python backend's folder already.
    """

    path: Path
    libraries: tuple[Path, ...] = ()
    backends: Path | None = None
    stub: Path | None = None

    def environment(self) -> dict[str, str]:
        """This process's environment, with our packages and this interpreter's in front."""
        ours = [str(Path(soa_pipeline.__file__).resolve().parent)]
        ours += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        libraries = [*map(str, self.libraries), str(libpython_folder())]
        if given := os.environ.get("LD_LIBRARY_PATH"):
            libraries.append(given)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(ours)),
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PYTHONDONTWRITEBYTECODE": "1",  # it would write into the repository
        }

    def backend_folder(self, scratch: Path) -> Path | None:
        """The folder of backends to run with, laid out in `scratch` where the wheel's lacks the
        stub of this Python."""
        if self.backends is None or self.stub is None:
            return self.backends
        folder = scratch / "backends" / "python"
        folder.mkdir(parents=True)
        for each in (self.backends / "python").iterdir():
            if each.is_file():
                (folder / each.name).symlink_to(each)
        shutil.copy2(self.stub, folder / _STUB)
        return folder.parent


def find_triton(given: str | Path | None = None) -> TritonBinary:
    """The server to start: `given`, $PIPELINE_TRITONSERVER, what `make triton` made, or PATH.

    Raises ServerError where there is none, or where what was named is not one.
    """
    if named := given or os.environ.get(VARIABLE):
        path = Path(shutil.which(named) or named)
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ServerError(f"{named} is no tritonserver: there is no such executable file")
        return _described(path.resolve())
    ours = Path(soa_pipeline.__file__).resolve().parent / _HOME / _WHEEL_BINARY
    if ours.is_file():
        return _described(ours)
    if found := shutil.which("tritonserver"):
        return _described(Path(found).resolve())
    raise ServerError(
        "no tritonserver here: run `make triton` in the checkout once, or name one with "
        f"--tritonserver or ${VARIABLE}"
    )


def _described(path: Path) -> TritonBinary:
    """With what belongs to it where it comes from NVIDIA's wheel; other servers are complete."""
    server = path.parents[1]
    libraries = path.parents[3] / "nvidia_pytriton.libs" if len(path.parents) > 3 else None
    if libraries is None or not libraries.is_dir():
        return TritonBinary(path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        have = ", ".join(sorted(p.name for p in (server / "python_backend_stubs").glob("*")))
        raise ServerError(f"{path} has no Python backend for Python {version}; it has: {have}")
    stub.chmod(stub.stat().st_mode | 0o111)
    return TritonBinary(path, (libraries,), server / "backends", stub)


def libpython_folder() -> Path:
    """Where this interpreter's shared library lies: Triton's Python must load that very one."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    places = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"]
    for place in filter(None, places):
        if (Path(place) / name).is_file():
            return Path(place)
    raise ServerError(
        f"this Python ({sys.executable}) has no {name}: Triton's Python backend needs a Python "
        "with a shared library (on Debian and Ubuntu: apt install libpython3-dev)"
    )
