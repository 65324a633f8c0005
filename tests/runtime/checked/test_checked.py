"""Test mode: every event is compared with the reference program, and its memory is checked."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engines import Executable
from runtime.checked import Tolerance
from runtime.checked.test_mode import CheckedSession, CheckReport
from runtime.errors import DeviationError
from runtime.session.origin import Origin
from soa import Collection
from tests.models import rogues
from tests.models.building import JETS, Built, mlp_signature, reference_collections
from tests.models.mlps import CLASSES
from tests.soa.strategies import values_of

TIGHT = {"probabilities": Tolerance(1e-5, 1e-5)}
ORIGIN = Origin("triple", "2", None, "cpu/x86-64-v3", "by hand")


def checked(
    executable: Executable, tolerances: dict[str, Tolerance] | None = None
) -> CheckedSession:
    """A session in test mode, whose reference program is right."""
    return CheckedSession(
        mlp_signature(), executable, rogues.honest(), tolerances or TIGHT, origin=ORIGIN
    )


def jets_and_tags(n: int, spare: int = 0) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """Inputs and outputs of `n` rows, with memory for `spare` more."""
    inputs = {"jets": values_of(JETS, max(n, 1), 5)}
    return reference_collections(mlp_signature(), inputs, {"n": n}, spare)


# -- the right artifact ------------------------------------------------------------------------


def right_session(mlp: Built) -> CheckedSession:
    """A session in test mode of an artifact that is right."""
    reference = mlp.executable("exported")
    return CheckedSession(mlp.signature, mlp.executable("aoti"), reference, TIGHT)


def test_a_right_artifact_gives_its_own_answers(mlp: Built) -> None:
    inputs, outputs = mlp.collections({"n": 33}, spare=10)
    right_session(mlp).run(inputs, outputs)
    inputs, expected = mlp.collections({"n": 33}, spare=10)
    mlp.session("aoti").run(inputs, expected)
    assert torch.equal(outputs["tags"].tensor("x")[:33], expected["tags"].tensor("x"))


def test_a_report_without_events_has_no_mean_time(mlp: Built) -> None:
    assert right_session(mlp).report.to_dict()["mean_us"] is None


ROWS = (33, 0, 1, 43, 33)
"""The rows of the events of `report`."""


@pytest.fixture(scope="module")
def report(mlp: Built) -> CheckReport:
    session = right_session(mlp)
    binding = session.bind(*mlp.collections({"n": ROWS[-1]}, spare=10))
    for n in ROWS[:-1]:
        binding(n)
    binding()  # the rows that were bound
    return session.report


def test_the_report_counts_events_and_their_elements(report: CheckReport) -> None:
    assert report.events == len(ROWS)
    assert report.worst["probabilities"].elements == len(CLASSES) * sum(ROWS)


def test_the_report_has_the_worst_deviation(report: CheckReport) -> None:
    assert report.worst["probabilities"].max_abs < 1e-5
    assert (report.nonfinite_inputs, report.nonfinite_outputs) == (0, 0)


def test_the_report_has_the_time_of_the_slowest_event_and_of_all(report: CheckReport) -> None:
    assert 0 < report.slowest_us <= report.total_us


def test_a_report_is_stored_as_json(report: CheckReport) -> None:
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["events"] == len(ROWS)
    assert stored["worst"]["probabilities"]["outside"] == 0.0


def test_the_reference_does_not_see_the_callers_padding() -> None:
    """An artifact that reads padding is detected if the padding holds values."""
    session = checked(rogues.ReadsPadding())
    inputs, outputs = jets_and_tags(5, spare=3)
    inputs["jets"].span("a").tensor()[5] = float("nan")  # behind the last row
    with pytest.raises(DeviationError, match="max abs deviation 1 "):
        session.run(inputs, outputs)


# -- wrong artifacts -------------------------------------------------------------------------------


def test_an_answer_that_is_off() -> None:
    """The error says which row of which output is how far off."""
    session = checked(rogues.off_by(1e-2))
    inputs, outputs = jets_and_tags(5)
    inputs["jets"].tensor("a").fill_(0.0)
    with pytest.raises(DeviationError) as caught:
        session.run(inputs, outputs)
    message = str(caught.value)
    assert message.startswith("triple/2 (by hand, cpu/x86-64-v3): output 'probabilities', row 4 of")
    assert "deviation 0.01" in message
    assert message.endswith("outside atol 1e-05 + rtol 1e-05")
    assert session.report.events == 1
    assert session.report.worst["probabilities"].max_abs == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_output_is_compared(wrong: int) -> None:
    signature, names = rogues.split_signature(), ("first", "others")
    reference, executable = rogues.split_off_by(0, 0), rogues.split_off_by(1e-2, wrong)
    tolerances = dict.fromkeys(names, Tolerance(1e-5, 1e-5))
    session = CheckedSession(signature, executable, reference, tolerances, origin=ORIGIN)
    with pytest.raises(DeviationError, match=f"output '{names[wrong]}'"):
        session.run(*jets_and_tags(5))


def test_a_deviation_within_the_tolerance_is_counted_and_let_through() -> None:
    session = checked(rogues.off_by(1e-3), {"probabilities": Tolerance(1e-2, 0.0)})
    session.run(*jets_and_tags(5))
    assert session.report.worst["probabilities"].max_abs == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize(
    ("executable", "message"),
    [
        (rogues.writes_padding(), "wrote outside its columns or rows in collection 'tags'"),
        (rogues.changes_inputs(), "the artifact changed its input collection 'jets'"),
        (rogues.LeavesGaps(), "output 'probabilities', row 2"),
        (rogues.returns(float("nan")), "output 'probabilities', row 4"),
    ],
    ids=["writes padding", "changes inputs", "leaves gaps", "NaN"],
)
def test_each_fault_is_an_error(executable: Executable, message: str) -> None:
    inputs, outputs = jets_and_tags(5, spare=1)
    for piece in outputs["tags"].memory():
        piece.fill_(0x5A)  # so that rows that are not written are wrong
    with pytest.raises(DeviationError, match=message):
        checked(executable).run(inputs, outputs)


def test_a_failure_of_the_artifact_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        checked(rogues.Fails()).run(*jets_and_tags(5))


# -- counts ----------------------------------------------------------------------------------------


def test_nan_and_infinities_are_counted_and_let_through_where_the_reference_has_them() -> None:
    session = checked(rogues.honest())
    inputs, outputs = jets_and_tags(5)
    inputs["jets"].tensor("a")[1] = float("nan")
    inputs["jets"].tensor("b")[2] = float("inf")
    inputs["jets"].tensor("f")[3] = float("-inf")
    session.run(inputs, outputs)
    assert session.report.nonfinite_inputs == 3
    assert session.report.nonfinite_outputs == 2  # no output depends on `f`
    assert session.report.worst["probabilities"].nonfinite_mismatches == 0


def test_threads_add_to_one_report() -> None:
    session, threads, events = checked(rogues.honest()), 4, 20

    def work(_: int) -> None:
        binding = session.bind(*jets_and_tags(5))
        for _ in range(events):
            binding()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert session.report.events == threads * events
    elements = threads * events * 5 * len(CLASSES)
    assert session.report.worst["probabilities"].elements == elements


# -- windows ---------------------------------------------------------------------------------------


def in_windows(executable: Executable, n: int = 5) -> Collection:
    """Runs on windows of larger collections; returns all output rows, 7 where not written."""
    inputs, outputs = jets_and_tags(40)
    for name in CLASSES:
        outputs["tags"][name][:] = 7
    session = CheckedSession(
        mlp_signature(), executable, rogues.honest(), TIGHT, origin=ORIGIN, any_start=True
    )
    session.run(inputs["jets"].window(10, 10 + n), outputs["tags"].window(3, 3 + n))
    expected = inputs["jets"]["a"][10 : 10 + n] * 3
    np.testing.assert_allclose(outputs["tags"]["x"][3 : 3 + n], expected, rtol=1e-5)
    return outputs["tags"]


def test_a_window_is_written_and_nothing_around_it() -> None:
    tags = in_windows(rogues.honest())
    for name in CLASSES:
        assert set(tags[name][:3]) | set(tags[name][8:]) == {7}


@pytest.mark.parametrize(
    ("executable", "message"),
    [
        (rogues.writes_padding(), "wrote outside its columns or rows in collection 'tags'"),
        (rogues.changes_inputs(), "changed its input collection 'jets'"),
        (rogues.off_by(1e-2), "output 'probabilities', row 4"),
    ],
    ids=["writes padding", "changes inputs", "off"],
)
def test_a_fault_in_a_window_is_an_error(executable: Executable, message: str) -> None:
    with pytest.raises(DeviationError, match=message):
        in_windows(executable)
