"""A version on a GPU for which torch is not built; the CUDA driver is emulated on the CPU.

Each load is in a process of its own, as a process has one driver. Loads that need torch run in
forks of one process that has imported it (`by_driver.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import EngineError, Target
from engines.lanes.compiling import devices
from engines.native import gpus
from engines.target import host_runs
from registry.bundle import Bundle
from registry.store import Registry
from soa.memory import torch_drives_gpus
from stages.judging import emulate
from tests.models import mlps, project
from tests.models.emulators import emulators as kept_emulators
from tests.models.project import PASSED, TARGET, TARGETS, Built, resealed
from tests.models.versions import vouched

CUDA = "cuda/sm_90"
ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("by_driver.py")
FOLDER = f"targets/{CUDA}/lanes"
WITHOUT_TORCH = ("numpy", "numpy.libs", "safetensors", "lazy_loader")

pytestmark = pytest.mark.skipif(torch_drives_gpus(), reason="torch that is built for GPUs is here")


class Loads:
    """A process of `by_driver.py`, which forks a child for each load."""

    def __init__(self, driver: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, "pipeline"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **driver, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def answer(self, settings: Mapping[str, str], case: str, ref: str) -> Any:
        """The result of a case in a child with these variables of the environment."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([case, ref, dict(settings)]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


