"""The backend without a server: requests share a run, and each gets the answers to its rows.

Requests with torch's tensors on the CPU stand for those on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
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

LIMIT = 100


TENSORS = Tensors(torch.device("cpu"))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory, tags: Tags) -> dict[str, Session]:
    made = {
        "mixed": served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED),
        "event": served.shared(tmp_path_factory, "event", served.Event(), served.EVENT),
        "tagged": tags.bundle,
    }
    return {name: served.session(bundle) for name, bundle in made.items()}


@pytest.fixture
def mixed(sessions: dict[str, Session]) -> Session:
    return sessions["mixed"]


@pytest.fixture
def event(sessions: dict[str, Session]) -> Session:
    return sessions["event"]


def jets(n: int, seed: int) -> dict[str, Array]:
    values = np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)
    return {f"jets.{name}": values[:, i : i + 1] for i, name in enumerate(FEATURES)}


def row_major(mlp: Built, request: dict[str, Array]) -> Array:
    """The model's own answer to a request, on an ordinary tensor."""
    x = torch.from_numpy(np.concatenate([request[f"jets.{name}"] for name in FEATURES], axis=1))
    with torch.no_grad():
        answer: Array = mlp.model(x).numpy()
    return answer


def answers_of(found: list[dict[str, Array] | RequestError]) -> list[dict[str, Array]]:
    return [answer for answer in found if isinstance(answer, dict)]


def random_request(
    session: Session, rows: dict[str, int], seed: int, form: Form = "columns"
) -> Request:
    draw = np.random.default_rng(seed)
    return Request(
        {
            t.name: draw.integers(0, 2 if t.dtype == bool else 50, t.shape(rows[t.rows])).astype(
                t.dtype
            )
            for t in Wire.of(session.signature, form).inputs
        }
    )


@settings(max_examples=15)
@given(st.lists(st.integers(0, 7000), min_size=1, max_size=6))
def test_every_request_gets_its_own_rows(mlp: Built, sizes: list[int]) -> None:
    """Also if they do not fit into one run, or one alone has more than the compiled 5000 rows."""
    core = Core(mlp.session("exported"), merge=True)
    requests = [jets(n, seed) for seed, n in enumerate(sizes)]
    found = answers_of(core.answer([Request(each) for each in requests]))
    assert len(found) == len(sizes)
    for request, answer in zip(requests, found, strict=True):
        got = np.concatenate([answer[f"tags.{name}"] for name in CLASSES], axis=1)
        assert np.allclose(got, row_major(mlp, request), rtol=1e-4, atol=1e-5)


def test_rows_and_blocks_are_answered_in_kind(mlp: Built) -> None:
    """A request with more than the compiled 5000 rows is divided; blocks are not merged."""
    session = mlp.session("exported")
    requests = [jets(n, n) for n in (3, 0, 40, 7001)]
    together = [np.concatenate([r[f"jets.{f}"] for f in FEATURES], axis=1) for r in requests]
    (given_name,) = [t.name for t in Wire.of(session.signature, "rows").inputs]
    (name,) = [t.name for t in Wire.of(session.signature, "rows").outputs]
    rows = Core(session, merge=True, requests="rows")
    found = answers_of(rows.answer([Request({given_name: x}) for x in together]))
    for request, answer in zip(requests, found, strict=True):
        assert answer[name].flags.c_contiguous
        assert np.allclose(answer[name], row_major(mlp, request), rtol=1e-4, atol=1e-5)
    blocks = Core(session, merge=False, requests="blocks")
    found = answers_of(blocks.answer([Request({given_name: x.T}) for x in together[:3]]))
    for request, answer in zip(requests[:3], found, strict=True):
        assert answer[name].shape == (len(CLASSES), len(request["jets.a"]))
        assert np.allclose(answer[name].T, row_major(mlp, request), rtol=1e-4, atol=1e-5)
    (wrong,) = blocks.answer([Request({given_name: together[0]})])
    assert "has shape (3, 6), the model takes (6, n)" in str(wrong)


