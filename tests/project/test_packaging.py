"""The wheel, as a user gets it: installed into an empty venv and used from another folder."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import soa_pipeline
from pipeline.promotion.pulling import pull
from registry.store.registry import Registry
from tests.models.project import PASSED, Built, cli

ROOT = Path(soa_pipeline.__file__).parent
NATIVE = ROOT / "engines" / "native"


def execute(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without variables such as PYTHONPATH, which could lead to this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def succeeded(process: subprocess.CompletedProcess[str]) -> str:
    """What a process printed, which must not have failed."""
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout: no build folder appears in the tree."""
    source = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    )
    # setuptools does not compile again what lies in its build folder and is newer than its sources.
    build = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for library in NATIVE.glob("*.so"):
        copy = build / library.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, copy)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    succeeded(execute(*pip, "--wheel-dir", out, source, cwd=out))
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv that holds our wheel, and finds its dependencies in the venv of this test.

    A .pth file adds their folder at the end of the path, so our wheel is found before this
    checkout.
    """
    venv = tmp_path_factory.mktemp("venv")
    succeeded(execute(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv))
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    succeeded(execute(*pip, wheel, cwd=venv))
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


RUNNING = ("torch", "numpy", "pydantic", "pyyaml", "safetensors", "filelock", "lazy_loader")
"""The packages that are needed to run a bundle's folder; docs/install.md names the same."""
ABSENT = ("mlflow", "sqlalchemy", "alembic", "pandas", "sqlparse", "click", "rich", "onnxruntime")


def closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """The distributions with these names, and all that they need according to their metadata."""
    distributions: dict[str, metadata.Distribution] = {}
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        name, marker = canonicalize_name(requirement.name), requirement.marker
        if name in distributions or (marker and not marker.evaluate({"extra": ""})):
            continue
        distributions[name] = metadata.distribution(requirement.name)
        pending += [Requirement(text) for text in distributions[name].requires or ()]
    return list(distributions.values())


def installed(wheel: Path, needed: Iterable[str], venv: Path) -> Path:
    """The Python of a new venv that holds only a wheel and, as links, what it needs."""
    succeeded(execute(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent))
    [packages] = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for distribution in closure(needed):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return venv / "bin" / "python"


@pytest.fixture
def worker(wheel: Path, tmp_path: Path) -> Path:
    return installed(wheel, RUNNING, tmp_path / "worker")


WORKER = """
import importlib.util, json, socket, sys

folder, absent, alone = sys.argv[1], sys.argv[2].split(), sys.argv[3] == "alone"
assert not [name for name in absent if importlib.util.find_spec(name)]
if alone:
    try:
        socket.create_connection(("127.0.0.1", 9), 5)
    except OSError as error:
        assert error.errno == 101, error  # not even this host's own network can be reached
import torch
from safetensors import safe_open
import pipeline

session = pipeline.load(folder, mode="production")
with safe_open(f"{folder}/reference.safetensors", "pt") as stored:
    cases = json.loads(stored.metadata()["cases"])
    columns = {name: stored.get_tensor(f"input/jets/{name}") for name in "abcdef"}
    answers = [stored.get_tensor(f"output/{i}/probabilities") for i in range(len(cases))]
for case, answer in zip(cases, answers, strict=True):
    n = case["n"]
    jets = pipeline.Collection.from_arrays(
        session.layout("jets"), {name: values[:n] for name, values in columns.items()}, n
    )
    tags = session.collection("tags", n)
    session.run(jets, tags)
    probabilities = torch.stack([tags.tensor(name) for name in "xyz"], 1)
    torch.testing.assert_close(probabilities, answer, atol=1e-5, rtol=1e-4)
print(pipeline.__file__, session.origin.digest, len(cases))
"""


def test_the_wheel_has_what_cmake_builds_the_cpp_library_from(wheel: Path) -> None:
    folders = (NATIVE / name for name in ("library", "include", "common"))
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 12
    assert {file.relative_to(ROOT).as_posix() for file in files} <= names_in(wheel)


