"""Requests in tensors, on the CPU: what a GPU would do, and the same answers as NumPy's way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import engine
from runtime.session.session import Session
from serving.errors import RequestError, WrongVersionError
from serving.triton.backend import Core, DeviceCore, Request
from serving.wire import FORMS, Form, Wire
from tests.models import served, tagged
from tests.models.building import build


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    models = {
        "mixed": (served.Mixed(), served.MIXED),
        "event": (served.Event(), served.EVENT),
        "tagged": (tagged.Tagged(), tagged.SIGNATURE),
    }
    found = {}
    for name, (model, signature) in models.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = build(model, signature, folder, ("exported",), route="none").session(
            "exported"
        )
    return found


def request(session: Session, form: Form, rows: dict[str, int], seed: int) -> Request:
    draw = np.random.default_rng(seed)
    wire = Wire.of(session.signature, form)
    return Request(
        {t.name: draw.integers(0, 2, t.shape(rows[t.rows])).astype(t.dtype) for t in wire.inputs}
    )


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
    """Some requests of a batch on the host, some not; each gets its answer in kind."""
    name, form, merge = which
    session = sessions[name]
    arrays = [
        request(session, form, dict(zip(session.signature.dims, (n, m), strict=False)), i)
        for i, (n, m, _) in enumerate(sizes)
    ]
    given = [
        tensors(each) if there else each for each, (*_, there) in zip(arrays, sizes, strict=True)
    ]
    wanted = Core(session, merge=merge, requests=form).answer(arrays)
    found = DeviceCore(session, merge=merge, requests=form).answer(given)
    for mine, theirs, (*_, there) in zip(found, wanted, sizes, strict=True):
        assert isinstance(mine, dict) and isinstance(theirs, dict)
        for key, values in theirs.items():
            assert isinstance(mine[key], torch.Tensor if there else np.ndarray)
            got = mine[key].numpy() if there else mine[key]
            assert (got.dtype, got.shape) == (values.dtype, values.shape)
            np.testing.assert_allclose(got, values, rtol=1e-5)


def test_a_request_longer_than_a_run_is_cut(sessions: dict[str, Session]) -> None:
    session = sessions["tagged"]
    long = request(session, "rows", {"n": 450}, 1)
    (mine,) = DeviceCore(session, merge=True, requests="rows").answer([tensors(long)])
    (theirs,) = Core(session, merge=True, requests="rows").answer([long])
    assert isinstance(mine, dict) and isinstance(theirs, dict)
    for key, values in theirs.items():
        np.testing.assert_allclose(mine[key].numpy(), values, rtol=1e-5)


def test_bad_tensors_are_an_error_of_their_request(sessions: dict[str, Session]) -> None:
    session = sessions["tagged"]
    core = DeviceCore(session, merge=True, digest="a" * 64, requests="rows")
    good = tensors(request(session, "rows", {"n": 3}, 1))
    wrong = {**good.inputs, "values": good.inputs["values"].double()}
    short = {**good.inputs, "values": good.inputs["values"][:2]}
    wide = {**good.inputs, "values": torch.ones(3, 3)}
    answers = core.answer(
        [good, Request(wrong), Request(short), Request(wide), Request(good.inputs, "b" * 64)]
    )
    assert isinstance(answers[0], dict)
    said = [str(answer) for answer in answers[1:] if isinstance(answer, RequestError)]
    assert "input values is torch.float64, the model takes torch.float32" in said[0]
    assert "has 2 rows, another of 'n' has 3" in said[1]
    assert "input values has shape (3, 3), the model takes (n, 2)" in said[2]
    assert isinstance(answers[4], WrongVersionError)


@pytest.mark.cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    """The same on real ones, which no GPU has run yet: answers stay there."""
    made = build(tagged.Tagged(), tagged.SIGNATURE, tmp_path, ("exported",), route="none")
    gpu = torch.device("cuda:0")
    program = engine("exported").open(made.files["exported"], gpu)
    core = DeviceCore(Session(tagged.SIGNATURE, program, gpu), merge=True, requests="columns")
    here = made.session("exported")
    arrays = [request(here, "columns", {"n": n}, n) for n in (3, 0, 450, 40)]
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
