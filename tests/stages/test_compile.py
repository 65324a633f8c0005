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
    return compile_candidate(name, capture, target, options, folder, 300)


def test_a_candidate_with_its_log_and_script(mlp: Built, tmp_path: Path) -> None:
    made = compiled("torchscript", mlp.capture, tmp_path)
    assert made.outcome.error is None
    assert made.engine == "torchscript"
    assert made.files == ("model.ts",)
    assert made.seconds > 0
    assert artifact_file(made.engine, made.files, made.folder, mlp.capture).is_file()
    file = made.folder / "model.ts"
    file.unlink()
    assert subprocess.run([made.outcome.script]).returncode == 0
    assert file.is_file()


def test_a_step_counts_for_an_engine_that_writes_no_file(
    mlp: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Count(Step, step="count"):
        def facts(self, engine_name: str, target: Target, files: list[Path]) -> dict[str, Any]:
            return {"files": len(files)}

    def here(_: str, payload: dict[str, Any], *more: Any) -> Outcome:
        return Outcome(compile_here(**payload), None, tmp_path, tmp_path)

    declared = {"count": SimpleNamespace(load=lambda: Count)}
    monkeypatch.setattr(compiling, "declared", lambda *_: declared)
    monkeypatch.setattr(compiling, "run_isolated", here)
    made = compiled("exported", mlp.capture, tmp_path)
    assert (made.files, made.facts) == ((), {"files": 0})


def test_the_portable_file_runs_where_nothing_is_made(mlp: Built) -> None:
    assert artifact_file("exported", (), Path("unused"), mlp.capture) == mlp.capture.program
    assert artifact_file("torchscript", (), Path("unused"), mlp.capture) == mlp.capture.script
    with pytest.raises(EngineError, match="aoti has no file to open"):
        artifact_file("aoti", (), Path("unused"), mlp.capture)


def test_one_engine_that_fails_is_a_failed_candidate(mlp: Built, tmp_path: Path) -> None:
    """Inductor refuses an option that it does not know."""
    made = compiled("aoti", mlp.capture, tmp_path, no_such_option=1)
    assert made.outcome.error is not None
    assert "no_such_option" in made.outcome.error
    assert made.files == ()
    assert "Traceback" in made.outcome.log.read_text()


def test_a_compiler_that_hangs_is_stopped(mlp: Built, tmp_path: Path) -> None:
    made = compile_candidate("aoti", mlp.capture, CPU, {}, tmp_path, 0.5)
    assert made.outcome.error == "no answer within 0.5 s"


@pytest.mark.skipif("x86-64-v2" not in host_cpu_levels(), reason="needs an x86-64 host")
def test_a_target_that_this_host_cannot_run(mlp: Built, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="this host cannot run cpu/aarch64"):
        compile_here("aoti", str(mlp.capture.program), None, "cpu/aarch64", {}, str(tmp_path))
    assert (
        compile_here("exported", str(mlp.capture.program), None, "cpu/aarch64", {}, str(tmp_path))
        == []
    )
