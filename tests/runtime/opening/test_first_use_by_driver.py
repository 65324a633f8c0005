"""A version on a GPU that torch does not drive: on the driver that runs on the CPU.

Each load is in a process of its own (by_driver.py), since a process has one driver.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import EngineError, Target
from engines.lanes import devices
from engines.native import gpus
from engines.target import host_runs
from registry.bundle import Bundle, PulledNote, write_note
from registry.store import Registry
from soa.memory import torch_drives_gpus
from stages import emulate
from tests.models import mlps, project
from tests.models.project import PASSED, TARGET, TARGETS, Built, resealed
from tests.models.shared import made_once

CUDA = "cuda/sm_90"
ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("by_driver.py")
FOLDER = f"targets/{CUDA}/lanes"
_ALONE = {"soa_runtime": ["-S"]}  # without site-packages
WITHOUT_TORCH = ("numpy", "numpy.libs", "safetensors", "lazy_loader")

pytestmark = pytest.mark.skipif(torch_drives_gpus(), reason="torch that is built for GPUs is here")


@dataclass(frozen=True)
class Host:
    """A host of children: its environment and the cache of what was found there."""

    settings: Mapping[str, str]
    cache: Path

    def answer(
        self, ref: str | Path, case: str = "loads", package: str = "pipeline", **more: str
    ) -> Any:
        done = subprocess.run(
            [sys.executable, *_ALONE.get(package, []), SCRIPT, package, case, ref],
            capture_output=True, text=True, env={**os.environ, **self.settings, **more},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def verdicts(self) -> list[Any]:
        return [json.loads(each.read_text())["refused"] for each in self.cache.glob("first-use/*")]


@pytest.fixture(scope="module")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests/stages/test_emulate.py keeps `prove`, too, which takes ten seconds to compile."""
    return made_once(tmp_path_factory, "emulators", lambda folder: None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, emulators: Path, quick_commits: None) -> Built:
    """jets/1 with a kernel that only an emulator has run, in production by an override."""
    try:
        devices.nvrtc()
    except EngineError as error:
        pytest.skip(str(error))
    text = project.CONFIG.replace("[aoti, torchscript, exported]", "[lanes]")
    text = text.replace(TARGETS, f"targets: [{TARGET}, {CUDA}]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: emulators)
        made = project.build(project.write_project(tmp_path_factory.mktemp("driver"), config=text))
    assert made.bundle.manifest.targets[CUDA].status == "emulated"
    return made


def host(
    built: Built, folder: Path, emulators: Path, planted: tuple[str, str] | None = None
) -> Host:
    """With `planted`, a pattern and its replacement, the device computes something else."""
    cache, driver, artifact = folder / "of-host", folder / "driver", folder / "artifact"
    cache.mkdir(parents=True)
    driver.mkdir()
    (cache / "emulators").symlink_to(emulators / "emulators")
    shutil.copytree(built.bundle.path / FOLDER, artifact)
    if planted is not None:
        text = (artifact / "network.cu").read_text()
        wrong = re.sub(*planted, text)
        assert wrong != text
        (artifact / "network.cu").write_text(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "cache_root", lambda: emulators)
        stands_in = emulate.emulator_of(Target.parse(CUDA), artifact, driver)
    return Host(
        {
            **stands_in.environment,
            "PYTHONPATH": str(ROOT),
            "PIPELINE_CACHE": str(cache),
            "PIPELINE_REGISTRY": built.project.registry,
        },
        cache,
    )


def whole(built: Built, folder: Path) -> Path:
    """A promoted copy with all targets."""
    shutil.copytree(built.bundle.path, folder)
    write_note(folder, PulledNote("jets/1", Bundle.open(folder).digest, "somebody", "now"))
    return folder


def pulled(built: Built, folder: Path, **changes: Any) -> Path:
    """A promoted copy that has the CUDA target alone, with another record."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][CUDA]
        named, status = changes.get("engine", "lanes"), changes.get("candidate", "emulated")
        candidate = {**record["candidates"]["lanes"], "status": status}
        other = {"status": changes.get("status", "emulated"), "chosen": named}
        manifest["targets"] = {CUDA: {**record, **other, "candidates": {named: candidate}}}

    path = resealed(built.bundle, folder, edit).path
    write_note(path, PulledNote("jets/1", Bundle.open(path).digest, "somebody", "now"))
    return path


def require_right(found: Any) -> None:
    expected = mlps.PointwiseFirst(1)(torch.tensor(found["given"])).detach()
    torch.testing.assert_close(torch.tensor(found["answers"]), expected, atol=1e-5, rtol=1e-4)


def test_it_is_validated_on_the_device_and_then_runs(
    built: Built, emulators: Path, tmp_path: Path
) -> None:
    here, registry = host(built, tmp_path, emulators), Registry(built.project.registry)
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
    # What was found is not asked again: nothing is here by which it could be.
    (here.cache / "emulators").unlink()
    assert here.answer("jets@production", PATH="", CXX="") == {"engine": "lanes"}


def test_a_wrong_kernel_is_refused_with_the_numbers(
    built: Built, emulators: Path, tmp_path: Path
) -> None:
    folder = pulled(built, tmp_path / "jets")
    here = host(built, tmp_path, emulators, (r"weights\[\] = \{0x\w+u", "weights[] = {0x3f000000u"))
    for _ in range(2):  # the second time by what the first has found
        found = here.answer(folder, "runs")
        assert found["code"] == "load-not-verified" and "\n" not in found["why"]
        assert re.search(r"was emulated .* on this GPU: .*outside", found["why"])
        assert re.search(r"\d\.\d|\de-\d", found["why"])
        (verdict,) = here.verdicts()
        assert verdict in found["why"]


def test_what_the_validation_lacks_is_no_verdict(
    built: Built, emulators: Path, tmp_path: Path
) -> None:
    folder, here = pulled(built, tmp_path / "jets"), host(built, tmp_path, emulators)
    (here.cache / "emulators").unlink()
    found = here.answer(folder, PATH="", CXX="")
    assert found["code"] == "load-not-verified" and "g++" in found["why"]
    assert "\n" not in found["why"] and not here.verdicts()
    (here.cache / "emulators").symlink_to(emulators / "emulators")
    full = here.answer(folder, SOA_EMULATED_FAULT="cuMemAlloc_v2 2")
    assert full["code"] == "load-not-verified" and "out of device memory" in full["why"]
    assert "\n" not in full["why"] and not here.verdicts()
    assert here.answer(folder) == {"engine": "lanes"}


def test_what_does_not_run_there_is_refused(built: Built, emulators: Path, tmp_path: Path) -> None:
    here, folder = host(built, tmp_path, emulators), pulled(built, tmp_path / "jets")
    found = here.answer(folder, SOA_EMULATED_ARCH="80")
    assert found["code"] == "target" and "cuda/sm_80" in found["why"] and CUDA in found["why"]
    needs = pulled(built, tmp_path / "aoti", engine="aoti", status="verified", candidate="valid")
    refused = here.answer(needs)
    assert refused["code"] == "load-without-torch" and "aoti" in refused["why"]
    for each in (found, refused):
        assert "\n" not in each["why"]
    assert not here.verdicts()


def test_a_worker_without_torch(built: Built, emulators: Path, tmp_path: Path) -> None:
    """soa_runtime runs what was verified, and what was not it refuses."""
    packages, site = tmp_path / "packages", Path(np.__file__).parents[1]
    packages.mkdir()
    for name in WITHOUT_TORCH:
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    path = [packages, ROOT / "packages" / "soa-runtime", ROOT]
    here = host(built, tmp_path, emulators)
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    verified = pulled(built, tmp_path / "verified", status="verified", candidate="valid")
    found = here.answer(verified, "runs", "soa_runtime", **more)
    require_right(found)
    assert found["torch"] is False and found["refused"]["allocate"][0] == "collection"
    assert found["refused"]["test mode"][0] == "load-without-torch"
    waits = here.answer(pulled(built, tmp_path / "waits"), "loads", "soa_runtime", **more)
    assert waits["code"] == "load-not-verified" and "emulated" in waits["why"]
    require_right(here.answer(whole(built, tmp_path / "whole"), "wherever", "soa_runtime", **more))
    missing = here.answer(verified, "loads", "soa_runtime", **more, LD_LIBRARY_PATH="")
    assert missing["code"] == "load-without-torch" and "libcuda" in missing["why"]


@pytest.mark.skipif(host_runs(Target.parse(CUDA)), reason="this host has that GPU")
def test_without_a_driver_no_gpu_is_seen() -> None:
    with pytest.raises(EngineError, match="libcuda"):
        gpus()
