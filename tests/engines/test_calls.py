"""Prepared calls of every engine that has them: several at once, and of a closed session."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines import engine
from engines.errors import RunError
from engines.tensors import TensorCall
from runtime.session.session import Session
from tests.models.building import Built, bound, values

# torch with one thread and with two: MKL's last bits depend on it, those of `aoti` must not.
CALLS = [("aoti", 1), ("aoti", 2), ("onnxruntime", 2)]


@pytest.fixture(params=CALLS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def session(request: pytest.FixtureRequest, mlp: Built) -> Iterator[Session]:
    name, threads = request.param
    torch.set_num_threads(threads)
    yield mlp.session(name)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 5])
def test_run_many_gives_what_single_runs_give(mlp: Built, session: Session, threads: int) -> None:
    sizes = [(7 * i) % 50 for i in range(100)]  # every size below 50, twice
    many = [bound(mlp, session, n) for n in sizes]
    assert not isinstance(many[0][0].prepared, TensorCall)
    session.run_many([binding for binding, _ in many], threads)
    for binding, tags in many:
        together = values(tags).clone()
        binding()
        assert torch.equal(together, values(tags))
        # Each row's probabilities sum to 1; outputs begin as zeros.
        torch.testing.assert_close(together.sum(0), torch.ones(tags.n))


def test_run_many_takes_an_empty_list(session: Session) -> None:
    """There is no answer to check: it must not raise."""
    session.run_many([])


def test_run_many_falls_back_to_a_loop_for_other_engines(mlp: Built) -> None:
    session = mlp.session("exported")
    many = [bound(mlp, session, n) for n in (1, 5)]
    assert isinstance(many[0][0].prepared, TensorCall)
    session.run_many([binding for binding, _ in many], threads=2)
    assert all(values(tags).sum() > 0 for _, tags in many)


def test_a_closed_session_refuses_calls_and_new_bindings(mlp: Built, session: Session) -> None:
    binding, _ = bound(mlp, session, 3)
    binding()
    session.close()
    for refused in (binding, lambda: binding(2), lambda: bound(mlp, session, 3)):
        with pytest.raises(RunError, match="the session is closed"):
            refused()


# An artifact of `lanes` whose scratch memory, INT64_MAX / 4 bytes, no host has.
_GREEDY = """
#include <stdint.h>
__attribute__((visibility("default")))
void soa_lanes_run(void *const *columns, const int64_t *items, int64_t begin, int64_t end,
                   char *scratch) {}
__attribute__((visibility("default")))
const struct { int64_t version, columns, scratch, rows, arguments; const char *kinds, *dtypes; }
    soa_lanes_facts = {1, 9, INT64_MAX / 4, 32, 3, "nmm", "kkk"};
"""


def test_any_failure_of_run_many_names_its_call(mlp: Built, tmp_path: Path) -> None:
    """Here the artifact asks for more memory than there is. Call 0 has no rows and does nothing, so
    call 1 fails first."""
    source, library = tmp_path / "greedy.c", tmp_path / "greedy.so"
    source.write_text(_GREEDY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    session = Session(mlp.signature, engine("lanes").open(library, torch.device("cpu")))
    many = [bound(mlp, session, n)[0] for n in (0, 5, 7)]
    with pytest.raises(RunError, match=r"^call 1: std::bad_alloc"):
        session.run_many(many)