@dataclass(frozen=True)
class Host:
    """The environment of a simulated host, and its cache with the verdicts."""

    loads: Loads
    settings: Mapping[str, str]
    cache: Path

    def answer(self, ref: str | Path, case: str = "loads", **variables: str) -> Any:
        """The result of a case; `variables` change this host's environment."""
        return self.loads.answer({**self.settings, **variables}, case, str(ref))

    def without_torch(self, ref: Path, case: str = "loads", **variables: str) -> Any:
        """Loads with soa_runtime, in a Python without site-packages."""
        process = subprocess.run(
            [sys.executable, "-S", SCRIPT, "soa_runtime"],
            text=True,
            capture_output=True,
            input=json.dumps([case, str(ref), {}]),
            env={**os.environ, **self.settings, **variables},
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    def verdicts(self) -> list[Any]:
        """The recorded validations: None for a good one, else the reason."""
        return [json.loads(note.read_text()) for note in self.cache.glob("first-use-notes/*")]


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder shared with test_emulate.py."""
    return kept_emulators(tmp_path_factory)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, emulators: Path, bare_jets: Built) -> Built:
    """jets/1 with a kernel that only an emulator has run. Everything else is from `bare_jets`."""
    try:
        devices.load_nvrtc()
    except EngineError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("driver")
    shutil.copytree(bare_jets.project.folder, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "store")
    copy = project.project_in(folder)
    copy.variant(
        "config.yaml", ("[aoti, lanes]", "[lanes]"), (TARGETS, f"targets: [{TARGET}, {CUDA}]")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: emulators)
        jets = project.build(copy)
    assert jets.bundle.manifest.targets[CUDA].status == "emulated"
    return jets


def driver_of(
    built: Built, emulators: Path, folder: Path, planted: tuple[str, str] | None = None
) -> Mapping[str, str]:
    """The variables of the environment with which the emulated driver is loaded.

    `planted` is a pattern in the kernel and its replacement: the device then computes something
    else.
    """
    driver, artifact = folder / "driver", folder / "artifact"
    driver.mkdir()
    shutil.copytree(built.bundle.path / FOLDER, artifact)
    if planted is not None:
        text = (artifact / "network.cu").read_text()
        wrong = re.sub(*planted, text)
        assert wrong != text
        (artifact / "network.cu").write_text(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: emulators)
        return emulate.emulator_of(Target.parse(CUDA), artifact, driver).environment


@pytest.fixture(scope="module")
def driver(
    built: Built, emulators: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    return driver_of(built, emulators, tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def loads(driver: Mapping[str, str]) -> Iterator[Loads]:
    process = Loads(driver)
    yield process
    process.close()


@pytest.fixture
def here(
    built: Built, emulators: Path, driver: Mapping[str, str], loads: Loads, tmp_path: Path
) -> Host:
    """A host with the emulated GPU, and an empty cache."""
    cache = tmp_path / "of-host"
    cache.mkdir()
    (cache / "emulators").symlink_to(emulators / "emulators")
    settings = {"PIPELINE_CACHE": str(cache), "PIPELINE_REGISTRY": built.project.registry}
    return Host(loads, {**driver, **settings}, cache)


def whole(built: Built, folder: Path) -> Path:
    """A promoted copy with all targets."""
    return vouched(Bundle.open(shutil.copytree(built.bundle.path, folder)))


def pulled(built: Built, folder: Path, *, verified: bool = False, engine: str = "lanes") -> Path:
    """A promoted copy with only the CUDA target, of one artifact: verified, or only emulated."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][CUDA]
        artifact = {**record["candidates"]["lanes"], "status": "valid" if verified else "emulated"}
        changes = {"status": "verified" if verified else "emulated", "chosen": engine}
        manifest["targets"] = {CUDA: {**record, **changes, "candidates": {engine: artifact}}}

    return vouched(resealed(built.bundle, folder, edit))


def require_right(result: Any) -> None:
    """Compares the answers of a case with those of the model."""
    expected = mlps.PointwiseFirst(1)(torch.tensor(result["given"])).detach()
    torch.testing.assert_close(torch.tensor(result["answers"]), expected, atol=1e-5, rtol=1e-4)


def require_error(result: Any, code: str, *words: str) -> None:
    """Checks that a case was refused in one line, in which the words occur."""
    assert result["code"] == code
    assert "\n" not in result["why"]
    for word in words:
        assert word in result["why"]


def test_it_is_validated_on_the_device_and_then_runs(built: Built, here: Host) -> None:
    registry = Registry(built.project.registry)
    registry.promote(registry.find("jets/1"), "staging", PASSED)
    assert here.answer("jets@staging")["code"] == "load-not-promoted"
    assert here.verdicts() == []
    registry.promote(registry.find("jets/1"), "production", PASSED)
    result = here.answer("jets@production", "runs")
    assert (result["target"], result["engine"]) == (CUDA, "lanes")
    require_right(result)
    assert here.verdicts() == [None]
    # A recorded verdict is not computed again: the tools for it are missing here.
    (here.cache / "emulators").unlink()
    assert here.answer("jets@production", PATH="", CXX="") == {"engine": "lanes"}


def test_what_such_a_gpu_does_not_have_is_refused(built: Built, here: Host, tmp_path: Path) -> None:
    refused = here.answer(pulled(built, tmp_path / "jets", verified=True), "runs")["refused"]
    assert {mistake: code for mistake, (code, _) in refused.items()} == {
        "allocate": "collection",
        "no stream": "bind",
        "graph": "bind",
        "memory of the host": "run",
        "test mode": "load-without-torch",
        "another GPU": "load",
    }
    assert not any("\n" in message for _, message in refused.values())


def test_a_wrong_kernel_is_refused_with_the_numbers(
    built: Built, here: Host, emulators: Path, tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets")
    planted = (r"weights\[\] = \{0x\w+u", "weights[] = {0x3f000000u")
    wrong = driver_of(built, emulators, tmp_path, planted)
    here = replace(here, settings={**here.settings, "SOA_EMULATED": wrong["SOA_EMULATED"]})
    for _ in range(2):  # the second load reads the verdict of the first
        result = here.answer(folder, "runs")
        (verdict,) = here.verdicts()
        require_error(result, "load-not-verified", verdict)
        assert re.search(r"was emulated .* on this GPU: .*outside", result["why"])
        assert re.search(r"\d\.\d|\de-\d", result["why"])  # a number


def test_without_the_tools_of_a_validation_there_is_no_verdict(
    built: Built, here: Host, tmp_path: Path
) -> None:
    (here.cache / "emulators").unlink()
    result = here.answer(pulled(built, tmp_path / "jets"), PATH="", CXX="")
    require_error(result, "load-not-verified", "g++")
    assert here.verdicts() == []


def test_without_the_memory_for_a_validation_there_is_no_verdict(
    built: Built, here: Host, tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets")
    result = here.answer(folder, SOA_EMULATED_FAULT="cuMemAlloc_v2 2")  # the second call fails
    require_error(result, "load-not-verified", "out of device memory")
    assert here.verdicts() == []
    assert here.answer(folder) == {"engine": "lanes"}


def test_a_target_of_another_gpu_is_refused(built: Built, here: Host, tmp_path: Path) -> None:
    result = here.answer(pulled(built, tmp_path / "jets"), SOA_EMULATED_ARCH="80")
    require_error(result, "target", "cuda/sm_80", CUDA)
    assert here.verdicts() == []


def test_an_engine_that_needs_torch_is_refused(built: Built, here: Host, tmp_path: Path) -> None:
    folder = pulled(built, tmp_path / "aoti", verified=True, engine="aoti")
    require_error(here.answer(folder), "load-without-torch", "aoti")
    assert here.verdicts() == []


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a worker: soa_runtime and the packages that it needs, without torch."""
    packages, site = tmp_path_factory.mktemp("packages"), Path(np.__file__).parents[1]
    for name in WITHOUT_TORCH:
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    path = [packages, ROOT / "packages" / "soa-runtime", ROOT]
    return {"PYTHONPATH": os.pathsep.join(map(str, path))}


def test_a_worker_without_torch_runs_a_verified_target(
    built: Built, here: Host, worker: dict[str, str], tmp_path: Path
) -> None:
    result = here.without_torch(pulled(built, tmp_path / "jets", verified=True), "runs", **worker)
    require_right(result)
    assert result["torch"] is False
    assert result["refused"]["allocate"][0] == "collection"
    assert result["refused"]["test mode"][0] == "load-without-torch"


def test_a_worker_without_torch_refuses_a_target_that_is_not_verified(
    built: Built, here: Host, worker: dict[str, str], tmp_path: Path
) -> None:
    result = here.without_torch(pulled(built, tmp_path / "jets"), **worker)
    require_error(result, "load-not-verified", "emulated")


def test_a_worker_without_torch_runs_on_the_cpu_too(
    built: Built, here: Host, worker: dict[str, str], tmp_path: Path
) -> None:
    require_right(here.without_torch(whole(built, tmp_path / "whole"), "wherever", **worker))


def test_a_worker_without_a_driver_names_the_library(
    built: Built, here: Host, worker: dict[str, str], tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets", verified=True)
    result = here.without_torch(folder, **worker, LD_LIBRARY_PATH="")
    require_error(result, "load-without-torch", "libcuda")


@pytest.mark.skipif(host_runs(Target.parse(CUDA)), reason="this host has that GPU")
def test_without_a_driver_no_gpu_is_seen() -> None:
    with pytest.raises(EngineError, match="libcuda"):
        gpus()
