"""What validation accepts and refuses, and the reason that it gives."""

from __future__ import annotations

import ctypes
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engines import Executable, engine
from runtime.checked import Tolerance
from runtime.checked.test_mode import CheckedSession
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column, opaque
from stages.capture import capture
from stages.judging.validate import Trial, validate_candidate, validate_session
from stages.reference.answers import Reference, random_inputs
from stages.reports import ValidationReport
from stages.timing.racing import benchmark
from tests.models import mlps, rogues
from tests.models.building import (
    ENGINES,
    Built,
    build,
    mlp_signature,
    reasons,
    reports,
    require_valid,
    signature_of,
)
from tests.models.forked import ended

SIGNATURE = mlp_signature()
TIGHT = {"probabilities": Tolerance(1e-5, 1e-5)}


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Of the model that `rogues.honest` runs."""
    return rogues.reference()


def judged(
    executable: Executable, reference: Reference, signature: Signature = SIGNATURE
) -> ValidationReport:
    """The report on an executable, with one tolerance for its output."""
    return validate_session(Session(signature, executable), "by hand", reference, TIGHT)


# -- artifacts that are right --------------------------------------------------------------------


@pytest.fixture(scope="module", params=ENGINES)
def right(mlp: Built, request: pytest.FixtureRequest) -> ValidationReport:
    """The report on a right artifact of each engine, whose output is that of a classifier."""
    session, reference = mlp.session(request.param), Reference.load(mlp.capture.reference)
    classifiers = frozenset({"probabilities"})
    return validate_session(session, request.param, reference, TIGHT, classifiers)


def test_a_right_artifact_is_valid(right: ValidationReport) -> None:
    assert right.valid and right.reason is None and right.windows
    assert all(not case.faults for case in right.cases)


def test_an_artifact_is_run_at_sizes_around_every_alignment(right: ValidationReport) -> None:
    sizes = [case.rows["n"] for case in right.cases]
    assert sizes == [0, 1, 2, 31, 32, 33, 37, 1000, 2049, 4099, 5000]


def test_a_right_artifact_has_small_deviations(right: ValidationReport) -> None:
    worst = right.worst["probabilities"]
    assert worst.elements == 3 * sum(case.rows["n"] for case in right.cases)
    assert worst.max_abs < 1e-5 and worst.argmax == 1.0
    assert worst.ulp_p50 is not None and worst.ulp_max is not None
    assert worst.ulp_p50 <= worst.ulp_max


def test_a_report_survives_json(mlp: Built) -> None:
    reference = Reference.load(mlp.capture.reference)
    report = validate_session(mlp.session("exported"), "exported", reference, TIGHT)
    assert ValidationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_of_a_failure_survives_json() -> None:
    failed = ValidationReport.failed("aoti", "killed by SIGSEGV")
    assert not failed.valid
    assert ValidationReport.from_dict(json.loads(json.dumps(failed.to_dict()))) == failed


# -- executables that are wrong ------------------------------------------------------------------


def test_the_honest_executable_is_valid(reference: Reference) -> None:
    assert judged(rogues.honest(), reference).reason is None


CHANGED = "at n=1: the artifact changed its input collection 'jets'"
NOT_FINITE = (
    "output 'probabilities' at n=1, row 0: 1 NaN or Inf where the reference has none, 33.33% of "
    "its elements outside atol 1e-05 + rtol 1e-05 (allowed: 0.00%)"
)


@pytest.mark.parametrize(
    ("executable", "reason"),
    [
        (
            rogues.off_by(1e-3),
            "output 'probabilities' at n=1, row 0: max abs deviation 0.001, 100.00% of its "
            "elements outside atol 1e-05 + rtol 1e-05 (allowed: 0.00%)",
        ),
        (
            rogues.writes_padding(),
            "at n=1: the artifact wrote outside its columns or rows in collection 'tags'",
        ),
        (rogues.changes_inputs(), CHANGED),
        (rogues.changes_input_padding(), CHANGED),
        (rogues.LeavesGaps(), "at n=31: some output elements are never written"),
        (
            rogues.ReadsPadding(),
            "at n=1: the answers depend on what lies in the padding of the inputs",
        ),
        (rogues.nondeterministic(), "at n=1: two runs on the same memory give different answers"),
        (rogues.returns(float("nan")), NOT_FINITE),
        (rogues.returns(float("inf")), NOT_FINITE),
        (
            rogues.Fails(),
            "at n=1: the artifact failed: RuntimeError: CUDA error: an illegal memory access",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_each_fault_has_its_reason(
    executable: Executable, reason: str, reference: Reference
) -> None:
    report = judged(executable, reference)
    assert (report.valid, report.reason) == (False, reason)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_output_is_judged(wrong: int) -> None:
    signature, names = rogues.split_signature(), ("first", "others")
    reference = rogues.reference(signature, rogues.Split())
    session = Session(signature, rogues.split_off_by(1e-3, wrong))
    report = validate_session(session, "by hand", reference, dict.fromkeys(names, *TIGHT.values()))
    assert report.reason is not None
    assert f"output '{names[wrong]}'" in report.reason


def test_a_fraction_outside_may_be_allowed(reference: Reference) -> None:
    session = Session(SIGNATURE, rogues.off_by(1e-3))
    generous = {"probabilities": Tolerance(1e-5, 1e-5, max_outside=1.0)}
    report = validate_session(session, "by hand", reference, generous)
    assert report.valid and report.worst["probabilities"].outside > 0.0
    assert report.worst["probabilities"].max_abs == pytest.approx(1e-3, rel=1e-2)


# -- models that are right on row-major memory only ----------------------------------------------


def test_a_model_that_reads_its_padding(tmp_path: Path) -> None:
    """It is refused: as_strided reads the storage, which is row-major only in the reference."""
    built = build(mlps.ReadsPadding(), SIGNATURE, tmp_path, ("torchscript", "exported"))
    for reason in reasons(built, TIGHT).values():
        assert "the answers depend on what lies in the padding of the inputs" in str(reason)


def test_a_model_with_a_special_case_at_one_row_is_refused(tmp_path: Path) -> None:
    """Export drops the branch silently; a trace keeps the branch that it took."""
    engines = ("torchscript", "exported")
    built = build(mlps.SpecialAtOneRow(), SIGNATURE, tmp_path, engines, route="trace")
    for reason in reasons(built, TIGHT).values():
        assert "output 'probabilities' at n=1, row 0: max abs deviation" in str(reason)


def test_a_trace_that_forgot_a_branch_loses_to_the_export(tmp_path: Path) -> None:
    built = build(mlps.TraceForgets(), SIGNATURE, tmp_path, ("torchscript", "exported"))
    assert built.capture.torchscript == "traced"
    verdicts = reasons(built, TIGHT)
    assert verdicts["exported"] is None
    assert "output 'probabilities' at n=" in str(verdicts["torchscript"])


# -- NaN and infinities that the model gives -----------------------------------------------------


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model whose answers are NaN or infinite for most rows."""
    inputs = random_inputs(SIGNATURE, 1, {})
    for name in ("a", "b"):
        inputs["jets"][name][0] = 1.0  # a reference needs some finite values
    engines, folder = ("torchscript", "exported"), tmp_path_factory.mktemp("nan")
    return build(mlps.NanAndInf(), SIGNATURE, folder, engines, inputs, nonfinite=0.6)


