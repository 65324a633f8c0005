"""The backend without a server: requests share a run, and each gets the answers to its rows.

Requests with torch's tensors on the CPU stand for those on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import engine
from engines.errors import RunError
from runtime.session.session import Session
from serving.errors import RequestError, WrongVersionError
from serving.triton.arrays import Arrays, Tensors
from serving.triton.backend import Core, Request
from serving.wire import FORMS, Array, Form, Wire
from tests.models import served, tagged
from tests.models.building import Built, build
from tests.models.mlps import CLASSES, FEATURES
from tests.models.rogues import Calls
from tests.models.tagged import Tags

TENSORS = Tensors(torch.device("cpu"))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory, tags: Tags) -> dict[str, Session]:
    """Sessions by model: every dtype, several row dimensions, and one that names its event."""
    bundles = {
        "mixed": served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED),
        "event": served.shared(tmp_path_factory, "event", served.Event(), served.EVENT),
        "tagged": tags.bundle,
    }
    return {name: served.session(bundle) for name, bundle in bundles.items()}


@pytest.fixture
def mixed(sessions: dict[str, Session]) -> Session:
    return sessions["mixed"]


@pytest.fixture
def event(sessions: dict[str, Session]) -> Session:
    return sessions["event"]


def jets(n: int, seed: int) -> dict[str, Array]:
    """The columns of a request."""
    values = np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)
    return {f"jets.{name}": values[:, i : i + 1] for i, name in enumerate(FEATURES)}


def row_major(mlp: Built, request: dict[str, Array]) -> Array:
    """The model's own answer to a request, on an ordinary tensor."""
    x = torch.from_numpy(np.concatenate([request[f"jets.{name}"] for name in FEATURES], axis=1))
    with torch.no_grad():
        answer: Array = mlp.model(x).numpy()
    return answer


def answers_of(results: list[dict[str, Array] | RequestError]) -> list[dict[str, Array]]:
    """The answers without the errors."""
    return [result for result in results if isinstance(result, dict)]


def random_request(
    session: Session, rows: dict[str, int], seed: int, form: Form = "columns"
) -> Request:
    """A request with small whole numbers; `rows` by dimension."""
    draw = np.random.default_rng(seed)
    inputs = {}
    for tensor in Wire.of(session.signature, form).inputs:
        limit = 2 if tensor.dtype == bool else 50
        values = draw.integers(0, limit, tensor.shape(rows[tensor.rows]))
        inputs[tensor.name] = values.astype(tensor.dtype)
    return Request(inputs)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 7000), min_size=1, max_size=6))
def test_every_request_gets_its_own_rows(mlp: Built, sizes: list[int]) -> None:
    """Also if they do not fit into one run, or one alone has more than the compiled 5000 rows."""
    core = Core(mlp.session("exported"), merge=True)
    requests = [jets(n, seed) for seed, n in enumerate(sizes)]
    answers = answers_of(core.answer([Request(request) for request in requests]))
    for request, answer in zip(requests, answers, strict=True):
        require_right(mlp, request, answer)


