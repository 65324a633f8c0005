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

    def answer(self, ref: str | Path, case: str = "loads", **more: str) -> Any:
        return self.loads.answer({**self.settings, **more}, case, str(ref))

    def without_torch(self, ref: Path, case: str = "loads", **more: str) -> Any:
        """Loads with soa_runtime, in a Python without site-packages."""
        done = subprocess.run(
            [sys.executable, "-S", SCRIPT, "soa_runtime"], text=True, capture_output=True,
            input=json.dumps([case, str(ref), {}]), env={**os.environ, **self.settings, **more},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def verdicts(self) -> list[Any]:
        return [json.loads(each.read_text()) for each in self.cache.glob("first-use-notes/*")]


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder shared with test_emulate.py."""
    return kept_emulators(tmp_path_factory)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, emulators: Path, bare_jets: Built) -> Built:
    """jets/1 with a kernel that only an emulator has run. Everything else is from `bare_jets`."""
    try:
        devices.nvrtc()
    except EngineError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("driver")
    shutil.copytree(bare_jets.project.folder, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "store")
    made = project.project_in(folder)
    made.variant(
        "config.yaml", ("[aoti, lanes]", "[lanes]"), (TARGETS, f"targets: [{TARGET}, {CUDA}]")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: emulators)
        found = project.build(made)
    assert found.bundle.manifest.targets[CUDA].status == "emulated"
    return found


def driver_of(
    built: Built, emulators: Path, folder: Path, planted: tuple[str, str] | None = None
) -> Mapping[str, str]:
    """The environment with the emulated driver.

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
    started = Loads(driver)
    yield started
    started.close()


@pytest.fixture
def here(
    built: Built, emulators: Path, driver: Mapping[str, str], loads: Loads, tmp_path: Path
) -> Host:
    cache = tmp_path / "of-host"
    cache.mkdir()
    (cache / "emulators").symlink_to(emulators / "emulators")
    settings = {"PIPELINE_CACHE": str(cache), "PIPELINE_REGISTRY": built.project.registry}
    return Host(loads, {**driver, **settings}, cache)


def whole(built: Built, folder: Path) -> Path:
    """A promoted copy with all targets."""
    return vouched(Bundle.open(shutil.copytree(built.bundle.path, folder)))


def pulled(built: Built, folder: Path, **changes: Any) -> Path:
    """A promoted copy with only the CUDA target, whose record `changes` alter."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][CUDA]
        named, status = changes.get("engine", "lanes"), changes.get("candidate", "emulated")
        candidate = {**record["candidates"]["lanes"], "status": status}
        other = {"status": changes.get("status", "emulated"), "chosen": named}
        manifest["targets"] = {CUDA: {**record, **other, "candidates": {named: candidate}}}

    return vouched(resealed(built.bundle, folder, edit))


def require_right(found: Any) -> None:
    expected = mlps.PointwiseFirst(1)(torch.tensor(found["given"])).detach()
    torch.testing.assert_close(torch.tensor(found["answers"]), expected, atol=1e-5, rtol=1e-4)


def test_it_is_validated_on_the_device_and_then_runs(built: Built, here: Host) -> None:
    registry = Registry(built.project.registry)
    registry.promote(registry.find("jets/1"), "staging", PASSED)
    assert here.answer("jets@staging")["code"] == "load-not-promoted" and not here.verdicts()
    registry.promote(registry.find("jets/1"), "production", PASSED)
    found = here.answer("jets@production", "runs")
    assert (found["target"], found["engine"]) == (CUDA, "lanes")
    require_right(found)
    assert here.verdicts() == [None]
    codes = {mistake: said[0] for mistake, said in found["refused"].items()}
    assert codes == {
        "allocate": "collection",
        "no stream": "bind",
        "graph": "bind",
        "memory of the host": "run",
        "test mode": "load-without-torch",
        "another GPU": "load",
    }
    assert not any("\n" in said[1] for said in found["refused"].values())
    # A recorded verdict is not computed again: the tools for it are missing here.
    (here.cache / "emulators").unlink()
    assert here.answer("jets@production", PATH="", CXX="") == {"engine": "lanes"}


def test_a_wrong_kernel_is_refused_with_the_numbers(
    built: Built, here: Host, emulators: Path, tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets")
    planted = (r"weights\[\] = \{0x\w+u", "weights[] = {0x3f000000u")
    wrong = driver_of(built, emulators, tmp_path, planted)
    here = replace(here, settings={**here.settings, "SOA_EMULATED": wrong["SOA_EMULATED"]})
    for _ in range(2):  # the second load reads the verdict of the first
        found = here.answer(folder, "runs")
        assert found["code"] == "load-not-verified" and "\n" not in found["why"]
        assert re.search(r"was emulated .* on this GPU: .*outside", found["why"])
        assert re.search(r"\d\.\d|\de-\d", found["why"])
        (verdict,) = here.verdicts()
        assert verdict in found["why"]


def test_what_the_validation_lacks_is_no_verdict(
    built: Built, here: Host, emulators: Path, tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets")
    (here.cache / "emulators").unlink()
    found = here.answer(folder, PATH="", CXX="")
    assert found["code"] == "load-not-verified" and "g++" in found["why"]
    assert "\n" not in found["why"] and not here.verdicts()
    (here.cache / "emulators").symlink_to(emulators / "emulators")
    full = here.answer(folder, SOA_EMULATED_FAULT="cuMemAlloc_v2 2")
    assert full["code"] == "load-not-verified" and "out of device memory" in full["why"]
    assert "\n" not in full["why"] and not here.verdicts()
    assert here.answer(folder) == {"engine": "lanes"}


def test_what_does_not_run_there_is_refused(built: Built, here: Host, tmp_path: Path) -> None:
    folder = pulled(built, tmp_path / "jets")
    found = here.answer(folder, SOA_EMULATED_ARCH="80")
    assert found["code"] == "target" and "cuda/sm_80" in found["why"] and CUDA in found["why"]
    needs = pulled(built, tmp_path / "aoti", engine="aoti", status="verified", candidate="valid")
    refused = here.answer(needs)
    assert refused["code"] == "load-without-torch" and "aoti" in refused["why"]
    for each in (found, refused):
        assert "\n" not in each["why"]
    assert not here.verdicts()


def test_a_worker_without_torch(built: Built, here: Host, tmp_path: Path) -> None:
    """soa_runtime runs a verified target, and refuses one that is not verified."""
    packages, site = tmp_path / "packages", Path(np.__file__).parents[1]
    packages.mkdir()
    for name in WITHOUT_TORCH:
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    path = [packages, ROOT / "packages" / "soa-runtime", ROOT]
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    verified = pulled(built, tmp_path / "verified", status="verified", candidate="valid")
    found = here.without_torch(verified, "runs", **more)
    require_right(found)
    assert found["torch"] is False and found["refused"]["allocate"][0] == "collection"
    assert found["refused"]["test mode"][0] == "load-without-torch"
    waits = here.without_torch(pulled(built, tmp_path / "waits"), **more)
    assert waits["code"] == "load-not-verified" and "emulated" in waits["why"]
    require_right(here.without_torch(whole(built, tmp_path / "whole"), "wherever", **more))
    missing = here.without_torch(verified, **more, LD_LIBRARY_PATH="")
    assert missing["code"] == "load-without-torch" and "libcuda" in missing["why"]


@pytest.mark.skipif(host_runs(Target.parse(CUDA)), reason="this host has that GPU")
def test_without_a_driver_no_gpu_is_seen() -> None:
    with pytest.raises(EngineError, match="libcuda"):
        gpus()
