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
    """A binding to jets whose columns hold 1, 2, 3, …; the answers are three times as large."""
    jets = session.collection("jets", n, capacity)
    for i, column in enumerate(jets.layout.columns):
        jets.span(column.name).tensor().fill_(i + 1)
    binding = session.bind(jets, session.collection("tags", n, capacity), graph=True)
    assert isinstance(binding, GraphBinding)
    return binding


def test_on_a_cpu_it_runs_as_an_ordinary_binding(mlp: Built) -> None:
    session = mlp.session("aoti")
    inputs, outputs = mlp.collections({"n": 33}, spare=10)
    _, others = mlp.collections({"n": 33}, spare=10)
    session.run(inputs, others)
    answers, expected = outputs["tags"].memory()[0], others["tags"].memory()[0]
    binding = session.bind(inputs, outputs, graph=True)
    assert isinstance(binding, GraphBinding)
    assert binding.graph.startswith("not recorded")
    binding()
    assert torch.equal(answers, expected)
    answers.zero_()
    session.run_many([binding])
    assert torch.equal(answers, expected)
    binding(0)  # no row is written
    assert torch.equal(answers, expected)


def test_on_a_cpu_it_takes_other_memory(mlp: Built) -> None:
    session = mlp.session("aoti")
    inputs, first = mlp.collections({"n": 33})
    _, second = mlp.collections({"n": 33})
    binding = session.bind(inputs, first, graph=True)
    binding()
    binding.rebind(inputs, second)
    binding()
    assert torch.equal(second["tags"].memory()[0], first["tags"].memory()[0])
    assert isinstance(binding, GraphBinding) and binding.graph.startswith("not recorded")


@pytest.fixture
def gpu() -> Session:
    device = torch.device("cuda", torch.cuda.current_device())
    return Session(mlp_signature(), rogues.honest(), device)


@pytest.mark.cuda
def test_a_graph_is_recorded_by_the_first_call(gpu: Session) -> None:
    binding = bound(gpu, 40, 60)
    assert binding.graph == "not yet"
    binding()
    assert binding.graph == "recorded at n=40"


@pytest.mark.cuda
def test_replays_see_new_values(gpu: Session) -> None:
    binding = bound(gpu, 40, 60)
    binding()
    jets, tags = binding.inputs["jets"], binding.outputs["tags"]
    for value in (2, 7):
        jets.tensor("a").fill_(value)
        tags.tensor("x").zero_()
        binding()
        assert tags.tensor("x").eq(3 * value).all()


@pytest.mark.cuda
def test_other_rows_run_without_the_graph(gpu: Session) -> None:
    binding = bound(gpu, 40, 60)
    binding()
    answers = binding.outputs["tags"].span("x").tensor()
    answers.zero_()
    binding(50)
    assert answers[:50].ne(0).all()
    assert answers[50:].eq(0).all()


@pytest.mark.cuda
def test_another_graph_is_recorded_for_other_memory(gpu: Session) -> None:
    binding = bound(gpu, 40, 60)
    binding()
    other = bound(gpu, 40, 41)
    binding.rebind(other.inputs, other.outputs)
    assert binding.graph == "not yet"
    binding()
    assert other.outputs["tags"].tensor("z").eq(3 * 3).all()


@pytest.mark.cuda
def test_an_artifact_that_cannot_be_recorded_runs_all_the_same() -> None:
    honest = rogues.honest()

    def synchronises(arguments: Sequence[torch.Tensor]) -> None:
        """A graph being recorded may not wait for the device."""
        honest(arguments)
        torch.cuda.synchronize()

    device = torch.device("cuda", torch.cuda.current_device())
    binding = bound(Session(mlp_signature(), rogues.Calls(synchronises), device), 40, 40)
    binding()
    assert binding.graph.startswith("not recorded: ")
    assert binding.outputs["tags"].tensor("y").eq(6).all()