def require_right(mlp: Built, request: dict[str, Array], answer: dict[str, Array]) -> None:
    """Compares an answer in columns with the model's own."""
    classes = np.concatenate([answer[f"tags.{name}"] for name in CLASSES], axis=1)
    assert np.allclose(classes, row_major(mlp, request), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class MatrixNames:
    """The names of the input and of the output in requests of rows and of blocks."""

    inputs: str
    outputs: str

    @classmethod
    def of(cls, session: Session) -> MatrixNames:
        wire = Wire.of(session.signature, "rows")
        (inputs,), (outputs,) = wire.inputs, wire.outputs
        return cls(inputs.name, outputs.name)


def matrix(request: dict[str, Array]) -> Array:
    """The columns of a request as (n, 6)."""
    return np.concatenate([request[f"jets.{name}"] for name in FEATURES], axis=1)


def test_requests_of_rows_are_answered_in_rows(mlp: Built) -> None:
    """A request with more than the compiled 5000 rows is divided."""
    session = mlp.session("exported")
    names, core = MatrixNames.of(session), Core(session, merge=True, requests="rows")
    requests = [jets(n, n) for n in (3, 0, 40, 7001)]
    results = core.answer([Request({names.inputs: matrix(request)}) for request in requests])
    for request, answer in zip(requests, answers_of(results), strict=True):
        rows = answer[names.outputs]
        assert rows.flags.c_contiguous
        assert np.allclose(rows, row_major(mlp, request), rtol=1e-4, atol=1e-5)


def test_requests_of_blocks_are_answered_in_blocks(mlp: Built) -> None:
    """They are not merged."""
    session = mlp.session("exported")
    names, core = MatrixNames.of(session), Core(session, merge=False, requests="blocks")
    requests = [jets(n, n) for n in (3, 0, 40)]
    results = core.answer([Request({names.inputs: matrix(request).T}) for request in requests])
    for request, answer in zip(requests, answers_of(results), strict=True):
        block = answer[names.outputs]
        assert block.shape == (len(CLASSES), len(request["jets.a"]))
        assert np.allclose(block.T, row_major(mlp, request), rtol=1e-4, atol=1e-5)


def test_rows_in_place_of_blocks_are_refused(mlp: Built) -> None:
    session = mlp.session("exported")
    names, core = MatrixNames.of(session), Core(session, merge=False, requests="blocks")
    (error,) = core.answer([Request({names.inputs: matrix(jets(3, 3))})])
    assert "has shape (3, 6), the model takes (6, n)" in str(error)


def test_requests_share_runs_and_runs_keep_to_the_limit(mlp: Built) -> None:
    """A run has at most the compiled 5000 rows; a longer request is divided equally."""
    session = mlp.session("exported")
    rows: list[int] = []
    run = session.executable

    def count(arguments: Sequence[torch.Tensor]) -> None:
        rows.append(arguments[0].shape[0])
        run(arguments)

    core = Core(Session(session.signature, Calls(count)), merge=True)
    core.answer([Request(jets(n, 0)) for n in (10, 20, 4960, 30, 12000)])
    assert rows == [10 + 20 + 4960, 30 + 4000, 4000, 4000]


def test_merged_requests_get_the_bits_of_single_ones(mixed: Session) -> None:
    """In every dtype and shape."""
    requests = [random_request(mixed, {"n": n}, n) for n in (1, 30, 7, 150, 90)]
    merged = answers_of(Core(mixed, merge=True).answer(requests))
    for request, answer in zip(requests, merged, strict=True):
        (alone,) = answers_of(Core(mixed, merge=False).answer([request]))
        for tensor in Wire.of(mixed.signature).outputs:
            assert answer[tensor.name].dtype == alone[tensor.name].dtype == tensor.dtype
            assert np.array_equal(answer[tensor.name], alone[tensor.name])


def test_requests_that_share_nothing_run_alone(event: Session) -> None:
    core = Core(event, merge=False)
    requests = [random_request(event, {"nodes": n, "edges": e}, n) for n, e in ((3, 5), (40, 1))]
    answers = answers_of(core.answer(requests))
    for request, answer in zip(requests, answers, strict=True):
        total = request.inputs["edges.weight"].sum()
        points = request.inputs["nodes.x"] + request.inputs["nodes.y"]
        assert np.allclose(answer["out.score"], points * request.inputs["nodes.z"] + total)
        assert answer["out.total"].tolist() == [total]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_memory_of_their_own(mlp: Built, form: Form, merge: bool) -> None:
    """A later run changes neither answers nor requests: they share no memory with the core."""
    core = Core(mlp.session("exported"), merge=merge and form != "blocks", requests=form)

    def request_of(n: int, seed: int) -> Request:
        columns = jets(n, seed)
        if form == "columns":
            return Request(columns)
        rows = matrix(columns)
        (tensor,) = core.wire.inputs
        return Request({tensor.name: rows if form == "rows" else np.ascontiguousarray(rows.T)})

    requests = [request_of(n, n) for n in (5, 1, 3)]
    answers = answers_of(core.answer(requests))
    arrays = [array for request in requests for array in request.inputs.values()]
    arrays += [array for answer in answers for array in answer.values()]
    copies = [array.copy() for array in arrays]
    core.answer([request_of(5, 8), request_of(4, 9)])
    core.answer([request_of(9, 10)])
    assert len(answers) == 3
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))


