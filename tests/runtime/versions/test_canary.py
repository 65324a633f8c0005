"""Which calls a canary answers, and when it is withdrawn, with hand-written executables;
tests/pipeline/promotion has the registry, the gate and real versions."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import Executable
from engines.errors import RunError
from registry.shadow_record import ShadowRecord
from runtime.errors import BindError, LoadError
from runtime.session.session import Session
from runtime.versions.canary import CanaryBinding, CanaryLimits, CanarySession, Share
from runtime.versions.second import Results
from soa.memory import Collection
from tests.models import rogues
from tests.models.building import mlp_signature

BEGUN = ShadowRecord(
    version="jets/2", digest="2" * 64, production="jets/1", production_digest="1" * 64
)
PRODUCTION, CANARY = 1.0, 2.0
N = 5


def answers(value: float) -> Executable:
    """Writes `value` into every answer."""
    return rogues.Rogue(lambda n, x, y: y[:, :n].fill_(value))


def fail(n: int, x: torch.Tensor, y: torch.Tensor) -> None:
    y[:, :n] = torch.nan  # a canary may leave anything in the outputs
    raise RuntimeError("out of luck")


@pytest.fixture
def records() -> list[ShadowRecord]:
    """What the sessions of `with_canary` record; they do so when they are closed or flushed."""
    return []


@pytest.fixture
def with_canary(records: list[ShadowRecord]) -> Iterator[Callable[..., CanarySession]]:
    """`with_canary(share, executable, **limits)`: a session with a canary beside production."""
    sessions: list[CanarySession] = []

    def make(share: float, canary: Executable, **limits: Any) -> CanarySession:
        signature = mlp_signature()
        inner = Session(signature, answers(PRODUCTION))
        second = Session(signature, canary)
        results = Results(BEGUN, records.append)
        sessions.append(CanarySession(inner, second, share, CanaryLimits(**limits), results))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def memory(session: Session, n: int = N) -> tuple[Collection, Collection]:
    """Jets and tags of `n` rows."""
    return session.collection("jets", n), session.collection("tags", n)


def bound(session: CanarySession, n: int = N) -> tuple[CanaryBinding, Collection]:
    jets, tags = memory(session, n)
    return session.bind(jets, tags), tags


def total(records: list[ShadowRecord]) -> ShadowRecord:
    """All that the sessions have recorded."""
    return BEGUN.plus(records)


@given(st.fractions(0, 1, max_denominator=300), st.integers(0, 5))  # fractions are exact
def test_a_share_is_exact_in_every_round(share: Any, rounds: int) -> None:
    takes = Share(share).takes
    calls = rounds * share.denominator
    assert sum(takes() for _ in range(calls)) == share * calls


def test_a_share_is_not_in_step_with_a_loop() -> None:
    """A loop of any short period gives the canary calls of each of its turns."""
    takes = Share(0.25).takes
    canary_calls = [call for call in range(4000) if takes()]
    assert len(canary_calls) == 1000
    for period in (2, 3, 4, 5, 8, 16):
        by_turn = Counter(call % period for call in canary_calls)
        assert len(by_turn) == period
        assert min(by_turn.values()) > 0.5 * 1000 / period


def test_keys_are_the_same_in_another_process() -> None:
    """The same keys are the canary's: about one in twenty, as the share says."""
    program = (
        "import hashlib; from runtime.versions.canary import Share; "
        "s = Share(0.05, 'salt'); t = [k for k in range(20000) if s.takes(k)]; "
        "print(len(t), hashlib.sha256(str(t).encode()).hexdigest())"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    share = Share(0.05, "salt")
    keys = [key for key in range(20000) if share.takes(key)]
    assert 900 < len(keys) < 1100
    digest = hashlib.sha256(str(keys).encode()).hexdigest()
    assert process.stdout.decode().split() == [str(len(keys)), digest]


def test_another_canary_takes_other_keys() -> None:
    first, second = Share(0.05, "salt"), Share(0.05, "another canary")
    keys = ([key for key in range(20000) if share.takes(key)] for share in (first, second))
    assert next(keys) != next(keys)


def test_a_key_is_a_whole_number_or_bytes() -> None:
    with pytest.raises(BindError, match="whole number, or bytes"):
        Share(0.05, "salt").takes(1.5)  # type: ignore[arg-type]


def test_a_share_is_exact_over_the_calls_of_many_threads(
    with_canary: Any, records: list[ShadowRecord]
) -> None:
    session = with_canary(0.05, answers(CANARY))
    answered: list[float] = []

    def work() -> None:
        binding, tags = bound(session)
        own = []
        for _ in range(500):
            binding()
            own.append(float(tags["x"][0]))
        answered.extend(own)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = 16 * 500
    expected = (calls // 20, calls - calls // 20)
    assert (answered.count(CANARY), answered.count(PRODUCTION)) == expected
    assert (session.seen.canary_calls, session.seen.production_calls) == expected
    session.flush()
    session.close()
    assert (total(records).canary_calls, total(records).production_calls) == expected


@pytest.mark.parametrize(("share", "answer"), [(0, PRODUCTION), (1, CANARY)])
def test_a_share_of_0_or_1_gives_all_calls_to_one_version(
    share: float, answer: float, with_canary: Any
) -> None:
    session = with_canary(share, answers(CANARY))
    binding, tags = bound(session)
    for key in (None, 3, b"three"):
        binding(key=key)
        assert (tags["x"] == answer).all()


def test_a_failing_canary_loses_no_call(
    with_canary: Any, records: list[ShadowRecord], caplog: pytest.LogCaptureFixture
) -> None:
    """Production answers them again; after more errors than allowed the canary is withdrawn."""
    session = with_canary(0.1, rogues.Rogue(fail), max_errors=2)
    binding, tags = bound(session)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            tags["x"][:] = torch.nan
            binding()
            assert (tags["x"] == PRODUCTION).all()
    assert session.withdrawn == "RuntimeError: out of luck"
    assert caplog.text.count("the canary jets/2 is withdrawn, and jets/1 answers all calls") == 1
    session.close()
    record = total(records)
    assert (record.canary_calls, record.production_calls) == (0, 100)
    assert (record.errors, record.withdrawals) == (3, 1)
    assert record.error == "RuntimeError: out of luck"
    assert record.withdrawn.endswith(": RuntimeError: out of luck")


@pytest.mark.parametrize(
    ("executable", "limited", "operation"),
    [
        (rogues.Rogue(fail), threading.Thread, "start"),
        (answers(CANARY), torch.Tensor, "isnan"),
    ],
    ids=["no thread to withdraw with", "no memory to compare with"],
)
def test_no_call_is_lost_at_the_limits_of_a_process(
    with_canary: Any, records: list[ShadowRecord], monkeypatch: pytest.MonkeyPatch,
    executable: Executable, limited: type, operation: str,
) -> None:  # fmt: skip
    """Production answers, and the canary is withdrawn."""

    def none_left(*_: object) -> None:
        raise RuntimeError("no more of it")

    session = with_canary(1, executable, compare=1)
    binding, tags = bound(session)
    with monkeypatch.context() as patch:
        patch.setattr(limited, operation, none_left)
        binding()
    assert (tags["x"] == PRODUCTION).all()
    assert session.withdrawn
    session.close()
    assert (total(records).withdrawals, total(records).production_calls) == (1, 1)


def test_the_fault_of_a_caller_withdraws_nothing(with_canary: Any) -> None:
    session = with_canary(1, answers(CANARY))
    binding, _ = bound(session)
    with pytest.raises(BindError):
        binding(10**6)
    assert session.withdrawn == ""
    assert session.seen == BEGUN


def test_a_canary_that_cannot_bind_is_withdrawn(with_canary: Any) -> None:
    session = with_canary(1, answers(CANARY))
    session.inner.any_start = True  # production takes windows, the canary does not
    jets, tags = memory(session, 3 * N)
    binding = session.bind(jets.window(N, 2 * N), tags.window(N, 2 * N))
    binding()
    assert (tags["x"][N : 2 * N] == PRODUCTION).all()
    assert session.withdrawn != ""


def test_a_slow_canary_is_withdrawn(with_canary: Any, records: list[ShadowRecord]) -> None:
    slow = rogues.Rogue(lambda n, x, y: time.sleep(0.1))
    session = with_canary(0.01, slow, max_slowdown=2)
    binding, _ = bound(session)
    for _ in range(3000):
        binding()
    assert "limit 2 times" in session.withdrawn
    session.close()
    record = total(records)
    assert record.canary_calls + record.production_calls == 3000
    assert 11 <= record.canary_calls <= 20


def test_a_canary_within_its_limits_stays(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY), max_slowdown=1e9, compare=0.5, max_abs=10)
    binding, _ = bound(session)
    for _ in range(4000):
        binding()
    seen = session.seen
    assert session.withdrawn == ""
    assert (seen.canary_calls, seen.production_calls, seen.events) == (2000, 2000, 1000)
    assert seen.max_abs == {"probabilities": CANARY - PRODUCTION}


def test_the_caller_gets_no_answer_that_was_found_too_far_off(
    with_canary: Any, records: list[ShadowRecord]
) -> None:
    session = with_canary(1, answers(CANARY), compare=0.25, max_rel=0.5)
    binding, tags = bound(session)
    answered = []
    for _ in range(8):
        binding()
        answered.append(float(tags["y"][N - 1]))
    # Every fourth call is compared: the fourth shows the deviation, and withdraws the canary.
    assert answered == [CANARY] * 3 + [PRODUCTION] * 5
    assert session.withdrawn == "max_rel is 1, limit 0.5"
    session.close()
    record = total(records)
    assert (record.events, record.canary_calls, record.production_calls) == (1, 3, 5)
    assert (record.errors, record.withdrawals) == (0, 1)


def test_an_event_without_rows_is_not_compared(with_canary: Any) -> None:
    session = with_canary(1, answers(CANARY), compare=1.0)
    binding, _ = bound(session)
    binding(0)
    assert session.seen.events == 0
    assert session.seen.canary_calls == 1


def answer_of(call: Callable[[], None], tags: Collection, n: int) -> float:
    """The answer of a call, which writes it into the first `n` rows and into no other."""
    tags["x"][:] = 0
    call()
    answer = float(tags["x"][0])
    assert tags["x"].tolist() == [answer] * n + [0.0] * (tags.n - n)
    return answer


def test_rows_of_a_call_are_for_both_versions(with_canary: Any) -> None:
    binding, tags = bound(with_canary(0.5, answers(CANARY)), 8)
    answered: Counter[float] = Counter()
    for rows in (None, 3, None):  # None: the bound rows
        for _ in range(2):  # on both versions, in one order or the other
            answered[answer_of(partial(binding, rows), tags, rows or 8)] += 1
            assert binding.rows == {"n": rows or 8}
    assert answered == {PRODUCTION: 3, CANARY: 3}


def test_resized_rows_are_for_both_versions(with_canary: Any) -> None:
    binding, tags = bound(with_canary(0.5, answers(CANARY)), 8)
    binding(3)
    binding.resize(2)
    answered = Counter(answer_of(binding, tags, 2) for _ in range(4))
    assert answered[PRODUCTION] in (1, 2) and answered[CANARY] in (2, 3)  # after the first call
    assert binding.bound == {"n": 2}


def test_other_memory_is_for_both_versions(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY))
    binding, _ = bound(session, 8)
    jets, tags = memory(session, 4)
    binding.rebind(jets, tags)
    answered = Counter(answer_of(binding, tags, 4) for _ in range(4))
    assert answered == {PRODUCTION: 2, CANARY: 2}