def test_requests_share_runs_and_runs_keep_to_the_limit(mlp: Built) -> None:
    session = mlp.session("exported")
    seen: list[int] = []
    run = session.executable

    def counting(arguments: Sequence[torch.Tensor]) -> None:
        seen.append(arguments[0].shape[0])
        run(arguments)

    core = Core(Session(session.signature, Calls(counting)), merge=True)
    core.answer([Request(jets(n, 0)) for n in (10, 20, 4960, 30, 12000)])
    assert seen == [10 + 20 + 4960, 30 + 4000, 4000, 4000]


def test_every_dtype_and_shape_comes_back(mixed: Session) -> None:
    """Merged requests get the same bits as single ones."""
    requests = [random_request(mixed, {"n": n}, n) for n in (1, 30, 7, 150, 90)]
    merged = answers_of(Core(mixed, merge=True).answer(requests))
    alone = [a for r in requests for a in answers_of(Core(mixed, merge=False).answer([r]))]
    assert len(merged) == len(alone) == len(requests)
    for one, other in zip(merged, alone, strict=True):
        for t in Wire.of(mixed.signature).outputs:
            assert one[t.name].dtype == other[t.name].dtype == t.dtype
            assert np.array_equal(one[t.name], other[t.name])


def test_requests_that_share_nothing_run_alone(event: Session) -> None:
    core = Core(event, merge=False)
    requests = [random_request(event, {"nodes": n, "edges": e}, n) for n, e in ((3, 5), (40, 1))]
    found = answers_of(core.answer(requests))
    for request, answer in zip(requests, found, strict=True):
        total = request.inputs["edges.weight"].sum()
        points = request.inputs["nodes.x"] + request.inputs["nodes.y"]
        assert np.allclose(answer["out.score"], points * request.inputs["nodes.z"] + total)
        assert answer["out.total"].tolist() == [total]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_memory_of_their_own(mlp: Built, form: Form, merge: bool) -> None:
    """A later run changes neither answers nor requests: they share no memory with the core."""
    core = Core(mlp.session("exported"), merge=merge and form != "blocks", requests=form)

    def asked(n: int, seed: int) -> Request:
        columns = jets(n, seed)
        if form == "columns":
            return Request(columns)
        rows = np.concatenate(list(columns.values()), axis=1)
        (name,) = [t.name for t in core.wire.inputs]
        return Request({name: rows if form == "rows" else np.ascontiguousarray(rows.T)})

    requests = [asked(n, n) for n in (5, 1, 3)]
    answers = answers_of(core.answer(requests))
    arrays = [v for each in requests for v in each.inputs.values()]
    arrays += [v for each in answers for v in each.values()]
    kept = [values.copy() for values in arrays]
    core.answer([asked(5, 8), asked(4, 9)])
    core.answer([asked(9, 10)])
    assert len(answers) == 3
    assert all(np.array_equal(now, then) for now, then in zip(arrays, kept, strict=True))


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
    first, wrong, last, again = core.answer([Request(each) for each in (good, bad, good, bad)])
    assert isinstance(wrong, RequestError) and isinstance(again, RequestError)
    assert wrong is not again and str(wrong) == str(again)
    with pytest.raises(RequestError, match=message):
        raise wrong
    assert isinstance(first, dict) and isinstance(last, dict)
    got = np.concatenate([first[f"tags.{name}"] for name in CLASSES], axis=1)
    assert np.allclose(got, row_major(mlp, good), rtol=1e-4, atol=1e-5)


def test_a_column_that_is_missing(mlp: Built) -> None:
    request = jets(3, 0)
    del request["jets.c"]
    (found,) = Core(mlp.session("exported"), merge=True).answer([Request(request)])
    assert str(found) == "the request misses jets.c"


def test_another_bundle_was_asked_for(mlp: Built) -> None:
    core = Core(mlp.session("exported"), merge=True, digest="a" * 64)
    good, foreign, wrong = core.answer(
        [Request(jets(3, 0), "a" * 64), Request(jets(3, 0)), Request(jets(3, 0), "b" * 64)]
    )
    assert isinstance(good, dict) and isinstance(foreign, dict)
    assert isinstance(wrong, WrongVersionError)
    assert str(wrong) == f"asked for bundle {'b' * 12}, this server runs {'a' * 12}"


