"""A user's code in a forked child: its result, its errors, its output, and its crashes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from engines.errors import CrashError, EngineError
from engines.processes import report_step, run_in_fork


def test_result_messages_and_output_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages: list[str] = []

    def work(say: Callable[[str], None]) -> tuple[int, list[float]]:
        print("from the model")
        say("half of it")
        return os.getpid(), torch.ones(3).tolist()

    pid, values = run_in_fork("the model", work, messages.append)
    assert pid != os.getpid() and values == [1.0] * 3
    assert messages == ["half of it"]
    assert capsys.readouterr().out == "from the model\n"


def test_a_question_is_asked_in_this_process() -> None:
    asked: list[tuple[str, str]] = []

    def ask(option: str, question: str) -> str:
        asked.append((option, question))
        return "x"

    assert run_in_fork("the model", lambda ask: ask("--name", "which?") + "y", ask) == "xy"
    assert asked == [("--name", "which?")]


def test_a_product_by_several_threads_does_not_hang_in_the_child() -> None:
    """OpenMP's threads of this process do not exist in the child: waiting for them never ends."""
    torch.set_num_threads(2)
    matrix = torch.ones(600, 600)  # large enough for torch to use both threads
    expected = (matrix @ matrix).sum().item()
    assert run_in_fork("the model", lambda say: (matrix @ matrix).sum().item()) == expected


def test_errors_keep_their_type_and_code() -> None:
    def fail(say: Callable[[str], None]) -> NoReturn:
        raise EngineError("no such thing", code="engine-special")

    with pytest.raises(EngineError, match="no such thing") as refused:
        run_in_fork("the model", fail)
    assert refused.value.code == "engine-special"


def test_an_error_of_a_class_that_only_the_child_knows_is_a_runtime_error() -> None:
    def fail(say: Callable[[str], None]) -> NoReturn:
        class Own(Exception):
            pass

        raise Own("of the model")

    with pytest.raises(RuntimeError, match="Own: of the model"):
        run_in_fork("the model", fail)


@pytest.mark.parametrize("own_thread", [False, True])
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: signal.raise_signal(signal.SIGFPE), "SIGFPE"),
        (lambda: signal.raise_signal(signal.SIGKILL), "memory"),
        (lambda: os._exit(3), "3"),
    ],
    ids=["SIGFPE", "SIGKILL", "exit"],
)
def test_a_crash_names_the_step_and_leaves_no_zombie(
    end: Callable[[], None], how: str, own_thread: bool, tmp_path: Path
) -> None:
    """Also the child of another thread than the main one."""

    def work(say: Callable[[str], None]) -> None:
        say("computing")
        say("note: of no importance")
        report_step("with n=7")
        (tmp_path / f"child-{os.getpid()}").touch()
        end()
        (tmp_path / "after").touch()

    crashes: list[CrashError] = []

    def crash() -> None:
        with pytest.raises(CrashError) as crashed:
            run_in_fork("the model", work)
        crashes.append(crashed.value)

    crash()
    if own_thread:
        thread = threading.Thread(target=crash)
        thread.start()
        thread.join()
    assert len(crashes) == 1 + own_thread
    for error in crashes:
        assert error.code == "crash"
        assert "(computing, with n=7)" in str(error) and how in str(error)
    assert not (tmp_path / "after").exists()
    children = [int(path.name.removeprefix("child-")) for path in tmp_path.glob("child-*")]
    assert len(children) == len(crashes)
    for pid in children:  # a zombie could still be waited for
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
