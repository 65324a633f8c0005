"""soa-runtime, as a worker gets it: its wheel alone, without torch, MLflow and a network."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipeline
import soa_pipeline
from engines.kinds import host_cpu_levels
from examples.nanoaod import data
from pipeline.building.run_config import run as pipeline_run
from pipeline.promotion.pulling import pull
from registry.store.registry import Registry
from stages.judging.reproducing import PROCESSORS
from tests.models.project import PASSED, Built, cli, refusal
from tests.project.test_packaging import execute, installed, names_in, succeeded

ROOT = Path(soa_pipeline.__file__).parent
SOURCE = ROOT / "packages" / "soa-runtime"
NAME = "lanes"
"""The engine whose artifacts run without torch."""
NO_LANES = {"zoo/edge_gnn.yaml": "aoti-standalone"}  # it has two row dimensions
CONFIGS = ROOT / "configs"
NETWORKS = ["demo.yaml", "particlenet.yaml"]
NETWORKS += [f"zoo/{path.name}" for path in sorted((CONFIGS / "zoo").glob("*.yaml"))]
DEPENDENCIES = ("numpy", "lazy_loader", "safetensors")
ABSENT = (
    "torch",
    "pydantic",
    "mlflow",
    "filelock",
    "yaml",
    "click",
    "soa_pipeline",
    "pipeline",
    "stages",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what a checkout holds."""
    source = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    succeeded(execute(*pip, "--wheel-dir", out, source / "packages" / "soa-runtime", cwd=out))
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def worker(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, DEPENDENCIES, tmp_path_factory.mktemp("venv") / "worker")


needs_v3 = pytest.mark.skipif(
    "x86-64-v3" not in host_cpu_levels(), reason=f"{NAME} is for x86-64-v3"
)


def promoted(project: Built, folder: Path) -> tuple[Registry, str]:
    """A new registry with the bundle in production, and the version's reference."""
    registry = Registry(f"sqlite:///{folder}/store/registry.db")
    version = registry.promote(registry.register(project.bundle), "production", PASSED)
    return registry, version.ref


RUN = """
import hashlib, importlib.util, json, sys, time

begun = time.perf_counter()
import numpy as np
import soa_runtime

ref, mode, absent = sys.argv[1], sys.argv[2], sys.argv[3].split()
registry, engine = (*sys.argv[4:], "", "")[:2]
options = {"lookup": "offline", "registry": registry} if registry else {}
session = soa_runtime.load(ref, mode=mode, engine_name=engine or None, **options)


def answer(n, arrays=None):
    memory = {
        name: np.sin(np.arange(n) * (i + 1)).astype(np.float32) for i, name in enumerate("abcdef")
    }
    jets = soa_runtime.as_collection(arrays(memory) if arrays else memory, session.layout("jets"))
    tags = session.collection("tags", n)
    session.run(jets, tags)
    return hashlib.sha256(b"".join(tags[name].tobytes() for name in "xyz")).hexdigest()


report = {"digest": answer(1000), "seconds": time.perf_counter() - begun}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
report["rss_mb"] = int(status["VmRSS"].split()[0]) / 1024
report["engine"] = session.origin.engine
report["version"] = session.origin.version
report["torch"] = "torch" in sys.modules or "libtorch" in open("/proc/self/maps").read()
report["present"] = [name for name in absent if importlib.util.find_spec(name)]
report["modules"] = sys.modules["soa"].__file__
binding = session.bind(
    soa_runtime.Collection.from_arrays(
        session.layout("jets"), {name: np.ones(5, np.float32) for name in "abcdef"}
    ),
    session.collection("tags", 5),
)
session.run_many([binding], threads=2)
print(json.dumps(report))
"""


RUN_REFERENCE = """
import importlib.util, json, sys, time

from pathlib import Path

begun = time.perf_counter()
import soa_runtime
from runtime.opening import digest_answers

folder, reference, absent = sys.argv[1:]
session = soa_runtime.load(folder)
report = {"bits": digest_answers(session, Path(folder, reference))}
report["seconds"] = time.perf_counter() - begun
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
report["rss_mb"] = int(status["VmRSS"].split()[0]) / 1024
report["libtorch"] = "libtorch" in open("/proc/self/maps").read()
report["present"] = [name for name in absent.split() if importlib.util.find_spec(name)]
print(json.dumps(report))
"""


