"""A real Triton on this host, and its environment for the packages of this interpreter."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import soa_pipeline
from serving.errors import ServerError
from serving.local.external_program import LocalProgram, find_program, free_ports

VARIABLE = "PIPELINE_TRITONSERVER"
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*", "--strict-readiness=false")
"""Options of tritonserver: clients may load and unload models, and meanwhile it is ready."""
_HOME = ".venv-triton"  # the folder that `make triton` makes in the checkout
_WHEEL_BINARY = "pytriton/tritonserver/bin/tritonserver"
_STUB = "triton_python_backend_stub"
_EXIT_MARGIN_S = 5  # Triton ends its requests so many seconds before it would be killed

# The lines of a log that say why a start failed, the more useful ones first.
_REASONS = (r"failed to load '[^']*' version \d+: [^\n\\]*", r"Socket '[^']*' already in use")
_NO_GPU = r"initialize NVML|CudaDriverHelper"  # lines in every log without a GPU


@dataclass(frozen=True)
class Ports:
    """The ports of a server. 0 stands for any free port."""

    grpc: int = 0
    http: int = 0
    metrics: int = 0


@dataclass(frozen=True)
class ServerOptions:
    """How to start a Triton.

    `ready_s`: the time limit for loading. `binary`: the tritonserver to start; None: see
    `find_triton`. `extra`: more options for tritonserver itself.
    """

    host: str = "127.0.0.1"
    ports: Ports = Ports()
    ready_s: float = 120.0
    binary: str | Path | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class TritonBinary:
    """The executable of Triton. `libraries`: the folders that it needs on LD_LIBRARY_PATH.

    `backends`: the folder of its backends; None: its default. `stub`: the program that runs Python
    models, if it is not yet in the folder of the Python backend. `agents`: True if it has Triton's
    repository agents; NVIDIA's wheel has none.
    """

    path: Path
    libraries: tuple[Path, ...] = ()
    backends: Path | None = None
    stub: Path | None = None
    agents: bool = True

    def environment(self) -> dict[str, str]:
        """Return the environment in which Triton finds our packages and its libraries.

        It is this process's environment, in which PYTHONPATH has our packages and those of this
        interpreter. Raises ServerError if this interpreter has no shared library.
        """
        packages = [str(Path(soa_pipeline.__file__).resolve().parent)]
        names = ("site-packages", "dist-packages")
        packages += [folder for folder in sys.path if Path(folder).name in names]
        libraries = [*map(str, self.libraries), str(libpython_folder())]
        if inherited := os.environ.get("LD_LIBRARY_PATH"):
            libraries.append(inherited)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(packages)),  # each only once
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PYTHONDONTWRITEBYTECODE": "1",  # no .pyc files in the repository
        }

    def prepare_backends(self, scratch: Path) -> Path | None:
        """Prepare the folder of backends to use, and return it; None: the default.

        If the stub is missing in it, a folder with the stub and links to the other files is made in
        `scratch`.
        """
        if self.backends is None or self.stub is None:
            return self.backends
        folder = scratch / "backends" / "python"
        folder.mkdir(parents=True)
        for file in (self.backends / "python").iterdir():
            if file.is_file():
                (folder / file.name).symlink_to(file)
        shutil.copy2(self.stub, folder / _STUB)
        return folder.parent

    def prepare_models(self, repository: Path, scratch: Path) -> Path:
        """Prepare the repository that this server can serve, and return its folder.

        It is `repository` itself, unless this server has no agents. Then it is a folder of links
        that is made in `scratch`, in which the configurations do not ask for agents. Nothing is
        lost: the agents check a bundle's files, but so do the bundle's digests.
        """
        if self.agents:
            return repository
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2

        models = scratch / "models"
        models.mkdir()
        for config in repository.glob("*/config.pbtxt"):
            text = config.read_text()  # trusted
            message = text_format.Parse(text, model_config_pb2.ModelConfig())
            message.ClearField("model_repository_agents")
            model = models / config.parent.name
            model.mkdir()
            for entry in config.parent.iterdir():
                if entry != config:
                    (model / entry.name).symlink_to(entry)
            (model / config.name).write_text(text_format.MessageToString(message))
        return models


def find_triton(named: str | Path | None = None) -> TritonBinary:
    """Find the Triton to start.

    It is `named`, else $PIPELINE_TRITONSERVER, else the one from `make triton`, else the one on
    PATH. Raises ServerError if there is none, if the named file is not executable, or if NVIDIA's
    wheel has no Python backend for this version of Python.
    """
    in_checkout = Path(soa_pipeline.__file__).resolve().parent / _HOME / _WHEEL_BINARY
    advice = "run `make triton` in the checkout once, or name one with --tritonserver or"
    path = find_program("tritonserver", VARIABLE, in_checkout, advice, named)
    server = path.parents[1]
    # NVIDIA's wheel puts nvidia_pytriton.libs beside the folder pytriton, see _WHEEL_BINARY.
    libraries = path.parents[3] / "nvidia_pytriton.libs" if len(path.parents) > 3 else None
    if libraries is None or not libraries.is_dir():  # not NVIDIA's wheel, so it is complete
        return TritonBinary(path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = server / "python_backend_stubs"
    stub = stubs / version / _STUB
    if not stub.is_file():
        supported = ", ".join(sorted(folder.name for folder in stubs.glob("*")))
        raise ServerError(f"{path} has no Python backend for Python {version}; it has: {supported}")
    stub.chmod(stub.stat().st_mode | 0o111)  # a wheel's files may lack it
    return TritonBinary(path, (libraries,), server / "backends", stub, agents=False)


def libpython_folder() -> Path:
    """Return the folder of this interpreter's shared library, which Triton's Python must load.

    Raises ServerError if this interpreter has none.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    places = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"]
    for place in filter(None, places):
        if (Path(place) / name).is_file():
            return Path(place)
    raise ServerError(
        f"this Python ({sys.executable}) has no {name}: Triton's Python backend needs a Python "
        "with a shared library (on Debian and Ubuntu: apt install libpython3-dev)"
    )


