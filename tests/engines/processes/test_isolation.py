"""A crash, hang or error in a child becomes an outcome, with a log and a script to repeat it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import soa_pipeline
from engines.errors import is_out_of_memory
from engines.processes import search_path, warm
from engines.processes.isolation import Outcome, open_job_pool, run_isolated
from stages import errors
from tests.models.signals import disposed

STEPS = "tests.engines.steps"


@pytest.fixture(scope="module", autouse=True)
def light() -> Iterator[None]:
    """Child processes for this module alone, without torch, as some tests end them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_IMPORTED", ())
        patch.setattr(warm, "_idle", [])
        yield
        warm._end_all()


def run(folder: Path, name: str, timeout_s: float = 60, **payload: Any) -> Outcome:
    """Runs the function of tests/engines/steps.py with this name and these arguments."""
    return run_isolated(f"{STEPS}:{name}", payload, folder, timeout_s)


def repeat(outcome: Outcome) -> subprocess.CompletedProcess[str]:
    """Runs reproduce.sh alone, from another folder, and without our environment variables."""
    return subprocess.run(
        [str(outcome.script)],
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        text=True,
        capture_output=True,
    )


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie has ended, but its parent has not waited for it


def all_end(pids: Iterable[str]) -> bool:
    """Whether each process ends within a minute: a killed one takes a moment."""
    running = [int(pid) for pid in pids]
    deadline = time.monotonic() + 60
    while running and time.monotonic() < deadline:
        time.sleep(0.1)
        running = [pid for pid in running if is_running(pid)]
    return not running


@contextmanager
def interrupted_once_one_exists(files: Sequence[Path]) -> Iterator[None]:
    """Sends SIGINT to this process, as Ctrl-C does, when one of the files exists."""

    def interrupt() -> None:
        while not any(file.exists() for file in files):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    with disposed(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        yield
    watcher.join()


def test_a_value_comes_back_and_the_script_computes_it_again(tmp_path: Path) -> None:
    outcome = run(tmp_path / "made" / "for it", "add", a=2, b=3)
    assert outcome.ok
    assert outcome.value == 5
    assert outcome.log.read_text() == "adding\n"
    answer = outcome.script.parent / "answer.json"
    assert json.loads(answer.read_text()) == {"value": 5}
    answer.unlink()
    again = repeat(outcome)
    assert (again.returncode, again.stdout) == (0, "adding\n")
    assert json.loads(answer.read_text()) == {"value": 5}


@pytest.mark.parametrize("value", ["it's on", "off"])
def test_it_is_another_process_with_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("A_SETTING", value)
    monkeypatch.chdir(tmp_path)
    child = run(tmp_path / "step", "where", variable="A_SETTING").value
    assert (child["value"], child["cwd"]) == (value, str(tmp_path))
    assert child["pid"] != os.getpid()


@pytest.fixture
def names_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a model, mine.py, and with modules of our names that raise an error."""
    work = tmp_path / "work"
    for name in (*soa_pipeline.PACKAGES, "torch"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text(f"raise ImportError('{name} of this folder')")
    for name in ("soa_pipeline", "json", "lazy_loader"):
        (work / f"{name}.py").write_text(f"raise ImportError('{name} of this folder')")
    (work / "mine.py").write_text("from stages import errors\nanswer = lambda: errors.__file__")
    monkeypatch.chdir(work)
    monkeypatch.setattr(warm, "_idle", [])
    yield work
    warm._end_all()


@pytest.mark.parametrize("interactive", [False, True])
def test_nothing_comes_from_the_working_folder_but_a_model(
    names_of_ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    """Python looks there first for modules that `-m` names, and in an interactive parent for all
    modules, such as the model."""
    if interactive:
        monkeypatch.syspath_prepend("")
    outcomes: dict[object, Outcome] = {5: run(tmp_path / "job", "add", a=2, b=3)}
    if interactive:
        outcomes[errors.__file__] = run_isolated("mine:answer", {}, tmp_path / "theirs", 60)
    for value, outcome in outcomes.items():
        assert (outcome.value, outcome.error) == (value, None)
        subprocess.run([str(outcome.script)], cwd=names_of_ours, check=True)
        answer = json.loads((outcome.script.parent / "answer.json").read_text())
        assert answer == {"value": value}


def test_our_code_is_found_where_the_parent_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the parent found it by "", and has changed its working folder since."""
    ours = str(Path(errors.__file__).parents[1])
    assert search_path().split(os.pathsep).count(ours) >= 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(folder for folder in sys.path if folder != ours)])
    first, *_, last = search_path().split(os.pathsep)
    assert (first, last) == (ours, str(tmp_path))


