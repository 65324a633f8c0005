"""How the right server is found, and the error if there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import soa_pipeline
from serving.errors import ServerError
from serving.local import triton as local_triton
from serving.local.triton import (
    VARIABLE,
    Ports,
    ServerOptions,
    TritonBinary,
    TritonServer,
    find_triton,
    libpython_folder,
)

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host without Triton."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_triton, "_HOME", "no-such-folder")
    return monkeypatch


def executable(path: Path) -> Path:
    """A script in place of the server, which ends at once with an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho 'error: no such option'\nexit 3\n")
    path.chmod(0o755)
    return path


def wheel(folder: Path) -> Path:
    """The layout of NVIDIA's wheel, with a script in place of the server."""
    server = folder / "pytriton" / "tritonserver"
    executable(server / "python_backend_stubs" / VERSION / "triton_python_backend_stub")
    (server / "backends" / "python").mkdir(parents=True)
    (server / "backends" / "python" / "libtriton_python.so").touch()
    (folder / "nvidia_pytriton.libs").mkdir()
    return executable(server / "bin" / "tritonserver")


def test_without_a_server_the_error_says_how_to_get_one(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match=rf"here: run `make triton`.*\${VARIABLE}"):
        find_triton()


def test_the_variable_names_a_server(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = executable(tmp_path / "server")
    bare.setenv(VARIABLE, str(path))
    assert find_triton() == TritonBinary(path)


def test_the_option_comes_before_the_variable(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, other = (executable(tmp_path / name / "server") for name in ("one", "other"))
    bare.setenv(VARIABLE, str(path))
    assert find_triton(other) == TritonBinary(other)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere is no tritonserver"), (".", "is no tritonserver")]
)
def test_a_path_that_is_no_program_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        find_triton(tmp_path / name)


def test_a_server_on_the_path_is_found(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = executable(tmp_path / "tritonserver")
    assert find_triton() == TritonBinary(path)


def test_the_server_of_a_wheel_gets_its_libraries_and_our_packages(tmp_path: Path) -> None:
    triton = find_triton(wheel(tmp_path / "env"))
    libraries = tmp_path / "env" / "nvidia_pytriton.libs"
    assert triton.libraries == (libraries,)
    environment = triton.environment()
    expected = [str(libraries), str(libpython_folder())]
    assert environment["LD_LIBRARY_PATH"].split(":")[:2] == expected
    assert environment["PYTHONPATH"].split(":")[0] == str(Path(soa_pipeline.__file__).parent)


def test_the_server_of_a_wheel_gets_the_stub_of_this_python(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    backends = find_triton(wheel(tmp_path / "env")).prepare_backends(tmp_path / "scratch")
    assert backends is not None
    names = {path.name for path in (backends / "python").iterdir()}
    assert names == {"libtriton_python.so", "triton_python_backend_stub"}


def test_a_wheel_without_the_stub_of_this_python_is_refused(tmp_path: Path) -> None:
    binary = wheel(tmp_path / "env")
    stubs = tmp_path / "env/pytriton/tritonserver/python_backend_stubs"
    (stubs / VERSION).rename(stubs / "2.7")
    with pytest.raises(ServerError, match=f"no Python backend for Python {VERSION}; it has: 2.7"):
        find_triton(binary)


def test_the_error_of_a_server_that_ends_at_once_has_its_last_line(tmp_path: Path) -> None:
    options = ServerOptions(binary=executable(tmp_path / "server"), ready_s=20)
    server = TritonServer(tmp_path, options)
    with pytest.raises(ServerError, match="ended with status 3: error: no such option"):
        server.__enter__()
    assert not server.alive()


def test_a_port_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    options = ServerOptions(binary=executable(tmp_path / "server"), ports=Ports(grpc=70_000))
    with pytest.raises(ServerError, match=r"port 70000 of 127\.0\.0\.1 cannot be used") as caught:
        TritonServer(tmp_path, options).__enter__()
    assert caught.value.code == "port"


def test_triton_gets_a_number_for_a_name(tmp_path: Path) -> None:
    """If told `localhost`, Triton says that it listens, but does not answer."""
    script = executable(tmp_path / "server")
    script.write_text('#!/bin/sh\necho "error: $*"\n')  # prints its arguments
    options = ServerOptions(host="localhost", binary=script)
    with pytest.raises(ServerError, match=r"--grpc-address=127\.0\.0\.1 .*http-address=127\."):
        TritonServer(tmp_path, options).__enter__()