WRONG: dict[str, tuple[dict[str, Array], str]] = {
    "dtype": ({"jets.a": np.zeros((3, 1), np.float64)}, r"input jets.a is (torch\.)?float64, the"),
    "shape": ({"jets.a": np.zeros((3, 2), np.float32)}, r"jets.a has shape \(3, 2\)"),
    "one dimension": ({"jets.a": np.zeros(3, np.float32)}, r"jets.a has shape \(3,\)"),
    "rows": ({"jets.f": np.zeros((4, 1), np.float32)}, "jets.f has 4 rows, another of 'n' has 3"),
    "unknown": ({"jets.g": np.zeros((3, 1), np.float32)}, "has an unknown jets.g"),
}


@pytest.mark.parametrize("arrays", [Arrays(), TENSORS], ids=["arrays", "tensors"])
@pytest.mark.parametrize("fault", WRONG)
def test_one_bad_request_spoils_no_other(mlp: Built, fault: str, arrays: Arrays) -> None:
    change, message = WRONG[fault]
    core = Core(mlp.session("exported"), merge=True, arrays=arrays)
    good, bad = jets(3, 0), {**jets(3, 1), **change}
    first, error, last, again = core.answer(
        [Request(request) for request in (good, bad, good, bad)]
    )
    assert isinstance(error, RequestError) and isinstance(again, RequestError)
    assert error is not again  # each request gets an error of its own
    assert re.search(message, str(error))
    assert str(error) == str(again)
    assert isinstance(first, dict) and isinstance(last, dict)
    require_right(mlp, good, first)
    require_right(mlp, good, last)


def test_a_request_without_a_column_is_refused(mlp: Built) -> None:
    request = jets(3, 0)
    del request["jets.c"]
    (error,) = Core(mlp.session("exported"), merge=True).answer([Request(request)])
    assert str(error) == "the request misses jets.c"


def test_another_bundle_was_asked_for(mlp: Built) -> None:
    core = Core(mlp.session("exported"), merge=True, digest="a" * 64)
    same, unnamed, wrong = core.answer(
        [Request(jets(3, 0), "a" * 64), Request(jets(3, 0)), Request(jets(3, 0), "b" * 64)]
    )
    assert isinstance(same, dict) and isinstance(unnamed, dict)
    assert isinstance(wrong, WrongVersionError)
    assert str(wrong) == f"asked for bundle {'b' * 12}, this server runs {'a' * 12}"


def test_rows_outside_the_compiled_range_are_answered_with_an_error(event: Session) -> None:
    core = Core(event, merge=False)
    (error,) = core.answer([random_request(event, {"nodes": 61, "edges": 3}, 0)])
    assert str(error) == "nodes = 61 is outside the compiled range 0 … 60"


def test_a_run_that_fails_is_an_error_of_its_requests(mlp: Built) -> None:
    """The next run is answered."""
    session = mlp.session("exported")
    fails = [True, False]

    def run(arguments: Sequence[torch.Tensor]) -> None:
        if fails.pop(0):
            raise RunError("out of memory")
        session.executable(arguments)

    core = Core(Session(session.signature, Calls(run)), merge=True)
    results = core.answer([Request(jets(3, 0)), Request(jets(4, 0))])
    assert [isinstance(error, RequestError) for error in results] == [True, True]
    assert len(answers_of(core.answer([Request(jets(3, 0))]))) == 1