def test_run_many_divides_bindings_between_the_versions(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY))
    pairs = [bound(session, n) for n in (3, 4, 5, 6)]
    session.run_many([binding for binding, _ in pairs], threads=2)
    answered = [float(tags["x"][-1]) for _, tags in pairs]
    assert sorted(answered) == [PRODUCTION, PRODUCTION, CANARY, CANARY]
    assert (session.seen.canary_calls, session.seen.production_calls) == (2, 2)


def test_run_many_takes_the_bound_rows_after_a_call_on_fewer(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY))
    binding, tags = bound(session, 3)
    binding(2)
    session.run_many([binding])
    assert binding.rows == {"n": 3}
    assert tags["x"][-1] in (PRODUCTION, CANARY)


def test_all_runs_with_one_key_are_of_one_version(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY))
    jets, tags = memory(session)
    answered = set()
    for _ in range(20):
        session.run(jets, tags, key=1)
        answered.update(tags["x"].tolist())
    assert len(answered) == 1
    assert session.seen.canary_calls + session.seen.production_calls == 20


def test_a_canary_session_has_no_run_async(with_canary: Any) -> None:
    session = with_canary(0.5, answers(CANARY))
    with pytest.raises(RunError, match="at a server or a site"):
        session.run_async(*memory(session), key=1)


def test_a_second_thread_on_one_binding_is_refused_and_withdraws_nothing(
    with_canary: Any,
) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(n: int, x: torch.Tensor, y: torch.Tensor) -> None:
        inside.set()
        go.wait(60)

    session = with_canary(0.5, rogues.Rogue(wait))
    binding, _ = bound(session)
    binding()  # production; the next call is the canary's
    thread = threading.Thread(target=binding)
    thread.start()
    inside.wait(60)
    try:
        with pytest.raises(RunError, match="another thread is using this binding"):
            binding()
    finally:
        go.set()
        thread.join()
    assert session.withdrawn == ""


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_errors": -1}, "max_errors is -1"),
        ({"max_errors": 1.5}, "max_errors is 1.5"),
        ({"max_slowdown": -1}, "max_slowdown is -1"),
        ({"max_slowdown": float("nan")}, "max_slowdown is nan"),
        ({"compare": 1.1}, "compare is 1.1"),
        ({"compare": None}, "compare is None"),
        ({"compare": 1, "max_abs": "1"}, "max_abs is '1'"),
        ({"max_rel": 0.1}, "without compare"),
    ],
)
def test_limits_out_of_their_range_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        CanaryLimits(**limits)
