"""Engines by name, the files they make, and files that are not theirs."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import ENGINES, EngineError, Portable, Target, engine
from engines.aoti.build import TARGET, AotiBuild, settings_for
from engines.base import FACTS, Engine
from engines.lanes.compiling import compilers
from runtime.session.session import Session
from tests.models.building import ENGINES as BUILT
from tests.models.building import Built

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ENGINES)
def test_each_name_has_its_engine(name: str) -> None:
    found = engine(name)
    assert isinstance(found, Engine)
    assert found.name == name


def test_an_unknown_engine() -> None:
    with pytest.raises(EngineError, match="unknown engine 'tvm': use one of lanes, aoti, "):
        engine("tvm")


@pytest.mark.parametrize("name", ["lanes", "aoti", "aoti-standalone"])
def test_without_a_compiler(
    mlp: Built, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers, "find_spec", lambda module: None)  # without ziglang
    source = Portable(mlp.capture.program, None)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler is here"):
        engine(name).compile(source, Target.parse("cpu/x86-64-v3"), {}, tmp_path)


def test_only_the_engine_asked_for_is_imported() -> None:
    code = "import sys; from engines import engine; engine('lanes'); print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "engines.lanes.engine" in imported, done.stderr
    assert imported.isdisjoint({"torch", "engines.aoti", "engines.exported", "engines.torchscript"})


@pytest.mark.parametrize("name", ["aoti", "aoti-autotune", "aoti-folded"])
def test_an_artifact_opens_wherever_its_folder_lies(mlp: Built, name: str, tmp_path: Path) -> None:
    """Also one of an engine that is gone."""
    moved = tmp_path / "a folder" / "elsewhere"
    shutil.copytree(mlp.files["aoti"].parent, moved)
    given, written = mlp.collections({"n": 33})
    again, other = mlp.collections({"n": 33})
    mlp.session("aoti").run(given, written)
    executable = engine(name).open(moved / mlp.files["aoti"].name, CPU)
    Session(mlp.signature, executable).run(again, other)
    assert torch.equal(written["tags"].memory()[0], other["tags"].memory()[0])


def test_aoti_keeps_the_library_and_what_it_needs_only(mlp: Built) -> None:
    folder = mlp.files["aoti"].parent
    assert mlp.files["aoti"].suffix == ".so"
    suffixes = {file.suffix for file in folder.iterdir()}
    assert suffixes <= {".so", ".json", ".bin", ".txt"}  # no package, source or object files


def test_cpu_code_is_built_for_the_target_and_not_for_the_host() -> None:
    v3 = settings_for(Target.parse("cpu/x86-64-v3"), {})
    assert v3 == {"cpp.march": "x86-64-v3", "cpp.simdlen": 256, "cpp.threads": 1}
    v2 = settings_for(Target.parse("cpu/x86-64-v2"), {"threads": 4, "max_autotune": True})
    assert v2 == {
        "cpp.march": "x86-64-v2",
        "cpp.simdlen": 1,
        "cpp.threads": 4,
        "max_autotune": True,
    }
    assert settings_for(Target.parse("cpu/aarch64"), {})["cpp.march"] == "armv8-a"


@pytest.mark.parametrize(("machine", "level"), [("x86_64", "x86-64-v2"), ("aarch64", "armv8-a")])
@pytest.mark.parametrize("target", ["cuda/sm_90", "rocm/gfx90a"])
def test_what_launches_kernels_is_built_for_any_host(
    machine: str, level: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the settings with which a GPU's artifact is built, and torch's own flags."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    class Built(AotiBuild):
        def _compile(self, *given: Any) -> list[str]:
            return ["model.so"]

    monkeypatch.setattr("platform.machine", lambda: machine)
    settings = settings_for(Target.parse(target), {"max_autotune": True})
    files = Built().compile(Portable(tmp_path, None), Target.parse(target), {}, tmp_path)
    monkeypatch.undo()
    assert settings["cpp.march"] == level
    assert json.loads((tmp_path / FACTS).read_text()) == {"host_code": level}
    assert files == ["model.so", TARGET, FACTS]
    if machine == "x86_64" == platform.machine():
        with config.patch(settings):
            options = CppTorchDeviceOptions(
                vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True
            )
        flags = options.get_cflags()
        assert f"march={level}" in flags
        assert not [flag for flag in flags if "native" in flag or "avx" in flag]


def test_the_exported_engine_runs_the_portable_file_itself(mlp: Built) -> None:
    source = Portable(mlp.capture.program, None)
    assert engine("exported").portable_file(source) == mlp.capture.program
    assert engine("aoti").portable_file(source) is None


def test_torchscript_without_a_torchscript_file(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="neither scripts nor traces"):
        engine("torchscript").compile(
            Portable(mlp.capture.program, None), Target.parse("cpu"), {}, tmp_path
        )


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("content", [b"", b"no model at all", None])
def test_an_error_names_the_file_that_does_not_open(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EngineError, match=r"\bmine\b"):
        engine(name).open(file, CPU)


@pytest.mark.parametrize("name", BUILT)
def test_a_truncated_artifact(mlp: Built, name: str, tmp_path: Path) -> None:
    """The file is cut in its header; digests find other cuts before an engine opens it."""
    whole = mlp.files[name].read_bytes()
    file = tmp_path / mlp.files[name].name
    file.write_bytes(whole[:100])
    with pytest.raises(EngineError, match=file.name):
        engine(name).open(file, CPU)
