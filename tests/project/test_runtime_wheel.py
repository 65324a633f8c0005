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

import soa_pipeline
from engines.kinds import host_cpu_levels
from examples.nanoaod import data
from pipeline.building.run_config import run as pipeline_run
from pipeline.promotion.pulling import pull
from registry.store.registry import Registry
from stages.judging.reproducing import PROCESSORS
from tests.models.project import PASSED, Built, cli, refusal
from tests.project.test_packaging import execute, installed, succeeded

ROOT = Path(soa_pipeline.__file__).parent
SOURCE = ROOT / "packages" / "soa-runtime"
NAME = "lanes"
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


found = {"digest": answer(1000), "seconds": time.perf_counter() - begun}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["rss_mb"] = int(status["VmRSS"].split()[0]) / 1024
found["engine"] = session.origin.engine
found["version"] = session.origin.version
found["torch"] = "torch" in sys.modules or "libtorch" in open("/proc/self/maps").read()
found["there"] = [name for name in absent if importlib.util.find_spec(name)]
found["modules"] = sys.modules["soa"].__file__
binding = session.bind(
    soa_runtime.Collection.from_arrays(
        session.layout("jets"), {name: np.ones(5, np.float32) for name in "abcdef"}
    ),
    session.collection("tags", 5),
)
session.run_many([binding], threads=2)
print(json.dumps(found))
"""


FIRST = """
import importlib.util, json, sys, time

from pathlib import Path

begun = time.perf_counter()
import soa_runtime
from runtime.opening import answer_bits

folder, reference, absent = sys.argv[1:]
session = soa_runtime.load(folder)
found = {"bits": answer_bits(session, Path(folder, reference))}
found["seconds"] = time.perf_counter() - begun
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["rss_mb"] = int(status["VmRSS"].split()[0]) / 1024
found["libtorch"] = "libtorch" in open("/proc/self/maps").read()
found["there"] = [name for name in absent.split() if importlib.util.find_spec(name)]
print(json.dumps(found))
"""


def run(python: Path, cwd: Path, *arguments: object, code: str = RUN, **env: str) -> dict[str, Any]:
    unshare = ("unshare", "--map-root-user", "--net")
    alone = shutil.which("unshare") and not execute(*unshare, "true", cwd=cwd).returncode
    command = (*(unshare if alone else ()), python, "-c", code, *map(str, arguments))
    found: dict[str, Any] = json.loads(succeeded(execute(*command, cwd=cwd, env=env)))
    return found


def test_both_packages_say_the_same() -> None:
    mine = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mine["requires-python"] == whole["requires-python"]
    assert {d.partition(">")[0] for d in mine["dependencies"]} == set(DEPENDENCIES)
    assert set(mine["dependencies"]) <= set(whole["dependencies"])
    assert mine["optional-dependencies"]["sign"] == whole["optional-dependencies"]["sign"]


@pytest.mark.long
def test_an_sdist_holds_all_that_its_wheel_is_built_from(wheel: Path, tmp_path: Path) -> None:
    """The sdist also holds the modules outside the package's folder, so it suffices alone."""
    assert wheel.name.startswith(f"soa_runtime-{soa_pipeline.__version__}-cp311-abi3-")
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
    (again,) = (tmp_path / "built").iterdir()
    names = [sorted(zipfile.ZipFile(each).namelist()) for each in (wheel, again)]
    assert names[0] == names[1]