def test_a_pulled_folder_runs_without_mlflow_or_a_network(
    worker: Path, jets: Built, tmp_path: Path
) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/store/registry.db")
    registry.promote(registry.register(jets.bundle), "production", PASSED)
    pull(registry, "jets@production", tmp_path / "pulled")
    shutil.rmtree(tmp_path / "store")
    unshare = ("unshare", "--map-root-user", "--net")
    alone = shutil.which("unshare") and not execute(*unshare, "true", cwd=tmp_path).returncode
    printed = succeeded(
        execute(
            *(unshare if alone else ()),
            *(worker, "-c", WORKER, tmp_path / "pulled", " ".join(ABSENT)),
            "alone" if alone else "on a network",
            cwd=tmp_path,
        )
    )
    module, digest, cases = printed.split()
    assert Path(module).is_relative_to(tmp_path / "worker")
    assert digest == jets.bundle.digest
    assert int(cases) > 5


def test_pyproject_lists_the_packages_whose_origin_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    included = settings["setuptools"]["packages"]["find"]["include"]
    assert [name for name in included if "." not in name] == list(soa_pipeline.PACKAGES)
    assert [name for name in included if "." in name] == [
        f"{package}.*" for package in soa_pipeline.PACKAGES
    ]
    known = settings["ruff"]["lint"]["isort"]["known-first-party"]
    assert known == ["soa_pipeline", *soa_pipeline.PACKAGES]


def info_of(wheel: Path) -> str:
    """The wheel's folder of metadata."""
    name, version, *_ = wheel.name.split("-")
    return f"{name}-{version}.dist-info"


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_our_packages_and_nothing_beside_them(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names_in(wheel)}
    assert tops == {"soa_pipeline.py", *soa_pipeline.PACKAGES, info_of(wheel)}