def test_nan_and_infinities_of_the_reference_come_back(with_nan: Built) -> None:
    largest = Reference.load(with_nan.capture.reference).outputs[-1]["probabilities"]
    assert largest.isnan().any() and largest.isinf().any()
    for report in reports(with_nan, TIGHT).values():
        assert report.reason is None
        assert report.worst["probabilities"].nonfinite_mismatches == 0


def test_another_model_is_refused_by_a_reference_with_nan(with_nan: Built) -> None:
    reference = Reference.load(with_nan.capture.reference)
    report = judged(rogues.uncompiled(mlps.PointwiseFirst(), SIGNATURE), reference)
    assert "NaN or Inf where the reference has none" in str(report.reason)


# -- in a process of its own ---------------------------------------------------------------------


def in_a_child(mlp: Built, file: Path, folder: Path) -> ValidationReport:
    """The report on a library of aoti, which is opened in a child process."""
    reference, classifiers = mlp.capture.reference, frozenset({"probabilities"})
    trial = Trial("aoti", file, mlp.signature, reference, TIGHT, classifiers)
    return validate_candidate(trial, folder, 300)


def test_a_candidate_is_validated_in_a_child(mlp: Built, tmp_path: Path) -> None:
    report = in_a_child(mlp, mlp.files["aoti"], tmp_path)
    assert report.valid and report.reason is None
    assert report.worst["probabilities"].argmax == 1.0
    assert (tmp_path / "reproduce.sh").exists()


def test_an_artifact_that_crashes_when_opened_is_one_refused_candidate(
    mlp: Built, tmp_path: Path
) -> None:
    report = in_a_child(mlp, rogues.broken_library(tmp_path), tmp_path / "child")
    assert (report.valid, report.reason) == (False, "killed by SIGSEGV before its first run")
    assert str(tmp_path / "child" / "reproduce.sh") in report.why
    assert str(tmp_path) not in str(report.for_others().to_dict())