def run(python: Path, cwd: Path, *arguments: object, code: str = RUN, **env: str) -> dict[str, Any]:
    """Run a program without a network, where the system allows that; returns its report."""
    unshare = ("unshare", "--map-root-user", "--net")
    alone = shutil.which("unshare") and not execute(*unshare, "true", cwd=cwd).returncode
    command = (*(unshare if alone else ()), python, "-c", code, *map(str, arguments))
    report: dict[str, Any] = json.loads(succeeded(execute(*command, cwd=cwd, env=env)))
    return report


def test_both_packages_declare_the_same_requirements() -> None:
    ours = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ours["requires-python"] == whole["requires-python"]
    assert {text.partition(">")[0] for text in ours["dependencies"]} == set(DEPENDENCIES)
    assert set(ours["dependencies"]) <= set(whole["dependencies"])
    assert ours["optional-dependencies"]["sign"] == whole["optional-dependencies"]["sign"]


@pytest.mark.long
def test_the_wheel_has_our_version_and_the_stable_abi(wheel: Path) -> None:
    assert wheel.name.startswith(f"soa_runtime-{soa_pipeline.__version__}-cp311-abi3-")


@pytest.mark.long
def test_an_sdist_holds_all_that_its_wheel_is_built_from(wheel: Path, tmp_path: Path) -> None:
    """The sdist also holds the modules outside the package's folder, so it suffices alone."""
    copied = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, copied, ignore=ignored)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    package = copied / "packages" / "soa-runtime"
    succeeded(execute(sys.executable, "-c", make, tmp_path / "made", cwd=package))
    (sdist,) = (tmp_path / "made").iterdir()
    shutil.rmtree(copied)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    succeeded(execute(*pip, "--wheel-dir", tmp_path / "built", sdist, cwd=tmp_path))
    (rebuilt,) = (tmp_path / "built").iterdir()
    listed = [sorted(zipfile.ZipFile(file).namelist()) for file in (rebuilt, wheel)]
    assert listed[0] == listed[1]


@needs_v3
@pytest.mark.long
def test_a_worker_without_torch(worker: Path, bare_jets: Built, tmp_path: Path) -> None:
    registry, ref = promoted(bare_jets, tmp_path)
    result = cli("pull", ref, tmp_path / "pulled", "--runtime", "--registry", registry.uri)
    assert f"{NAME} runs on cpu/x86-64-v3 without torch" in result.stdout
    env = {"PIPELINE_CACHE": str(tmp_path / "cache")}
    first = run(worker, tmp_path, tmp_path / "pulled", "production", " ".join(ABSENT), **env)
    assert first["engine"] == NAME
    assert first["version"] == "1"
    assert not first["torch"]
    assert first["present"] == []
    assert Path(first["modules"]).is_relative_to(worker.parents[1])
    assert first["rss_mb"] < 60  # the figures are in benchmarks/RESULTS.md

    # The worker also loads a version that another process has cached on this host.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", env["PIPELINE_CACHE"])
        session = pipeline.load(
            "jets@production", registry=registry, lookup="prefer-cache", engine_name=NAME
        )
    session.close()
    again = run(worker, tmp_path, "jets@production", "production", "torch", registry.uri, **env)
    assert again["digest"] == first["digest"]
    assert not again["torch"]