def test_torch_is_imported_again_only_for_what_it_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child is forked from a process that has imported torch; torch may read any variable of the
    environment but ours."""

    def parent_with(variable: str, value: str) -> int:
        monkeypatch.setenv(variable, value)
        child = run(tmp_path, "where", variable=variable).value
        assert child["value"] == value
        return int(child["parent"])

    first = parent_with("A_SETTING", "one")
    assert parent_with("PIPELINE_SOMETHING", "else") == first
    monkeypatch.syspath_prepend(tmp_path)  # as for a model's folder
    assert parent_with("PIPELINE_SOMETHING", "more") == first
    assert parent_with("A_SETTING", "two") != first
    assert parent_with("A_SETTING", "one") == first  # that process was kept


def test_a_parent_with_many_open_files_has_children(tmp_path: Path) -> None:
    """With more than 1024: `select` takes no descriptor above that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        warm._end_all()  # so that a new one is started
        assert run(tmp_path / "made", "add", a=2, b=3).value == 5
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_threads_have_children_at_the_same_time(tmp_path: Path) -> None:
    def add(i: int) -> Any:
        return run(tmp_path / str(i), "add", a=i, b=1).value

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, range(6))) == [1, 2, 3, 4, 5, 6]


def test_both_sides_of_a_fork_have_children_of_their_own(tmp_path: Path) -> None:
    assert run(tmp_path / "before", "add", a=1, b=1).value == 2
    child = os.fork()
    if child == 0:
        os._exit(run(tmp_path / "child", "add", a=2, b=3).value)
    assert run(tmp_path / "parent", "add", a=1, b=2).value == 3
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_limit_that_a_child_sets_stays_its_own(tmp_path: Path) -> None:
    assert not run(tmp_path / "limited", "ask_for_too_much", limit=1 << 32).ok
    assert run(tmp_path, "add", a=1, b=1).ok


def test_a_child_runs_with_several_threads(tmp_path: Path) -> None:
    """The process that forks the child has only imported modules, and has computed nothing."""
    imports = ("torch", "engines.processes.forks")
    for folder in (tmp_path / "first", tmp_path / "second"):
        outcome = run_isolated(f"{STEPS}:run_with_threads", {"threads": 2}, folder, 60, imports)
        assert outcome.value == 1 << 21, outcome.error  # the sum of 1 << 20 twos