def test_a_reason_for_others_names_files_without_their_folders() -> None:
    why = "g++: /home/ada/work/a b.cpp:3 in '/tmp/x/main.cpp' (cpu/x86-64-v3, 1/2); see /a/b/c"
    reason = ValidationReport.failed("aoti", why).for_others().reason
    assert reason == "g++: a b.cpp:3 in 'main.cpp' (cpu/x86-64-v3, 1/2); see c"


def test_others_do_not_get_the_trace() -> None:
    report = ValidationReport.failed("aoti", "no compiler", "log: /home/ada/log.txt")
    assert "/home/ada" in str(report.to_dict())
    assert "trace" not in report.for_others().to_dict()


def test_where_memory_runs_out_the_child_tries_once_more_and_keeps_none(
    mlp: Built, tmp_path: Path
) -> None:
    killed = rogues.broken_library(tmp_path, "raise(SIGKILL)")  # like the kernel
    report = in_a_child(mlp, killed, tmp_path / "child")
    assert "killed by SIGKILL, as the kernel does where memory runs out" in str(report.reason)
    job = json.loads((tmp_path / "child" / "job.json").read_text())
    assert job["payload"]["keep_memory"] is False


def test_capture_and_engines_leave_no_threads_or_grad_mode_changed(tmp_path: Path) -> None:
    before = (torch.get_num_threads(), torch.is_grad_enabled())
    model = mlps.PointwiseFirst().eval().requires_grad_(False)
    capture(model, SIGNATURE, random_inputs(SIGNATURE, 1, {}), tmp_path)
    engine("exported").open(tmp_path / "program.pt2", torch.device("cpu"))
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before


# -- a collection that the model both reads and writes --------------------------------------------


def one_collection() -> Signature:
    """Inputs and answers in one layout, as when a framework adds scores to its jets."""
    layout = Layout([column(c, "float32") for c in (*mlps.FEATURES, *mlps.CLASSES, "spectator")])
    return Signature.build(
        {"jets": layout},
        [Block("features", "jets", mlps.FEATURES)],
        [Block("probabilities", "jets", mlps.CLASSES)],
        {"n": RowRange(0, 100)},
    )


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model that writes its answers into the collection from which it reads."""
    folder = tmp_path_factory.mktemp("in-place")
    return require_valid(rogues.Triple(), one_collection(), folder, ("torchscript", "exported"))


def test_one_collection_of_inputs_and_outputs_in_test_mode(in_place: Built) -> None:
    torchscript, exported = (in_place.executable(name) for name in ("torchscript", "exported"))
    checked = CheckedSession(in_place.signature, torchscript, exported, TIGHT)
    jets, _ = in_place.collections({"n": 33}, spare=3)
    checked.run(jets, jets)
    assert torch.equal(jets["jets"].tensor("y"), jets["jets"].tensor("b") * 3)


def test_one_collection_of_inputs_and_outputs_is_timed(in_place: Built) -> None:
    sessions = {"a": in_place.session("exported")}
    report = benchmark(in_place.signature, sessions, in_place.inputs, seconds=0.01)
    assert report.fastest == "a"


@pytest.mark.parametrize(
    ("executable", "reason"),
    [
        (rogues.honest(), None),
        (rogues.off_by(1e-3), "output 'probabilities' at n=1, row 0: max abs deviation 0.001"),
        (
            rogues.writes_padding(),
            "at n=1: the artifact wrote outside its columns or rows in collection 'jets'",
        ),
        (
            rogues.changes_inputs(),
            "at n=1: the artifact wrote outside its columns or rows in collection 'jets'",
        ),
        (rogues.LeavesGaps(), "at n=31: some output elements are never written"),
    ],
)
def test_faults_in_one_collection_are_refused(executable: Executable, reason: str | None) -> None:
    signature = one_collection()
    report = judged(executable, rogues.reference(signature), signature)
    assert str(report.reason).startswith(str(reason))


class ReadsBefore(Executable):
    """Gives right answers, but reads bytes before its input."""

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        rogues.honest()(arguments)
        ctypes.string_at(arguments[1].data_ptr() - 16, 16)


class ReadsBeyond(Executable):
    """Gives right answers, but reads bytes beyond the end of its input."""

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        rogues.honest()(arguments)
        ctypes.string_at(arguments[1].data_ptr() + arguments[1].nbytes, 16)


@pytest.mark.parametrize("reads", [ReadsBefore, ReadsBeyond])
def test_a_read_past_an_end_kills_the_process_that_validates(
    reads: Callable[[], Executable], reference: Reference, tmp_path: Path
) -> None:
    """Answers do not show it, but a user's buffer may end where the process has no more memory."""
    session = Session(SIGNATURE, reads())
    with (tmp_path / "steps").open("w", buffering=1) as steps:

        def say(text: str) -> None:
            print(text, file=steps)

        code = ended(lambda: validate_session(session, "by hand", reference, TIGHT, say=say))
    assert code == -signal.SIGSEGV
    assert (tmp_path / "steps").read_text().splitlines() == ["at n=0", "at n=1"]