@needs_v3
@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_without_torch(
    name: str, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each artifact is valid, and all levels give the same bits, here and in the worker."""
    if name == "particlenet.yaml":
        try:
            monkeypatch.setenv("SKHEP_DATA", str(data.locate("ParticleNet_kin.pt").parent))
        except FileNotFoundError as error:
            pytest.skip(str(error))
    settings = yaml.safe_load((CONFIGS / name).read_text())
    engine_name = NO_LANES.get(name, NAME)
    settings |= {"engines": [engine_name], "targets": ["cpu"], "compile": {"benchmark_s": 0.1}}
    config = tmp_path / "configs" / name
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    built = pipeline_run(config, registry, tmp_path / "work")
    targets = built.bundle.manifest.targets.values()
    candidates = [target.candidates[engine_name] for target in targets]
    assert [candidate.reason for candidate in candidates] == [None] * len(candidates)
    registry.promote(built.version, "production", PASSED)
    pull(registry, built.version.ref, tmp_path / "pulled", runtime=True)
    arguments = (tmp_path / "pulled", built.bundle.manifest.reference, " ".join(ABSENT))
    cache = str(tmp_path / "cache")
    report = run(worker, tmp_path, *arguments, code=RUN_REFERENCE, PIPELINE_CACHE=cache)
    assert not report["libtorch"]
    assert report["present"] == []
    assert {candidate.bits for candidate in candidates} == {report["bits"]}
    print(name, report, [candidate.compile_seconds for candidate in candidates])


@needs_v3
@pytest.mark.long
def test_the_whole_installation_gives_the_same_bits(
    worker: Path, bare_jets: Built, tmp_path: Path
) -> None:
    registry, ref = promoted(bare_jets, tmp_path)
    pull(registry, ref, tmp_path / "pulled", runtime=True)
    bare = run(worker, tmp_path, tmp_path / "pulled", "production", "torch")
    path = f"{ROOT}{os.pathsep}{SOURCE}"
    command = (sys.executable, "-c", RUN, tmp_path / "pulled", "production", "", "", NAME)
    whole = json.loads(succeeded(execute(*command, cwd=tmp_path, env={"PYTHONPATH": path})))
    assert whole["digest"] == bare["digest"]
    assert Path(whole["modules"]).is_relative_to(ROOT)
    assert not whole["torch"]  # torch is installed, but this artifact does not import it


@pytest.mark.long
def test_a_version_that_needs_torch_is_not_pulled_for_a_worker(jets: Built, tmp_path: Path) -> None:
    registry, ref = promoted(jets, tmp_path)
    message = refusal("pull", ref, tmp_path / "none", "--runtime", "--registry", registry.uri)
    assert message.startswith("jets/1 was not pulled: jets runs on torch")
    assert NAME in message
    assert not (tmp_path / "none").exists()


@pytest.fixture(scope="module")
def pulled(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `pulled`, of a version that needs torch, and `release.pem`, which is no key."""
    folder = tmp_path_factory.mktemp("torch")
    registry, ref = promoted(jets, folder)
    pull(registry, ref, folder / "pulled")
    (folder / "release.pem").write_text("a key")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'./pulled'", "jets runs on torch ("),
        ("'./pulled'", "pip install torch"),
        ("'./pulled', engine_name='aoti'", "runs on torch, which is not installed here"),
        ("'./pulled', mode='test'", "test mode compares with the portable program"),
        ("'./pulled', device='cuda'", "without torch, which is not installed, use 'cpu'"),
        ("'./pulled', trusted_keys='release.pem'", "pip install 'soa-runtime[sign]'"),
        (
            "'jets@production', registry='sqlite:///store/registry.db'",
            "No module named 'mlflow'",
        ),
    ],
)
def test_a_worker_refuses_what_needs_more_packages(
    worker: Path, pulled: Path, arguments: str, message: str
) -> None:
    code = f"import soa_runtime; soa_runtime.load({arguments})"
    process = execute(worker, "-c", code, cwd=pulled)
    assert process.returncode == 1
    assert message in process.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_foreign_module_is_named(worker: Path, tmp_path: Path) -> None:
    (tmp_path / "registry.py").touch()
    process = execute(worker, "-c", "import soa_runtime", cwd=tmp_path)
    assert f"{tmp_path}/registry.py is found as 'registry'" in process.stderr.splitlines()[-1]


@pytest.mark.long
def test_the_wheel_holds_only_its_own_package(wheel: Path) -> None:
    """So it has no file in common with the wheel of soa-pipeline."""
    tops = {name.partition("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"soa_runtime"}


@pytest.mark.long
def test_the_wheel_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert sum(file.file_size for file in archive.infolist()) < 5e6


@pytest.mark.long
def test_beside_soa_pipeline_its_modules_are_used(worker: Path, tmp_path: Path) -> None:
    """With both in one environment, soa-runtime takes the modules of soa-pipeline."""
    code = "import soa_runtime, soa, pipeline; print(soa.__file__, soa_runtime.__file__)"
    [packages] = worker.parents[1].glob("lib/python*/site-packages")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "soa_runtime").symlink_to(packages / "soa_runtime")
    path = f"{ROOT}{os.pathsep}{tmp_path / 'only'}"
    process = execute(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": path})
    modules, package = map(Path, succeeded(process).split())
    assert modules.is_relative_to(ROOT)
    assert package.is_relative_to(tmp_path)


@needs_v3
@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
def test_other_processors_give_the_same_bits(bare_jets: Built, tmp_path: Path) -> None:
    from runtime.opening import Opening, open_version
    from stages.judging.reproducing import reproduce

    opened = open_version(Opening(bare_jets.bundle.path, mode="test"))
    bits = {way.how: way for way in reproduce(opened, "cpu/x86-64-v3", NAME, tmp_path)}
    expected = bits["where it was built"].digest
    assert expected is not None
    for how in ("here", *(f"on qemu's {processor}" for processor in PROCESSORS)):
        assert bits[how].digest == expected, bits[how]
