"""Compiling in a child process: an engine that fails, crashes or hangs is one failed candidate."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import EngineError, Target, TargetError
from engines.kinds import host_cpu_levels
from engines.processes import Outcome
from stages import compile as compiling
from stages.capture import Capture
from stages.compile import Compiled, Step, artifact_file, compile_candidate, compile_here
from tests.models.building import Built

CPU = Target.parse("cpu")


def compiled(
    name: str, capture: Capture, folder: Path, target: Target = CPU, **options: Any
) -> Compiled:
    """The candidate of an engine with these options, compiled in a child process."""
    return compile_candidate(name, capture, target, options, folder, 300)


def test_a_candidate_has_its_files_and_its_time(mlp: Built, tmp_path: Path) -> None:
    candidate = compiled("torchscript", mlp.capture, tmp_path)
    assert candidate.outcome.error is None
    assert (candidate.engine, candidate.files) == ("torchscript", ("model.ts",))
    assert candidate.seconds > 0
    folder = candidate.folder
    assert artifact_file("torchscript", candidate.files, folder, mlp.capture).is_file()


def test_the_script_of_a_candidate_compiles_it_again(mlp: Built, tmp_path: Path) -> None:
    candidate = compiled("torchscript", mlp.capture, tmp_path)
    (candidate.folder / "model.ts").unlink()
    assert subprocess.run([candidate.outcome.script]).returncode == 0
    assert (candidate.folder / "model.ts").is_file()


def test_a_step_counts_for_an_engine_that_writes_no_file(
    mlp: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Count(Step, step="count"):
        def facts(self, engine_name: str, target: Target, files: list[Path]) -> dict[str, Any]:
            return {"files": len(files)}

    def compile_in_this_process(_: str, payload: dict[str, Any], *rest: Any) -> Outcome:
        return Outcome(compile_here(**payload), None, tmp_path, tmp_path)

    declared = {"count": SimpleNamespace(load=lambda: Count)}
    monkeypatch.setattr(compiling, "find_declared", lambda *_: declared)
    monkeypatch.setattr(compiling, "run_isolated", compile_in_this_process)
    candidate = compiled("exported", mlp.capture, tmp_path)
    assert (candidate.files, candidate.facts) == ((), {"files": 0})


def test_an_engine_that_writes_no_file_opens_that_of_the_capture(mlp: Built) -> None:
    assert artifact_file("exported", (), Path("unused"), mlp.capture) == mlp.capture.program
    assert artifact_file("torchscript", (), Path("unused"), mlp.capture) == mlp.capture.script


def test_an_engine_without_any_file_opens_nothing(mlp: Built) -> None:
    with pytest.raises(EngineError, match="aoti has no file to open"):
        artifact_file("aoti", (), Path("unused"), mlp.capture)


def test_one_engine_that_fails_is_a_failed_candidate(mlp: Built, tmp_path: Path) -> None:
    """Inductor refuses an option that it does not know."""
    candidate = compiled("aoti", mlp.capture, tmp_path, no_such_option=1)
    assert candidate.outcome.error is not None
    assert "no_such_option" in candidate.outcome.error
    assert candidate.files == ()
    assert "Traceback" in candidate.outcome.log.read_text()


def test_a_compiler_that_hangs_is_stopped(mlp: Built, tmp_path: Path) -> None:
    candidate = compile_candidate("aoti", mlp.capture, CPU, {}, tmp_path, 0.5)
    assert candidate.outcome.error == "no answer within 0.5 s"


needs_x86 = pytest.mark.skipif("x86-64-v2" not in host_cpu_levels(), reason="needs an x86-64 host")


@needs_x86
def test_code_for_a_target_that_this_host_cannot_run_is_refused(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="this host cannot run cpu/aarch64"):
        compile_here("aoti", str(mlp.capture.program), None, "cpu/aarch64", {}, str(tmp_path))


@needs_x86
def test_a_portable_engine_builds_for_a_target_that_this_host_cannot_run(
    mlp: Built, tmp_path: Path
) -> None:
    program = str(mlp.capture.program)
    assert compile_here("exported", program, None, "cpu/aarch64", {}, str(tmp_path)) == []
