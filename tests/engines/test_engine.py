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
    by_name = engine(name)
    assert isinstance(by_name, Engine)
    assert by_name.name == name


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EngineError, match="unknown engine 'tvm': use one of lanes, aoti, "):
        engine("tvm")


@pytest.mark.parametrize("name", ["lanes", "aoti", "aoti-standalone"])
def test_a_host_without_a_compiler_is_said(
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
    """`aoti-autotune` and `aoti-folded` are former names of `aoti`, in older bundles."""
    moved = tmp_path / "a folder" / "elsewhere"
    shutil.copytree(mlp.files["aoti"].parent, moved)
    executable = engine(name).open(moved / mlp.files["aoti"].name, CPU)
    inputs, written = mlp.collections({"n": 33})
    _, written_by_moved = mlp.collections({"n": 33})
    mlp.session("aoti").run(inputs, written)
    Session(mlp.signature, executable).run(inputs, written_by_moved)
    assert torch.equal(written["tags"].memory()[0], written_by_moved["tags"].memory()[0])


def test_an_artifact_of_aoti_has_no_package_source_or_object_file(mlp: Built) -> None:
    library = mlp.files["aoti"]
    assert library.suffix == ".so"
    suffixes = {file.suffix for file in library.parent.iterdir()}
    assert suffixes <= {".so", ".json", ".bin", ".txt"}


@pytest.mark.parametrize(
    ("target", "options", "settings"),
    [
        ("cpu/x86-64-v3", {}, {"cpp.march": "x86-64-v3", "cpp.simdlen": 256, "cpp.threads": 1}),
        (
            "cpu/x86-64-v2",
            {"threads": 4, "max_autotune": True},
            {
                "cpp.march": "x86-64-v2",
                "cpp.simdlen": 1,
                "cpp.threads": 4,
                "max_autotune": True,
            },
        ),
    ],
)
def test_cpu_code_is_built_for_the_target_and_not_for_the_host(
    target: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert settings_for(Target.parse(target), options) == settings


def test_aarch64_is_built_for_its_first_level() -> None:
    assert settings_for(Target.parse("cpu/aarch64"), {})["cpp.march"] == "armv8-a"


GPUS = pytest.mark.parametrize("target", ["cuda/sm_90", "rocm/gfx90a"])


@pytest.mark.parametrize(("machine", "level"), [("x86_64", "x86-64-v2"), ("aarch64", "armv8-a")])
@GPUS
def test_what_launches_kernels_is_built_for_any_host(
    machine: str, level: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the settings of torch's compiler, and in the facts of the artifact."""

    class WithoutACompiler(AotiBuild):
        def _compile(self, *arguments: Any) -> list[str]:
            return ["model.so"]

    monkeypatch.setattr("platform.machine", lambda: machine)
    settings = settings_for(Target.parse(target), {"max_autotune": True})
    build = WithoutACompiler()
    files = build.compile(Portable(tmp_path, None), Target.parse(target), {}, tmp_path)
    assert settings["cpp.march"] == level
    assert json.loads((tmp_path / FACTS).read_text()) == {"host_code": level}
    assert files == ["model.so", TARGET, FACTS]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch makes flags for this host")
@GPUS
def test_torch_makes_flags_for_any_host_of_what_launches_kernels(target: str) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch(settings_for(Target.parse(target), {"max_autotune": True})):
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True)
    flags = options.get_cflags()
    assert "march=x86-64-v2" in flags
    assert not [flag for flag in flags if "native" in flag or "avx" in flag]


def test_the_exported_engine_runs_the_portable_file_itself(mlp: Built) -> None:
    source = Portable(mlp.capture.program, None)
    assert engine("exported").portable_file(source) == mlp.capture.program
    assert engine("aoti").portable_file(source) is None


def test_torchscript_refuses_a_model_without_a_torchscript_file(mlp: Built, tmp_path: Path) -> None:
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
def test_an_error_names_a_truncated_artifact(mlp: Built, name: str, tmp_path: Path) -> None:
    """The file is cut in its header; digests find other cuts before an engine opens it."""
    whole = mlp.files[name].read_bytes()
    file = tmp_path / mlp.files[name].name
    file.write_bytes(whole[:100])
    with pytest.raises(EngineError, match=file.name):
        engine(name).open(file, CPU)