@needs_v3
@pytest.mark.long
def test_a_worker_without_torch(worker: Path, bare_jets: Built, tmp_path: Path) -> None:
    registry, ref = promoted(bare_jets, tmp_path)
    said = cli("pull", ref, tmp_path / "pulled", "--runtime", "--registry", registry.uri).stdout
    assert f"{NAME} runs on cpu/x86-64-v3 without torch" in said
    env = {"PIPELINE_CACHE": str(tmp_path / "cache")}
    found = run(worker, tmp_path, tmp_path / "pulled", "production", " ".join(ABSENT), **env)
    assert (found["engine"], found["version"]) == (NAME, "1")
    assert not found["torch"] and not found["there"]
    assert Path(found["modules"]).is_relative_to(worker.parents[1])
    assert found["rss_mb"] < 60  # the figures are in benchmarks/RESULTS.md
    # The worker also loads a version that another process has cached on this host.
    import pipeline

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", env["PIPELINE_CACHE"])
        session = pipeline.load(
            "jets@production", registry=registry, lookup="prefer-cache", engine_name=NAME
        )
    session.close()
    again = run(worker, tmp_path, "jets@production", "production", "torch", registry.uri, **env)
    assert again["digest"] == found["digest"] and not again["torch"]


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
    written = yaml.safe_load((CONFIGS / name).read_text())
    engine_name = NO_LANES.get(name, NAME)
    written |= {"engines": [engine_name], "targets": ["cpu"], "compile": {"benchmark_s": 0.1}}
    config = tmp_path / "configs" / name
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump(written, sort_keys=False))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    done = pipeline_run(config, registry, tmp_path / "work")
    made = [each.candidates[engine_name] for each in done.bundle.manifest.targets.values()]
    assert [each.reason for each in made] == [None] * len(made)
    registry.promote(done.version, "production", PASSED)
    pull(registry, done.version.ref, tmp_path / "pulled", runtime=True)
    reference = done.bundle.manifest.reference
    words = (tmp_path / "pulled", reference, " ".join(ABSENT))
    found = run(worker, tmp_path, *words, code=FIRST, PIPELINE_CACHE=str(tmp_path / "cache"))
    assert not found["libtorch"] and not found["there"]
    assert {found["bits"], *(each.bits for each in made)} == {found["bits"]}
    print(name, found, [each.compile_seconds for each in made])


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
def test_what_a_worker_refuses(worker: Path, jets: Built, tmp_path: Path) -> None:
    registry, ref = promoted(jets, tmp_path)
    why = refusal("pull", ref, tmp_path / "none", "--runtime", "--registry", registry.uri)
    assert why.startswith("jets/1 was not pulled: jets runs on torch") and NAME in why
    assert not (tmp_path / "none").exists()
    pull(registry, ref, tmp_path / "pulled")

    def refused(*code: str) -> str:
        done = execute(worker, "-c", "; ".join(("import soa_runtime", *code)), cwd=tmp_path)
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]

    load = f"soa_runtime.load({str(tmp_path / 'pulled')!r}"
    assert "jets runs on torch (" in refused(f"{load})")
    assert "pip install torch" in refused(f"{load})")
    assert "runs on torch, which is not installed here" in refused(f"{load}, engine_name='aoti')")
    assert "test mode compares with the portable program" in refused(f"{load}, mode='test')")
    assert "without torch, which is not installed, use 'cpu'" in refused(f"{load}, device='cuda')")
    key = tmp_path / "release.pem"
    key.write_text("a key")
    assert "pip install 'soa-runtime[sign]'" in refused(f"{load}, trusted_keys={str(key)!r})")
    named = f"soa_runtime.load('jets@production', registry={registry.uri!r})"
    assert "No module named 'mlflow'" in refused(named)


@pytest.mark.long
def test_a_foreign_module_is_named(worker: Path, tmp_path: Path) -> None:
    (tmp_path / "registry.py").touch()
    done = execute(worker, "-c", "import soa_runtime", cwd=tmp_path)
    assert f"{tmp_path}/registry.py is found as 'registry'" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_both_in_one_environment(worker: Path, wheel: Path, tmp_path: Path) -> None:
    """The two wheels have no file in common, and the modules of soa-pipeline are used."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        size = sum(each.file_size for each in archive.infolist())
    assert {top for top in tops if not top.endswith(".dist-info")} == {"soa_runtime"}
    assert size < 5e6
    code = "import soa_runtime, soa, pipeline; print(soa.__file__, soa_runtime.__file__)"
    [packages] = worker.parents[1].glob("lib/python*/site-packages")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "soa_runtime").symlink_to(packages / "soa_runtime")
    path = f"{ROOT}{os.pathsep}{tmp_path / 'only'}"
    done = execute(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": path})
    where, face = succeeded(done).split()
    assert Path(where).is_relative_to(ROOT) and Path(face).is_relative_to(tmp_path)


@needs_v3
@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
def test_other_processors_give_the_same_bits(bare_jets: Built, tmp_path: Path) -> None:
    from runtime.opening import Opening, open_version
    from stages.judging.reproducing import reproduce

    opened = open_version(Opening(bare_jets.bundle.path, mode="test"))
    found = {b.how: b for b in reproduce(opened, "cpu/x86-64-v3", NAME, tmp_path)}
    known = found["where it was built"].digest
    assert known is not None
    for how in ("here", *(f"on qemu's {processor}" for processor in PROCESSORS)):
        assert found[how].digest == known, found[how]