def test_rows_outside_the_compiled_range(event: Session) -> None:
    core = Core(event, merge=False)
    (found,) = core.answer([random_request(event, {"nodes": 61, "edges": 3}, 0)])
    assert str(found) == "nodes = 61 is outside the compiled range 0 … 60"


def test_a_run_that_fails_is_an_error_of_its_requests(mlp: Built) -> None:
    """The next run is answered."""
    session = mlp.session("exported")
    fails = [True, False]

    def run(arguments: Sequence[torch.Tensor]) -> None:
        if fails.pop(0):
            raise RunError("out of memory")
        session.executable(arguments)

    core = Core(Session(session.signature, Calls(run)), merge=True)
    found = core.answer([Request(jets(3, 0)), Request(jets(4, 0))])
    assert [isinstance(error, RequestError) for error in found] == [True, True]
    assert len(answers_of(core.answer([Request(jets(3, 0))]))) == 1


# -- tensors in place of arrays, as on a GPU -------------------------------------------------------


def tensors(given: Request) -> Request:
    return Request({name: torch.from_numpy(v.copy()) for name, v in given.inputs.items()})


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
    arrays = [
        random_request(session, dict(zip(session.signature.dims, (n, m), strict=False)), i, form)
        for i, (n, m, _) in enumerate(sizes)
    ]
    given = [
        tensors(each) if there else each for each, (*_, there) in zip(arrays, sizes, strict=True)
    ]
    wanted = Core(session, merge=merge, requests=form).answer(arrays)
    found = Core(session, arrays=TENSORS, merge=merge, requests=form).answer(given)
    for mine, theirs, (*_, there) in zip(found, wanted, sizes, strict=True):
        assert isinstance(mine, dict) and isinstance(theirs, dict)
        for key, values in theirs.items():
            assert isinstance(mine[key], torch.Tensor if there else np.ndarray)
            got = mine[key].numpy() if there else mine[key]
            assert (got.dtype, got.shape) == (values.dtype, values.shape)
            np.testing.assert_allclose(got, values, rtol=1e-5)


def test_a_request_longer_than_a_run_is_cut(sessions: dict[str, Session]) -> None:
    session = sessions["tagged"]
    long = random_request(session, {"n": 450}, 1, "rows")
    (mine,) = Core(session, arrays=TENSORS, merge=True, requests="rows").answer([tensors(long)])
    (theirs,) = Core(session, merge=True, requests="rows").answer([long])
    assert isinstance(mine, dict) and isinstance(theirs, dict)
    for key, values in theirs.items():
        np.testing.assert_allclose(mine[key].numpy(), values, rtol=1e-5)


@pytest.mark.cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    """Requests and answers on a GPU."""
    made = build(tagged.Tagged(), tagged.SIGNATURE, tmp_path, ("exported",), route="none")
    gpu = torch.device("cuda:0")
    program = engine("exported").open(made.files["exported"], gpu)
    core = Core(Session(tagged.SIGNATURE, program, gpu), merge=True, requests="columns")
    here = made.session("exported")
    arrays = [random_request(here, {"n": n}, n, "columns") for n in (3, 0, 450, 40)]
    there = [Request({k: v.to(gpu) for k, v in tensors(r).inputs.items()}) for r in arrays]
    found = core.answer([there[0], arrays[1], there[2], arrays[3]])
    wanted = Core(here, merge=True, requests="columns").answer(arrays)
    for mine, theirs, is_there in zip(found, wanted, (True, False, True, False), strict=True):
        assert isinstance(mine, dict) and isinstance(theirs, dict)
        for key, values in theirs.items():
            got = mine[key]
            if is_there:
                assert got.device == gpu
                got = got.cpu().numpy()
            np.testing.assert_allclose(got, values, rtol=1e-5)
