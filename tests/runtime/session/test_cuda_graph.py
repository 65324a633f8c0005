"""CUDA graphs: if none can be recorded, the binding runs without one and says why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runtime.session.cuda_graph import GraphBinding
from runtime.session.session import Session
from tests.models import rogues
from tests.models.building import Built, mlp_signature


def bound(session: Session, n: int, capacity: int) -> GraphBinding:
    jets = session.collection("jets", n, capacity)
    for k, c in enumerate(jets.layout.columns):
        jets.span(c.name).tensor().fill_(k + 1)
    binding = session.bind(jets, session.collection("tags", n, capacity), graph=True)
    assert isinstance(binding, GraphBinding)
    return binding


def test_on_a_cpu_it_runs_as_an_ordinary_binding(mlp: Built) -> None:
    session = mlp.session("aoti")
    given, written = mlp.collections({"n": 33}, spare=10)
    _, expected = mlp.collections({"n": 33}, spare=10)
    session.run(given, expected)
    answers, known = written["tags"].memory()[0], expected["tags"].memory()[0]
    binding = session.bind(given, written, graph=True)
    assert isinstance(binding, GraphBinding)
    assert binding.graph.startswith("not recorded")
    binding()
    assert torch.equal(answers, known)
    answers.zero_()
    session.run_many([binding])
    assert torch.equal(answers, known)
    binding(0)
    assert torch.equal(answers, known)


def test_on_a_cpu_it_takes_other_memory(mlp: Built) -> None:
    session = mlp.session("aoti")
    given, first = mlp.collections({"n": 33})
    _, second = mlp.collections({"n": 33})
    binding = session.bind(given, first, graph=True)
    binding()
    binding.rebind(given, second)
    binding()
    assert torch.equal(second["tags"].memory()[0], first["tags"].memory()[0])
    assert isinstance(binding, GraphBinding) and binding.graph.startswith("not recorded")


@pytest.mark.cuda
def test_replays_see_new_values_and_give_the_answers() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    session = Session(mlp_signature(), rogues.honest(), device)
    binding = bound(session, 40, 60)
    assert binding.graph == "not yet"
    binding()
    assert binding.graph == "recorded at n=40"
    jets, tags = binding.inputs["jets"], binding.outputs["tags"]
    for value in (2, 7):
        jets.tensor("a").fill_(value)
        tags.tensor("x").zero_()
        binding()
        assert tags.tensor("x").eq(3 * value).all()
    tags.span("x").tensor().zero_()
    binding(50)  # another n runs without the graph
    assert tags.span("x").tensor()[:50].ne(0).all()
    assert tags.span("x").tensor()[50:].eq(0).all()
    other = bound(session, 40, 41)
    binding.rebind(other.inputs, other.outputs)
    assert binding.graph == "not yet"
    binding()
    assert other.outputs["tags"].tensor("z").eq(9).all()


@pytest.mark.cuda
def test_what_cannot_be_recorded_runs_all_the_same() -> None:
    honest = rogues.honest()

    def synchronises(arguments: Sequence[torch.Tensor]) -> None:
        honest(arguments)
        torch.cuda.synchronize()

    device = torch.device("cuda", torch.cuda.current_device())
    binding = bound(Session(mlp_signature(), rogues.Calls(synchronises), device), 40, 40)
    binding()
    assert binding.graph.startswith("not recorded: ")
    assert binding.outputs["tags"].tensor("y").eq(6).all()