def test_a_job_that_meets_the_end_of_an_idle_process_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process reads the job and ends, like one whose idle time is over at that moment.

    A script stands in for Python: at its first start it reads a line, leaves the file `ended`, and
    exits."""
    ended, python = tmp_path / "ended", tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nif [ ! -e {ended} ]; then touch {ended}; read line; exit 0; fi\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(warm, "_idle", [])
    monkeypatch.setattr(sys, "executable", str(python))
    outcome = run(tmp_path / "job", "add", a=2, b=3)
    warm._end_all()
    assert ended.exists()
    assert (outcome.value, outcome.error) == (5, None)


@pytest.mark.parametrize("name", ["kill_itself", "read_address_zero"])
def test_a_segfault_is_an_outcome_that_the_script_repeats(tmp_path: Path, name: str) -> None:
    outcome = run(tmp_path, name)
    assert not outcome.ok
    assert (outcome.error, outcome.code) == ("killed by SIGSEGV", "candidate-crashed")
    if name == "kill_itself":
        assert "about to crash" in outcome.log.read_text()
    assert repeat(outcome).returncode == -signal.SIGSEGV


def test_a_signal_without_a_name_is_an_outcome(tmp_path: Path) -> None:
    outcome = run(tmp_path, "end_by_a_real_time_signal")
    assert outcome.code == "candidate-crashed"
    assert str(signal.SIGRTMIN + 6) in str(outcome.error)


def test_an_answer_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    assert run(tmp_path, "add", a=1, b=1).value == 2
    assert run(tmp_path, "leave_silently").value is None


def test_the_time_limit_ends_the_child_and_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    timeout_s = 1.0
    while not pids.exists():  # on a busy machine the child may take longer to begin
        timeout_s *= 2
        outcome = run(tmp_path / "step", "hang", timeout_s, pids=str(pids))
        assert outcome.error == f"no answer within {timeout_s:g} s"
        assert outcome.code == "candidate-timeout"
    assert all_end(pids.read_text().split())


def test_ctrl_c_ends_the_child_and_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with interrupted_once_one_exists([pids]):
        run(tmp_path / "step", "hang", 600, pids=str(pids))
    assert all_end(pids.read_text().split())


def test_ctrl_c_ends_all_that_runs_side_by_side(tmp_path: Path) -> None:
    """Jobs that wait for a free thread never begin."""
    files = [tmp_path / f"pids{i}" for i in range(6)]
    with interrupted_once_one_exists(files), open_job_pool() as pool:
        steps = [
            pool.submit(run, tmp_path / file.name[-1], "hang", 600, pids=str(file))
            for file in files
        ]
        for step in steps:
            step.result()
    begun = [pid for file in files if file.exists() for pid in file.read_text().split()]
    assert begun and all_end(begun)
    assert all(step.cancelled() or step.exception() for step in steps)  # no outcome: none failed
    assert run(tmp_path / "after", "add", a=1, b=2).value == 3


def test_an_error_ends_the_jobs_of_its_own_pool_only(tmp_path: Path) -> None:
    awaited = tmp_path / "awaited"
    with open_job_pool() as pool:
        step = pool.submit(run, tmp_path / "one", "wait_for", file=str(awaited))
        with pytest.raises(OSError, match="full"), open_job_pool() as other:
            broken = other.submit(run, tmp_path / "two", "wait_for", file=str(tmp_path / "never"))
            raise OSError("the disk is full")
        awaited.touch()
        assert step.result().value == "it came"
    assert broken.cancelled() or broken.exception() is not None or not broken.result().ok


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    payload = {"pids": str(pids)}
    code = (
        "from pathlib import Path; from engines.processes import run_isolated, warm;"
        "warm._IMPORTED = ();"
        f"run_isolated('{STEPS}:hang', {payload!r}, Path({str(tmp_path / 'step')!r}), 600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not pids.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all_end(pids.read_text().split())


def test_our_own_errors_come_back_as_they_are(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise_ours")
    assert outcome.error == "model.so, line 3: this compiler is too old"
    assert "Traceback" not in outcome.log.read_text()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raise_theirs", "ValueError: first line"),
        ("raise_nothing_said", "ValueError"),
        ("absent", f"AttributeError: module '{STEPS}' has no attribute 'absent'"),
    ],
)
def test_other_errors_leave_their_traceback_in_the_log(
    tmp_path: Path, name: str, error: str
) -> None:
    outcome = run(tmp_path, name)
    assert outcome.error is not None
    assert outcome.error.rstrip(": ") == error
    assert "Traceback (most recent call last)" in outcome.log.read_text()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("leave", "exit code 3 without an answer: the compiler gave up"),
        ("leave_silently", "exit code 0 without an answer: nothing in its log"),
        ("no_json", "exit code 1 without an answer: TypeError: Object of type object is not JSON"),
    ],
)
def test_an_end_without_an_answer_is_an_error(tmp_path: Path, name: str, error: str) -> None:
    outcome = run(tmp_path, name)
    assert outcome.error is not None
    assert outcome.error.startswith(error)


def test_a_step_that_runs_out_of_memory_is_told_so(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ask_for_too_much", limit=1 << 32)
    assert outcome.error == (
        "out of memory: give it more memory, or build for fewer rows (rows: max)"
    )
    assert outcome.killed  # from this limit on, it may end in other ways
    assert "MemoryError" in outcome.log.read_text()


def test_the_advice_of_an_error_of_memory_is_given_once(tmp_path: Path) -> None:
    outcome = run(tmp_path, "fails_for_want_of_memory")
    assert outcome.killed and outcome.error is not None
    assert outcome.code == "candidate-out-of-memory"
    assert outcome.error.startswith("it failed: out of memory")
    assert outcome.error.count("fewer rows") == 1


def test_a_step_that_the_kernel_kills_has_run_out_of_memory(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ends_as_for_want_of_memory")
    assert outcome.error == (
        "killed by SIGKILL, as the kernel does where memory runs out: "
        "give it more memory, or build for fewer rows (rows: max)"
    )
    assert outcome.killed


@pytest.fixture
def torchs_error() -> RuntimeError:
    """The error of torch for a tensor of four petabytes."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    return refused.value


def test_torchs_error_is_one_of_memory(torchs_error: RuntimeError) -> None:
    assert is_out_of_memory(torchs_error)


def test_an_error_that_torchs_error_caused_is_one_of_memory(torchs_error: RuntimeError) -> None:
    wrapped = ValueError("no tensor")
    wrapped.__cause__ = torchs_error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    ("text", "is_of_memory"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus", True),
        ("the memory is fine", False),
    ],
)
def test_a_text_shows_whether_memory_ran_out(text: str, is_of_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == is_of_memory
