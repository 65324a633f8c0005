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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
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
from tests.models.versions import copy_of

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
    of_engines = {
        f"{verb} {name} {preposition} {TARGET}" for name in _ENGINES for verb, preposition in _STEPS
    }
    first, *between, benchmark, package, register = jets.answer["worked"]
    assert first == "capture" and of_engines <= set(between)  # in parallel, so in any order
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
    verdicts = {name: candidate.status for name, candidate in record.candidates.items()}
    assert verdicts == dict.fromkeys(_ENGINES, "valid")


@pytest.fixture
def logarithms(tmp_path: Path) -> Project:
    """A model of the logarithm of a column, of which half of the default inputs are negative."""
    columns = "columns: [a, b, c, d, e, f]"
    logs = f"{columns}, preprocess: {{features: [[a, log], b, c, d, e, f]}}"
    config = CONFIG.replace(columns, logs).replace("aoti, torchscript, ", "")
    return write_project(tmp_path / "project", config=config)


def test_a_reference_with_nan_is_refused(logarithms: Project, empty: Registry) -> None:
    """The line names the column and the row, and how to mend it."""
    where = ("--work", logarithms.work, "--registry", empty.uri)
    line = refusal("run", logarithms.config, *where)
    assert "output 'probabilities'" in line
    assert re.search(r"column 'x', row \d+ at n=\d+", line)
    assert "reference: ranges" in line
    with pytest.raises(NotFoundError):
        empty.versions("jets")


def test_a_config_may_allow_a_reference_with_nan(logarithms: Project, empty: Registry) -> None:
    """The run, `show` and the gate say how many values are not finite."""
    # With this seed the first row is finite; without finite values no limit helps.
    change = ("reference: {", "reference: {seed: 5, nonfinite: 0.6, ")
    allowed = logarithms.variant("allowed.yaml", change)
    where = ("--registry", empty.uri)
    run = cli("run", allowed, "--work", logarithms.work, *where).stdout
    show = ("show", "jets", *where)
    (output,) = json.loads(cli(*show, "--json").stdout)["reference"]["outputs"]
    bad, values = output["by_size"]["n=1000"]
    assert 0.4 < bad / values < 0.6
    for text in (run, cli(*show).stdout):
        assert f"{bad} at n=1000" in " ".join(text.split())
    promotion = json.loads(cli("promote", "jets", "--to", "staging", *where, "--json").stdout)
    (gate,) = [d for d in promotion["decisions"] if d["gate"] == "reference"]
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
def test_a_model_that_crashes_on_the_users_own_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CRASHES)
    (tmp_path / "config.yaml").write_text(CRASHES_CONFIG)
    a, b = np.arange(64, dtype=np.int32), np.full(64, 3, np.int32)
    a[50], b[50] = np.iinfo(np.int32).min, -1  # the quotient is no int32: the processor traps
    arrays: dict[str, Any] = {"given/a": a, "given/b": b}
    np.savez(tmp_path / "rows.npz", **arrays)
    registry = f"sqlite:///{tmp_path}/registry.db"
    work = tmp_path / "work"
    message = refusal("run", tmp_path / "config.yaml", "--work", work, "--registry", registry)
    assert "SIGFPE" in message and "computing the reference" in message and "n=64" in message
    with pytest.raises(NotFoundError):
        Registry(registry).list()
    assert not list(work.rglob("done.json"))


# Its export lacks the clamp that the model has.
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
    """The export differs from the model only for a value above 100, here in a late row. The second
    run has the work folder of the first, which was refused, and another file."""
    (tmp_path / "model.py").write_text(FORGETS)
    (tmp_path / "config.yaml").write_text(FORGETS_CONFIG)
    where = ("--work", tmp_path / "work", "--registry", empty.uri)

    def run_with(value: float, code: int) -> str:
        rows = np.random.default_rng(1).normal(size=100).astype("f4")
        rows[83] = value
        columns: Any = {"given/a": rows}
        np.savez(tmp_path / "rows.npz", **columns)
        return " ".join(cli("run", tmp_path / "config.yaml", *where, code=code).output.split())

    assert "max abs deviation 100" in run_with(200.0, 1)
    accepted = run_with(99.0, 0)
    assert "differs from eager for infinity" in accepted and "registered forgets/1" in accepted