def test_the_wheel_holds_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        fields = archive.read(f"{info_of(wheel)}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in fields
    assert f"{info_of(wheel)}/licenses/LICENSE" in names_in(wheel)


@pytest.mark.parametrize("package", soa_pipeline.PACKAGES)
def test_the_wheel_holds_every_source_file(wheel: Path, package: str) -> None:
    kinds = {".py", ".h", ".hpp", ".cpp", ".html"}
    files = (path for path in (ROOT / package).rglob("*") if path.suffix in kinds)
    assert {file.relative_to(ROOT).as_posix() for file in files} <= names_in(wheel)


def test_the_wheel_is_for_every_python(wheel: Path) -> None:
    """The native module uses the stable ABI, and the wheel has no module for one Python alone."""
    assert "-cp311-abi3-" in wheel.name
    libraries = [name for name in names_in(wheel) if name.endswith(".so")]
    shim = ["engines/native/libsoa_shim.so"] if platform.machine() == "x86_64" else []
    assert sorted(libraries) == ["engines/native/_native.abi3.so", *shim]


def test_wheel_command_and_changelog_have_the_same_version(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == soa_pipeline.__version__
    assert soa_pipeline.__version__ in cli("--version").stdout.split()
    (latest, *_) = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert latest == soa_pipeline.__version__


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, Any]:
    """The list of all that is in the wheel, which a release has beside it."""
    list_contents = runpy.run_path(str(ROOT / "packages" / "wheels.py"))["contents"]
    listed: dict[str, Any] = list_contents([wheel], "21.1.0")
    return listed


@pytest.fixture(scope="module")
def components(contents: dict[str, Any]) -> dict[str, Any]:
    """The components of the list, by name."""
    return {component["name"]: component for component in contents["components"]}


def test_the_list_of_contents_names_the_wheel_and_its_digest(
    wheel: Path, contents: dict[str, Any], components: dict[str, Any]
) -> None:
    root = contents["metadata"]["component"]
    assert root["purl"] == f"pkg:pypi/soa-pipeline@{soa_pipeline.__version__}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert components[wheel.name]["hashes"] == [{"alg": "SHA-256", "content": digest}]


def test_the_list_of_contents_names_the_library_of_cpp(components: dict[str, Any]) -> None:
    assert components["libc++"]["version"] == "21.1.0"


def test_the_list_of_contents_tells_required_packages_from_optional(
    components: dict[str, Any],
) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = {name for name, part in components.items() if part.get("scope") == "required"}
    assert required == {Requirement(text).name for text in dependencies}
    assert components["onnxruntime"]["scope"] == "optional"


def test_the_project_depends_on_each_component(contents: dict[str, Any]) -> None:
    (tree,) = contents["dependencies"]
    assert tree["ref"] == contents["metadata"]["component"]["bom-ref"]
    assert sorted(tree["dependsOn"]) == sorted(part["bom-ref"] for part in contents["components"])


def test_the_wheel_works_from_another_folder(empty_venv: Path, tmp_path: Path) -> None:
    python = empty_venv / "bin" / "python"
    module = succeeded(
        execute(python, "-c", "import pipeline, soa; print(pipeline.__file__)", cwd=tmp_path)
    )
    assert Path(module.strip()).is_relative_to(empty_venv)
    usage = succeeded(execute(empty_venv / "bin" / "pipeline", "--help", cwd=tmp_path))
    assert "run" in usage
    assert "promote" in usage
    assert not list(tmp_path.iterdir())


def test_our_own_packages_are_not_refused() -> None:
    soa_pipeline.check_origins()  # raises for a package of others


@pytest.mark.parametrize("package", soa_pipeline.PACKAGES)
def test_a_foreign_module_is_named(tmp_path: Path, package: str) -> None:
    foreign = tmp_path / f"{package}.py"
    foreign.write_text("raise AssertionError('nobody may import this')\n")
    process = execute(
        sys.executable,
        "-c",
        "import soa_pipeline; soa_pipeline.main()",
        cwd=tmp_path.parent,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert process.returncode == 2
    assert process.stdout == ""
    [line] = process.stderr.splitlines()
    assert line == (
        f"pipeline: error: soa-pipeline: {foreign} hides our package '{package}' "
        f"({ROOT / package}). Rename or remove it, or take {tmp_path} off PYTHONPATH and sys.path; "
        "if pip installed it, use an environment without it."
    )


def test_importing_pipeline_names_a_foreign_module_too(tmp_path: Path) -> None:
    foreign = tmp_path / "registry.py"
    foreign.touch()
    process = execute(
        sys.executable,
        "-c",
        "import pipeline",
        cwd=tmp_path.parent,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith(f"ImportError: soa-pipeline: {foreign} hides")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes this process forget that `registry` was imported."""
    monkeypatch.delitem(sys.modules, "registry", raising=False)
    return monkeypatch


def test_a_foreign_package_is_named(forgotten: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "__init__.py").touch()
    forgotten.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=f"{tmp_path}/registry/__init__.py hides our package"):
        soa_pipeline.check_origins()


def test_a_plain_folder_of_that_name_hides_nothing(
    forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder `registry/` without `__init__.py` where Python starts: our package wins."""
    (tmp_path / "registry").mkdir()
    forgotten.syspath_prepend(tmp_path)
    soa_pipeline.check_origins()  # raises for a package of others


def test_a_foreign_module_that_was_imported_before_is_named(forgotten: pytest.MonkeyPatch) -> None:
    foreign = types.ModuleType("registry")
    foreign.__file__ = "/elsewhere/registry.py"
    forgotten.setitem(sys.modules, "registry", foreign)
    with pytest.raises(ImportError, match=r"/elsewhere/registry\.py hides our package"):
        soa_pipeline.check_origins()


def test_a_checkout_that_is_not_on_the_path_is_named(
    forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in soa_pipeline.PACKAGES:
        forgotten.delitem(sys.modules, name, raising=False)
    forgotten.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match=f"'soa' cannot be found: put {ROOT} on sys.path"):
        soa_pipeline.check_origins()


def test_a_missing_package_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soa_pipeline, "PACKAGES", ("nowhere_to_be_found",))
    with pytest.raises(SystemExit) as caught:
        soa_pipeline.main()
    assert caught.value.code == 2
    assert "the package 'nowhere_to_be_found' is missing" in capsys.readouterr().err