# -- tensors in place of arrays, as on a GPU -------------------------------------------------------


def tensors(request: Request) -> Request:
    """The request with torch's tensors in place of arrays."""
    return Request({name: torch.from_numpy(array.copy()) for name, array in request.inputs.items()})


def require_equal(answer: object, expected: object) -> None:
    """Compares an answer, of tensors or arrays, with one of arrays."""
    assert isinstance(answer, dict) and isinstance(expected, dict)
    assert answer.keys() == expected.keys()
    for name, values in expected.items():
        array = answer[name]
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        assert (array.dtype, array.shape) == (values.dtype, values.shape)
        np.testing.assert_allclose(array, values, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(
        [("mixed", "columns", True), ("event", "columns", False), ("event", "rows", False)]
        + [("tagged", form, form != "blocks") for form in FORMS]
    ),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=6),
)
def test_tensors_are_answered_as_arrays_are(
    sessions: dict[str, Session],
    which: tuple[str, Form, bool],
    sizes: list[tuple[int, int, bool]],
) -> None:
    """Some requests of a batch are on the host, some not; so are their answers."""
    name, form, merge = which
    session = sessions[name]
    arrays, requests = [], []
    for seed, (n, m, as_tensors) in enumerate(sizes):
        rows = dict(zip(session.signature.dims, (n, m), strict=False))
        arrays.append(random_request(session, rows, seed, form))
        requests.append(tensors(arrays[-1]) if as_tensors else arrays[-1])
    expected = Core(session, merge=merge, requests=form).answer(arrays)
    answers = Core(session, arrays=TENSORS, merge=merge, requests=form).answer(requests)
    for answer, wanted, (*_, as_tensors) in zip(answers, expected, sizes, strict=True):
        require_equal(answer, wanted)
        assert isinstance(answer, dict)
        kind = torch.Tensor if as_tensors else np.ndarray
        assert all(isinstance(values, kind) for values in answer.values())


def test_a_request_of_tensors_longer_than_a_run_is_cut(sessions: dict[str, Session]) -> None:
    session = sessions["tagged"]
    long = random_request(session, {"n": 450}, 1, "rows")
    (answer,) = Core(session, arrays=TENSORS, merge=True, requests="rows").answer([tensors(long)])
    (expected,) = Core(session, merge=True, requests="rows").answer([long])
    require_equal(answer, expected)
    assert isinstance(answer, dict)
    assert all(isinstance(values, torch.Tensor) for values in answer.values())


@pytest.mark.cuda
def test_requests_on_a_gpu_are_answered_there(tmp_path: Path) -> None:
    """Those on the host get answers on the host."""
    built = build(tagged.Tagged(), tagged.SIGNATURE, tmp_path, ("exported",), route="none")
    gpu = torch.device("cuda:0")
    program = engine("exported").open(built.files["exported"], gpu)
    core = Core(Session(tagged.SIGNATURE, program, gpu), merge=True, requests="columns")
    here = built.session("exported")
    arrays = [random_request(here, {"n": n}, n, "columns") for n in (3, 0, 450, 40)]
    expected = Core(here, merge=True, requests="columns").answer(arrays)

    def on_gpu(request: Request) -> Request:
        return Request({name: tensor.to(gpu) for name, tensor in tensors(request).inputs.items()})

    answers = core.answer([on_gpu(arrays[0]), arrays[1], on_gpu(arrays[2]), arrays[3]])
    for answer, wanted in zip(answers, expected, strict=True):
        require_equal(answer, wanted)
    for answer in answers[::2]:
        assert isinstance(answer, dict)
        assert all(tensor.device == gpu for tensor in answer.values())
    for answer in answers[1::2]:
        assert isinstance(answer, dict)
        assert all(isinstance(values, np.ndarray) for values in answer.values())
