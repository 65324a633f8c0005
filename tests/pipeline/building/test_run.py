"""`pipeline run`: for the first time, again, after a change, and after an interruption."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from registry.bundle.bundle import Bundle
from registry.errors import NotFoundError
from registry.store.registry import Registry
from tests.models import mlps
from tests.models.project import (
    CONFIG,
    TARGET,
    Built,
    Project,
    cli,
    first_step,
    refusal,
    write_project,
)

# Ctrl-C must reach the command, also if the tests themselves run with SIGINT ignored.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from soa_pipeline import main
sys.argv[0] = "pipeline"
main()
"""


_STEPS = (("compile", "for"), ("validate", "on"))


def snapshot(folder: Path) -> dict[str, int]:
    """The modification time of every file and folder."""
    return {str(path): path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


_ENGINES = ("aoti", "torchscript", "exported")


def test_the_first_run_does_all_steps(jets: Built) -> None:
    each = {f"{do} {name} {at} {TARGET}" for name in _ENGINES for do, at in _STEPS}
    first, *between, benchmark, package, register = jets.answer["worked"]
    assert first == "capture" and each <= set(between)  # in parallel, so in any order
    assert (benchmark, package, register) == ("benchmark on cpu", "package", "register")
    stages = {"capture", "compile", "validate", "tiles", "benchmark"}
    assert set(jets.bundle.manifest.provenance.seconds) == stages


def test_the_first_run_registers_a_version(jets: Built) -> None:
    assert jets.answer["version"] == "jets/1"
    version = Registry(jets.project.registry).find("jets")
    assert version.digest == jets.bundle.digest == jets.answer["digest"]
    assert dict(version.targets) == {TARGET: "verified"}


def test_each_candidate_of_the_first_run_is_valid(jets: Built) -> None:
    record = jets.bundle.manifest.targets[TARGET]
    assert jets.answer["targets"] == {TARGET: {"status": "verified", "chosen": record.chosen}}
    verdicts = {name: each.status for name, each in record.candidates.items()}
    assert verdicts == dict.fromkeys(_ENGINES, "valid")


def test_reference_of_logarithms(tmp_path: Path, empty: Registry) -> None:
    """With the default inputs half of the answers are NaN: refused, unless the config allows it."""
    columns = "columns: [a, b, c, d, e, f]"
    logs = f"{columns}, preprocess: {{features: [[a, log], b, c, d, e, f]}}"
    config = CONFIG.replace(columns, logs).replace("aoti, torchscript, ", "")
    project = write_project(tmp_path / "project", config=config)
    at = ("--work", project.work, "--registry", empty.uri)
    line = refusal("run", project.config, *at)
    assert "output 'probabilities'" in line
    assert re.search(r"column 'x', row \d+ at n=\d+", line)
    assert "reference: ranges" in line
    with pytest.raises(NotFoundError):
        empty.versions("jets")
    # With this seed the first row is finite; without finite values no limit helps.
    allowed = ("reference: {", "reference: {seed: 5, nonfinite: 0.6, ")
    said = cli("run", project.variant("allowed.yaml", allowed), *at).stdout
    show = ("show", "jets", "--registry", empty.uri)
    (output,) = json.loads(cli(*show, "--json").stdout)["reference"]["outputs"]
    bad, values = output["by_size"]["n=1000"]
    assert 0.4 < bad / values < 0.6
    for text in (said, cli(*show).stdout):
        assert f"{bad} at n=1000" in " ".join(text.split())
    done = json.loads(cli("promote", "jets", "--to", "staging", *at[2:], "--json").stdout)
    (gate,) = [d for d in done["decisions"] if d["gate"] == "reference"]
    assert gate["limit"] == "not finite <= 0.6"


CRASHES = """
import torch

class Divides(torch.nn.Module):
    def forward(self, x):
        return torch.div(x[:, :1], x[:, 1:], rounding_mode="trunc")
"""

CRASHES_CONFIG = (
    "{name: divides, model: {factory: model.py:Divides, torchscript_route: none},"
    "collections: {given: {columns: [{name: a, dtype: int32}, {name: b, dtype: int32}]},"
    "answers: {columns: [{name: c, dtype: int32}]}},"
    "inputs: [{name: x, collection: given, columns: [a, b]}],"
    "outputs: [{name: y, collection: answers, columns: [c]}],"
    "rows: {n: {max: 64, typical: [64]}}, reference: {file: rows.npz}, engines: [exported]}"
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ARM's division does not trap")
def test_a_model_that_crashes_on_the_users_own_rows(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CRASHES)
    (tmp_path / "config.yaml").write_text(CRASHES_CONFIG)
    a, b = np.arange(64, dtype=np.int32), np.full(64, 3, np.int32)
    a[50], b[50] = np.iinfo(np.int32).min, -1
    arrays: dict[str, Any] = {"given/a": a, "given/b": b}
    np.savez(tmp_path / "rows.npz", **arrays)
    registry = f"sqlite:///{tmp_path}/registry.db"
    work = tmp_path / "work"
    said = refusal("run", tmp_path / "config.yaml", "--work", work, "--registry", registry)
    assert "SIGFPE" in said and "computing the reference" in said and "n=64" in said
    with pytest.raises(NotFoundError):
        Registry(registry).list()
    assert not list(work.rglob("done.json"))


FORGETS = """
import torch

class Forgets(torch.nn.Module):
    def forward(self, x):
        return x if torch.compiler.is_exporting() else x.clamp(max=100)

def make():
    return Forgets()
"""

FORGETS_CONFIG = (
    "{name: forgets, model: {factory: model.py:make, torchscript_route: none},"
    "collections: {given: {columns: [{name: a, dtype: float32}]},"
    "answers: {columns: [{name: b, dtype: float32}]}},"
    "inputs: [{name: x, collection: given, columns: [a]}],"
    "outputs: [{name: y, collection: answers, columns: [b]}],"
    "rows: {n: {max: 16, typical: [16]}}, reference: {file: rows.npz},"
    "engines: [exported], compile: {benchmark_s: 0.1}}"
)


def test_every_row_of_the_users_file_counts(tmp_path: Path, empty: Registry) -> None:
    """The export differs from the model only for a large value, here in a late row."""
    (tmp_path / "model.py").write_text(FORGETS)
    (tmp_path / "config.yaml").write_text(FORGETS_CONFIG)
    rows = np.random.default_rng(1).normal(size=100).astype("f4")
    columns: Any = {"given/a": rows}
    at = ("--work", tmp_path / "work", "--registry", empty.uri)
    said = []
    for value, code in ((200.0, 1), (99.0, 0)):
        rows[83] = value
        np.savez(tmp_path / "rows.npz", **columns)
        said.append(cli("run", tmp_path / "config.yaml", *at, code=code).output)
    assert "max abs deviation 100" in " ".join(said[0].split())
    assert "differs from eager for infinity" in said[1]
    assert "registered forgets/1" in said[1]


def test_second_run_does_no_work(jets: Built) -> None:
    project = jets.project
    before = snapshot(project.folder)
    answer = project.run()
    mine = Path(answer["bundle"])  # in this process's copy of the project
    assert mine.is_relative_to(project.work) and Bundle.open(mine).digest == jets.bundle.digest
    page = project.work / "reports" / "jets-1.html"
    assert "jets/1" in page.read_text()
    here = {"worked": [], "bundle": str(mine), "report": str(page)}
    assert answer == {**jets.answer, **here}
    text = cli("run", project.config, "--work", project.work, "--registry", project.registry)
    assert text.stdout.startswith("jets/1 is up to date: nothing to do (")
    assert text.stderr == ""
    assert snapshot(project.folder) == before


def test_what_the_model_imported_counts_and_no_other_file(
    tmp_path: Path, empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FORGETS.replace("x.clamp(max=100)", "x") + "\nimport layers_of_jets\n"
    data = (
        "from draws_of_jets import draw\n\n"
        "def rows(rows, seed):\n    return {'given': {'a': draw(seed, rows['n']).astype('f4')}}\n"
    )
    helper = (
        "import numpy as np\ndraw = lambda seed, n: np.random.default_rng(seed).normal(size=n)\n"
    )
    for name, text in {
        "model.py": model, "layers_of_jets.py": "A = 1\n", "data.py": data,
        "draws_of_jets.py": helper,
        "config.yaml": FORGETS_CONFIG.replace("file: rows.npz", "factory: data.py:rows"),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)

    run = ("run", tmp_path / "config.yaml", "--work", tmp_path / "work", "--registry", empty.uri)

    assert "registered" in cli(*run).stdout
    (tmp_path / "plot.py").write_text("A = 1\n")
    assert "nothing to do" in cli(*run).stdout
    for name in ("layers_of_jets", "draws_of_jets"):
        file = tmp_path / f"{name}.py"
        kept = file.read_text()
        file.write_text("raise RuntimeError('it is imported again')\n")
        for known in [n for n in sys.modules if n == name or n.startswith("_soa_model_")]:
            monkeypatch.delitem(sys.modules, known)  # as in another process
        assert "it is imported again" in refusal(*run)
        file.write_text(kept)
        assert "registered forgets/1" in cli(*run).stdout  # the version that is there


def test_changed_weights_make_a_new_version(heavy: Built) -> None:
    assert heavy.answer["version"] == "jets/2"
    assert heavy.answer["worked"][0] == "capture"
    assert heavy.project.run()["worked"] == []


def test_other_numbers_in_the_same_files_are_another_model(heavy: Built) -> None:
    project = heavy.project
    weights = project.folder / "weights.safetensors"
    kept = weights.read_bytes()
    save_file(mlps.PointwiseFirst(2, 1920).state_dict(), weights)
    assert first_step(project.config, project.work, project.registry) == "capture"
    weights.write_bytes(kept)
    assert first_step(project.config, project.work, project.registry) is None


def test_changed_tolerance_is_judged_again_but_not_compiled(
    heavy: Built, registry: Registry
) -> None:
    config = heavy.project.variant(
        "tolerance.yaml",
        ("columns: [x, y, z],", "columns: [x, y, z], tolerance: {atol: 0.001, rtol: 0.01},"),
    )
    where = ("--work", heavy.project.work, "--registry", registry.uri)
    done = cli("run", config, *where, "--json")
    (line,) = [line for line in done.stderr.splitlines() if "differs from jets/1 in" in line]
    assert "config_sha256" in line and "program.pt2" in line  # also its weights are others
    answer = json.loads(done.stdout)
    # If tiles are faster, they are validated again too.
    worked = [step for step in answer["worked"] if " in tiles of " not in step]
    assert worked == [f"validate exported on {TARGET}", "package", "register"]
    assert answer["version"] == "jets/2"
    assert answer["digest"] != heavy.answer["digest"]
    assert heavy.project.run()["worked"] == []


def test_another_registry_only_registers(jets: Built, empty: Registry) -> None:
    assert jets.project.run(registry=empty.uri)["worked"] == ["register"]
    assert empty.find("jets").digest == jets.bundle.digest


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[tuple[Project, subprocess.CompletedProcess[str]]]:
    """A run that got Ctrl-C as soon as it began to compile."""
    project = write_project(tmp_path / "project", seed=3)
    project.variant("config.yaml", ("[aoti, torchscript, exported]", "[exported]"))
    arguments = ["run", project.config, "--work", project.work, "--registry", project.registry]
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        assert process.stdout is not None
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("compile") and line.endswith("…\n"):
                process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        code = process.wait()
        watchdog.cancel()
    yield project, subprocess.CompletedProcess(command, code, output, said)


def test_ctrl_c_and_the_next_run_resumes(
    interrupted: tuple[Project, subprocess.CompletedProcess[str]],
) -> None:
    project, broken_off = interrupted
    assert broken_off.returncode == 1
    assert broken_off.stderr.endswith("Aborted!\n")
    assert "Traceback" not in broken_off.stderr
    assert broken_off.stdout.replace("building the model\n", "") == ""
    registry = Registry(project.registry)
    with pytest.raises(NotFoundError):
        registry.find("jets")
    finished = {path.parent.parent.name for path in project.work.rglob("done.json")}
    assert finished - {"compile"} == {"capture"}  # one may be compiled already
    assert not list(project.work.rglob("bundle"))

    (capture,) = project.work.glob("capture/*/program.pt2")
    before = capture.stat().st_mtime_ns
    resumed = project.run()
    assert "capture" not in resumed["worked"]
    assert {f"validate exported on {TARGET}", "package", "register"} <= set(resumed["worked"])
    assert resumed["version"] == "jets/1"
    assert capture.stat().st_mtime_ns == before


def test_compiler_that_fails_is_one_failed_candidate(
    heavy: Built, empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues with the other engine, and prints how to repeat the failure.

    A slower artifact is registered: a promotion is not all that is next.
    """
    monkeypatch.setenv("CXX", "/bin/false")
    project = heavy.project
    config = project.variant("two.yaml", ("[exported]", "[lanes, exported]"))
    result = cli("run", config, "--work", project.work, "--registry", empty.uri)
    assert f"lanes for {TARGET} failed: false failed" in result.stderr
    assert "registered jets/1" in result.stdout
    *_, said, instead, last = result.stdout.splitlines()
    assert said.startswith(f"{TARGET}: lanes failed: ")
    assert instead.startswith(f"{TARGET}: exported ")
    assert re.search(r"[0-9.]+ at n=1000", instead)
    assert last.startswith("next: ") and not last.startswith("next: pipeline promote")
    record = empty.open(empty.find("jets")).manifest.targets[TARGET]
    assert (record.status, record.chosen) == ("verified", "exported")
    failed = record.candidates["lanes"]
    assert (failed.status, failed.files) == ("failed", [])
    assert failed.reason is not None
    script = result.stderr.partition("repeat with: ")[2].partition(")")[0]
    bundle = empty.open(empty.find("jets"))
    for name in ("manifest.json", "reports/validation.json"):
        assert str(project.work) not in bundle.file(name).read_text()
    # tests/stages/test_compile.py runs such a script.
    assert Path(script).is_file() and Path(script).with_name("log.txt").is_file()
    assert "error" in Path(script).with_name("answer.json").read_text()


def test_an_engine_that_is_not_for_a_model_is_called_one_thing_everywhere(
    heavy: Built, empty: Registry
) -> None:
    """tensorrt builds only for GPUs: nothing failed, and no answer was refused."""
    project = heavy.project
    config = project.variant("tensorrt.yaml", ("[exported]", "[tensorrt, exported]"))
    at = ("--registry", empty.uri)
    said = cli("run", config, "--work", project.work, *at)
    assert f"tensorrt for {TARGET} is not applicable: " in said.stderr
    candidate = empty.open(empty.find("jets")).manifest.targets[TARGET].candidates["tensorrt"]
    assert candidate.status == "not applicable"
    reports = json.loads(cli("validate", "jets/1", "--json", *at).stdout)[TARGET]
    assert [each["verdict"] for each in reports if not each["valid"]] == ["not applicable"]
    for text in (said.stdout, cli("show", "jets/1", *at).stdout, cli("ls", *at).stdout):
        assert "failed" not in text and "refused" not in text


def test_no_version_where_every_engine_fails(
    heavy: Built, empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    project = heavy.project
    config = project.variant("only.yaml", ("[exported]", "[lanes]"))
    line = refusal("run", config, "--work", project.work, "--registry", empty.uri)
    assert line.startswith(f"no artifact of 'jets' is valid: {TARGET} lanes: ")
    assert "repeat with: " in line
    assert empty.list() == []


def test_no_version_where_the_model_reads_padding(tmp_path: Path, empty: Registry) -> None:
    """On row-major memory, as in eager mode, it is right: only SoA memory shows the fault."""
    project = write_project(tmp_path / "project")
    config = project.variant(
        "config.yaml",
        ("model.py:talkative", "model.py:ReadsPadding"),
        ("[aoti, torchscript, exported]", "[torchscript, exported]"),
    )
    line = refusal("run", config, "--work", project.work, "--registry", empty.uri)
    assert line.startswith("no artifact of 'jets' is valid: ")
    assert f"{TARGET} torchscript, exported: at n=1: the answers depend on what lies" in line
    assert empty.list() == []
    assert not list(project.work.rglob("bundle"))