# -- windows of larger collections -----------------------------------------------------------------


class WhereAligned(Executable):
    """Gives right answers; if the last argument is not at 128 bytes, it also calls `fault`.

    `fault` gets the number of rows and the answers, features first.
    """

    def __init__(self, fault: Callable[[int, torch.Tensor], object]) -> None:
        self.fault = fault

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        n, answers = arguments[0].shape[0], torch.atleast_2d(arguments[-1])
        if arguments[1].dim() == 2:
            rogues.honest()(arguments)
        else:
            arguments[-1].copy_(arguments[1] * 3)
        if n and arguments[-1].data_ptr() % 128:
            self.fault(n, answers)


def raises(n: int, answers: torch.Tensor) -> None:
    """As where an instruction needs aligned memory."""
    raise RuntimeError("movaps")


FAULTS = {  # with what the report says of them
    "off": (lambda n, y: y[0, n - 1 : n].add_(1), "n=1"),
    "outside": (
        lambda n, y: ctypes.memset(y.data_ptr() - 4, 0, 4),
        "wrote outside its columns or rows in collection",
    ),
    "raises": (raises, "movaps"),
}


faults_of_alignment = pytest.mark.parametrize(("fault", "says"), FAULTS.values(), ids=FAULTS)
Fault = Callable[[int, torch.Tensor], object]


@faults_of_alignment
def test_an_artifact_that_wants_aligned_rows_gets_no_other(
    fault: Fault, says: str, reference: Reference
) -> None:
    report = judged(WhereAligned(fault), reference)
    assert report.reason is None and not report.windows
    assert "n=1" in report.window and says in report.window
    assert ValidationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


ANYWHERE = signature_of({"x": "a"}, {"probabilities": "b"}, RowRange(0, 40), "columns")
"""Columns that begin at any element."""


@faults_of_alignment
def test_an_artifact_that_wants_more_than_the_columns_alignment_is_refused(
    fault: Fault, says: str
) -> None:
    assert says in str(judged(WhereAligned(fault), rogues.reference(ANYWHERE), ANYWHERE).reason)


def test_an_artifact_that_takes_columns_at_any_element_is_valid_in_windows() -> None:
    report = judged(WhereAligned(lambda n, y: None), rogues.reference(ANYWHERE), ANYWHERE)
    assert report.valid and report.windows


def test_columns_begin_at_odd_elements_in_validation() -> None:
    """At every size: a float32 not at a multiple of 8 bytes, a float64 not at one of 16."""
    layout = Layout([column("x", "float32"), column("y", "float64")], storage="columns")
    signature = Signature.build(
        {"jets": layout},
        [Block("features", "jets", ("x",))],
        [Block("probabilities", "jets", ("y",))],
        {"n": RowRange(0, 40)},
    )
    odd_x, odd_y, sizes = set[int](), set[int](), set[int]()

    def triple(arguments: Sequence[torch.Tensor]) -> None:
        rows, x, y = arguments
        y.copy_(x * 3)
        n = rows.shape[0]
        sizes.add(n)
        if x.data_ptr() % 8 == 4:
            odd_x.add(n)
        if y.data_ptr() % 16 == 8:
            odd_y.add(n)

    assert judged(rogues.Calls(triple), rogues.reference(signature), signature).valid
    assert odd_x - {0} == odd_y - {0} == sizes - {0}


def test_opaque_members_are_carried_and_never_touched(tmp_path: Path) -> None:
    columns = [opaque("hit", 12), *(column(name, "float32") for name in mlps.FEATURES)]
    signature = Signature.build(
        {"jets": Layout([*columns, column("id", "uint64")]), "tags": SIGNATURE.layouts["tags"]},
        [Block("features", "jets", mlps.FEATURES)],
        [Block("probabilities", "tags", mlps.CLASSES)],
        {"n": RowRange(0, 40)},
    )
    built = build(rogues.Triple(), signature, tmp_path, ("exported",))
    reference = Reference.load(built.capture.reference, signature)
    assert set(reference.inputs["jets"]) == set(mlps.FEATURES)
    report = reports(built)["exported"]
    assert report.valid and report.windows
