"""Linear layers move in front of gathers: fewer rows to compute, the same answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from engines.aoti.hoisting import hoist_linear, replace_pointwise_convolutions

aten = torch.ops.aten
LINEAR = aten.linear.default
KINDS = (LINEAR, aten.conv1d.default, aten.conv2d.default, aten.mm.default)


class Neighbours(nn.Module):
    """EdgeConv as in ParticleNet: x_i and x_j - x_i for four neighbours j of each point i."""

    def __init__(self, width: int = 6, neighbours: int = 4) -> None:
        super().__init__()
        self.k = neighbours
        self.first = nn.Conv2d(2 * width, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 3, 1)
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        n, width, points = x.shape
        near = torch.arange(points).view(1, -1, 1) + torch.arange(self.k).view(1, 1, -1)
        rows = ((near % points) + torch.arange(n).view(-1, 1, 1) * points).reshape(-1)
        flat = x.transpose(0, 1).reshape(width, -1)
        there = flat[:, rows].view(width, n, points, self.k).transpose(0, 1).contiguous()
        here = x.view(n, width, points, 1).repeat(1, 1, 1, self.k)
        edges = torch.cat((here, there - here), dim=1)
        messages: Tensor = self.second(torch.relu(self.norm(self.first(edges))))
        return messages.mean(dim=(2, 3))


class Edges(nn.Module):
    """A layer on the nodes and features of an edge, which moves, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(11, 5)
        self.after = nn.Linear(5, 2)

    def forward(self, nodes: Tensor, index: Tensor, edges: Tensor) -> Tensor:
        ends = [nodes[index[:, 0]], nodes.index_select(0, index[:, 1]), edges]
        messages: Tensor = self.after(torch.relu(self.message(torch.cat(ends, dim=1))))
        return messages


def exported(
    model: nn.Module, arguments: tuple[Tensor, ...], dims: tuple[Dim, ...]
) -> ExportedProgram:
    """The model's program, with a dynamic first dimension of each argument."""
    shapes = tuple({0: dim} for dim in dims)
    program = torch.export.export(model.eval(), arguments, dynamic_shapes=shapes, strict=False)
    functional: ExportedProgram = program.run_decompositions({})
    return functional


def layers(program: ExportedProgram) -> list[Tensor]:
    """The inputs of the program's linear layers, as recorded at export."""
    nodes = [node for node in program.graph.nodes if node.target in KINDS]
    # `hoist_linear` writes mm(weight, input); the other operators have the input first.
    inputs = [node.args[1 if node.target is aten.mm.default else 0] for node in nodes]
    return [node.meta["val"] for node in inputs]


@pytest.fixture
def neighbours() -> tuple[Neighbours, ExportedProgram]:
    torch.manual_seed(0)
    model = Neighbours()
    return model, exported(model, (torch.randn(3, 6, 9),), (Dim("n", max=50),))


def require_same_answers(model: nn.Module, program: ExportedProgram) -> None:
    """Compares a changed program of Neighbours with the model."""
    for n in (1, 2, 50):
        x = torch.randn(n, 6, 9)
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-4)


def test_a_layer_on_edges_becomes_one_on_points(
    neighbours: tuple[Neighbours, ExportedProgram],
) -> None:
    model, program = neighbours
    assert hoist_linear(program) == 1
    assert sorted(value.dim() for value in layers(program)) == [2, 4, 4, 4]
    on_edges = [value for value in layers(program) if value.dim() == 4 and value.shape[3] == 4]
    assert len(on_edges) == 1  # the second layer, behind a ReLU
    require_same_answers(model, program)


def test_a_convolution_of_one_place_becomes_a_layer(
    neighbours: tuple[Neighbours, ExportedProgram],
) -> None:
    model, program = neighbours
    replace_pointwise_convolutions(program)
    assert [node.target for node in program.graph.nodes if node.target in KINDS] == [LINEAR] * 2
    require_same_answers(model, program)


def test_a_layer_on_edges_becomes_one_on_nodes() -> None:
    torch.manual_seed(0)
    model = Edges()

    def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
        ends = torch.randint(0, nodes, (edges, 2))
        return torch.randn(nodes, 4), ends, torch.randn(edges, 3)

    program = exported(model, graph(7, 30), (Dim("n", max=100), *[Dim("e", max=800)] * 2))
    assert hoist_linear(program) == 1
    # `message` on both ends and on the edge's own features, and `after`.
    assert [value.shape[1] for value in layers(program)] == [4, 4, 3, 5]
    for nodes, edges in ((1, 2), (60, 33)):
        arguments = graph(nodes, edges)
        wanted = model(*arguments)
        torch.testing.assert_close(program.module()(*arguments), wanted, atol=1e-5, rtol=1e-4)


class Kept(nn.Module):
    """Layers that stay: moving them saves nothing, or they do not commute with what is before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.wide = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        squared = self.layer(x[:, :4] ** 2)
        mixed = self.layer(x[:, torch.tensor([3, 0, 1, 1])])  # picks features, not rows
        twice = self.layer(x[:, :2].repeat(1, 2))  # repeats features
        picture = self.wide(x.view(-1, 1, 2, 4).repeat(1, 2, 1, 1)).mean(dim=(2, 3))
        summed: Tensor = squared + mixed + twice + picture
        return summed


def test_layers_that_cannot_move_stay() -> None:
    program = exported(Kept(), (torch.randn(5, 8),), (Dim("n", max=50),))
    before = str(program.graph)
    assert hoist_linear(program) == 0
    assert str(program.graph) == before