def test_second_run_does_no_work(jets: Built) -> None:
    project = jets.project
    before = snapshot(project.folder)
    answer = project.run()
    bundle = Path(answer["bundle"])  # in this process's copy of the project
    assert bundle.is_relative_to(project.work) and Bundle.open(bundle).digest == jets.bundle.digest
    page = project.work / "reports" / "jets-1.html"
    assert "jets/1" in page.read_text()
    assert answer == {**jets.answer, "worked": [], "bundle": str(bundle), "report": str(page)}
    assert snapshot(project.folder) == before


def test_second_run_says_that_there_is_nothing_to_do(jets: Built) -> None:
    project = jets.project
    where = ("--work", project.work, "--registry", project.registry)
    result = cli("run", project.config, *where)
    assert result.stdout.startswith("jets/1 is up to date: nothing to do (")
    assert result.stderr == ""


def test_what_the_model_imported_counts_and_no_other_file(
    tmp_path: Path, empty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the model and of the reference: a changed one is imported again."""
    for name, text in {
        "model.py": FORGETS.replace("x.clamp(max=100)", "x") + "\nimport layers_of_jets\n",
        "layers_of_jets.py": "A = 1\n",
        "data.py": "from draws_of_jets import draw\n\n"
        "def rows(rows, seed):\n    return {'given': {'a': draw(seed, rows['n']).astype('f4')}}\n",
        "draws_of_jets.py": "import numpy as np\n"
        "draw = lambda seed, n: np.random.default_rng(seed).normal(size=n)\n",
        "config.yaml": FORGETS_CONFIG.replace("file: rows.npz", "factory: data.py:rows"),
    }.items():
        (tmp_path / name).write_text(text)
    run = ("run", tmp_path / "config.yaml", "--work", tmp_path / "work", "--registry", empty.uri)
    assert "registered" in cli(*run).stdout
    (tmp_path / "plot.py").write_text("A = 1\n")
    assert "nothing to do" in cli(*run).stdout
    for name in ("layers_of_jets", "draws_of_jets"):
        file = tmp_path / f"{name}.py"
        original = file.read_text()
        file.write_text("raise RuntimeError('it is imported again')\n")
        for module in [n for n in sys.modules if n == name or n.startswith("_soa_model_")]:
            monkeypatch.delitem(sys.modules, module)  # as in another process
        assert "it is imported again" in refusal(*run)
        file.write_text(original)
        assert "registered forgets/1" in cli(*run).stdout  # the version that is there


def test_changed_weights_make_a_new_version(heavy: Built) -> None:
    assert heavy.answer["version"] == "jets/2"
    assert heavy.answer["worked"][0] == "capture"
    assert heavy.project.run()["worked"] == []


def test_other_numbers_in_the_same_files_are_another_model(heavy: Built) -> None:
    project = heavy.project
    weights = project.folder / "weights.safetensors"
    original = weights.read_bytes()
    save_file(mlps.PointwiseFirst(2, 1920).state_dict(), weights)
    assert first_step(project.config, project.work, project.registry) == "capture"
    weights.write_bytes(original)
    assert first_step(project.config, project.work, project.registry) is None


def test_changed_tolerance_is_judged_again_but_not_compiled(
    heavy: Built, registry: Registry
) -> None:
    config = heavy.project.variant(
        "tolerance.yaml",
        ("columns: [x, y, z],", "columns: [x, y, z], tolerance: {atol: 0.001, rtol: 0.01},"),
    )
    where = ("--work", heavy.project.work, "--registry", registry.uri)
    result = cli("run", config, *where, "--json")
    (line,) = [line for line in result.stderr.splitlines() if "differs from jets/1 in" in line]
    assert "config_sha256" in line and "program.pt2" in line  # also its weights are others
    answer = json.loads(result.stdout)
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
def interrupted(tmp_path: Path) -> tuple[Project, subprocess.CompletedProcess[str]]:
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
        errors = ""
        for line in process.stderr:
            errors += line
            if line.startswith("compile") and line.endswith("…\n"):
                process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        code = process.wait()
        watchdog.cancel()
    return project, subprocess.CompletedProcess(command, code, output, errors)


def test_ctrl_c_and_the_next_run_resumes(
    interrupted: tuple[Project, subprocess.CompletedProcess[str]],
) -> None:
    """An interrupted run registers nothing, and keeps the capture, which the next run uses."""
    project, ended = interrupted
    assert ended.returncode == 1
    assert ended.stderr.endswith("Aborted!\n")
    assert "Traceback" not in ended.stderr
    assert ended.stdout.replace("building the model\n", "") == ""
    with pytest.raises(NotFoundError):
        Registry(project.registry).find("jets")
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


@pytest.fixture(scope="module")
def lanes_failed(
    heavy: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, Bundle]:
    """A run of two engines, of which lanes has no compiler, and the bundle that it registered."""
    registry = copy_of(empty_database.parent, tmp_path_factory.mktemp("failed") / "store")
    config = heavy.project.variant("two.yaml", ("[exported]", "[lanes, exported]"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "/bin/false")
        result = cli("run", config, "--work", heavy.project.work, "--registry", registry.uri)
    return result, registry.open(registry.find("jets"))


def test_compiler_that_fails_is_one_failed_candidate(lanes_failed: tuple[Result, Bundle]) -> None:
    """The run continues with the other engine."""
    result, bundle = lanes_failed
    assert f"lanes for {TARGET} failed: false failed" in result.stderr
    assert "registered jets/1" in result.stdout
    record = bundle.manifest.targets[TARGET]
    assert (record.status, record.chosen) == ("verified", "exported")
    failed = record.candidates["lanes"]
    assert (failed.status, failed.files) == ("failed", [])
    assert failed.reason is not None


def test_a_run_with_a_failed_candidate_proposes_more_than_a_promotion(
    lanes_failed: tuple[Result, Bundle],
) -> None:
    """A slower artifact is registered."""
    *_, failed, chosen, last = lanes_failed[0].stdout.splitlines()
    assert failed.startswith(f"{TARGET}: lanes failed: ")
    assert chosen.startswith(f"{TARGET}: exported ")
    assert re.search(r"[0-9.]+ at n=1000", chosen)
    assert last.startswith("next: ") and not last.startswith("next: pipeline promote")


def test_a_failed_candidate_has_a_script_that_repeats_it(
    lanes_failed: tuple[Result, Bundle],
) -> None:
    """tests/stages/test_compile.py runs such a script."""
    script = Path(lanes_failed[0].stderr.partition("repeat with: ")[2].partition(")")[0])
    assert script.is_file() and script.with_name("log.txt").is_file()
    assert "error" in script.with_name("answer.json").read_text()


def test_no_folder_of_the_build_is_in_a_bundle(
    heavy: Built, lanes_failed: tuple[Result, Bundle]
) -> None:
    for name in ("manifest.json", "reports/validation.json"):
        assert str(heavy.project.work) not in lanes_failed[1].file(name).read_text()


def test_an_engine_that_is_not_for_a_model_is_called_one_thing_everywhere(
    heavy: Built, empty: Registry
) -> None:
    """tensorrt builds only for GPUs: nothing failed, and no answer was refused."""
    project = heavy.project
    config = project.variant("tensorrt.yaml", ("[exported]", "[tensorrt, exported]"))
    where = ("--registry", empty.uri)
    result = cli("run", config, "--work", project.work, *where)
    assert f"tensorrt for {TARGET} is not applicable: " in result.stderr
    candidate = empty.open(empty.find("jets")).manifest.targets[TARGET].candidates["tensorrt"]
    assert candidate.status == "not applicable"
    reports = json.loads(cli("validate", "jets/1", "--json", *where).stdout)[TARGET]
    assert [report["verdict"] for report in reports if not report["valid"]] == ["not applicable"]
    for text in (result.stdout, cli("show", "jets/1", *where).stdout, cli("ls", *where).stdout):
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