class TritonServer(LocalProgram):
    """tritonserver with all models of a repository."""

    stop_s = 15.0

    def __init__(self, repository: Path, options: ServerOptions | None = None) -> None:
        """Find Triton, which is not started yet. Raises ServerError."""
        self.options = options or ServerOptions()
        self._triton = find_triton(self.options.binary)
        super().__init__(self._triton.path, self.options.host)
        self.ready_s = self.options.ready_s
        self.repository = repository
        self.ports = Ports()

    @property
    def url(self) -> str:
        """The address for the device of a remote session: `triton://host:port`."""
        return f"triton://{self.host}:{self.ports.grpc}"

    def endpoints(self) -> dict[str, str]:
        """Return the server's addresses by protocol."""
        return {
            "gRPC": self.url,
            "HTTP": f"http://{self.host}:{self.ports.http}",
            "metrics": f"http://{self.host}:{self.ports.metrics}/metrics",
        }

    def metrics(self, model: str) -> dict[str, float]:
        """Read Triton's own counters for a model, summed over its versions. Raises ServerError."""
        return self._read_metrics(self.endpoints()["metrics"], model=model)

    def _command(self, folder: Path) -> list[str]:
        """Choose free ports, prepare the folders, and return the command that starts Triton."""
        wanted = self.options.ports
        self.ports = Ports(*free_ports(self.host, wanted.grpc, wanted.http, wanted.metrics))
        # The host as a number: with a name, Triton starts but answers no request.
        host, ports = socket.gethostbyname(self.host), self.ports
        backends = self._triton.prepare_backends(folder)
        models = self._triton.prepare_models(self.repository.resolve(), folder)
        command = [
            str(self._triton.path),
            f"--model-repository={models}",
            "--disable-auto-complete-config",
            f"--grpc-address={host}", f"--grpc-port={ports.grpc}",
            f"--http-address={host}", f"--http-port={ports.http}",
            f"--metrics-address={host}", f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={int(self.stop_s) - _EXIT_MARGIN_S}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix()}",
        ]  # fmt: skip
        if backends is not None:
            command.append(f"--backend-directory={backends}")
        return [*command, *self.options.extra]

    def _environment(self) -> dict[str, str]:
        return self._triton.environment()

    def _ready_urls(self) -> list[str]:
        urls = self.endpoints()
        return [f"{urls['HTTP']}/v2/health/ready", urls["metrics"]]  # metrics is opened last

    def _shm_prefix(self) -> str:
        """Return the beginning of the names of this server's files in /dev/shm."""
        return f"soa_triton_{os.getpid()}_{self.ports.grpc}_"

    def _clean(self) -> None:
        """Remove the files of Triton's Python backend in /dev/shm."""
        for file in Path("/dev/shm").glob(f"{self._shm_prefix()}*"):
            file.unlink(missing_ok=True)

    def _reason(self) -> str:
        """Return a known reason in the log, else its last error, else its last line."""
        log = self.log()
        for pattern in _REASONS:
            if match := re.search(pattern, log):
                return match[0]
        lines = [line for line in log.splitlines() if line.strip() and not re.search(_NO_GPU, line)]
        errors = [line for line in lines if line.startswith(("E", "error", "Error"))]
        return (errors or lines or ["it said nothing"])[-1].strip()
