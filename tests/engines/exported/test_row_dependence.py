"""The graph shows if rows depend on each other: no such model passes, and no other is refused.

An export takes a second: `make campaigns` tries all models of tests/models/apart.py, programs drawn
at random, and the networks of configs/ and benchmarks/speed/unseen.py; the suite tries some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import ExportedProgram

from benchmarks.speed.unseen import SHAPES, write_configs
from engines.lanes import why_dependent
from pipeline.config import load_config, source_of
from soa import Block, Layout, RowRange, Signature, column
from soa.signature import offsets_layout
from stages.capture import convention_arguments, example_case, export_convention
from stages.errors import CaptureError
from stages.model import Padded, Padding, build_model
from stages.reference.answers import random_inputs
from tests.models.apart import DEPENDENT, INDEPENDENT, WIDTH, Function, Layers, answer

CONFIGS = Path(__file__).parents[3] / "configs"
# One of each kind that is light to export.
SOME = (
    "sum_of_rows", "sum_of_everything", "softmax", "flipped", "first", "last", "repeated_twice",
    "strided", "row_named_by_a_value", "bins", "gram", "convolved_rows", "rare_number_of_rows",
    "row_number", "position", "noise",
    "pointwise", "assigned", "repeated", "columns_times", "own_row_by_number", "neighbours_of_flat",
    "turned_round",
)  # fmt: skip


def light_and_long(names: Iterable[str]) -> list[Any]:
    """The parameters of a test for each name; those that are not light are long."""
    return [n if n in SOME else pytest.param(n, marks=pytest.mark.long) for n in names]


def program_of(model: nn.Module, signature: Signature) -> ExportedProgram:
    """The program that `capture` exports, on random inputs."""
    inputs, case = random_inputs(signature, 1, {}), example_case(signature)
    return export_convention(
        model.eval().requires_grad_(False), signature, convention_arguments(signature, inputs, case)
    )


def functions_as_program(functions: Mapping[str, Function]) -> ExportedProgram:
    """One program with an output for each function."""
    names = tuple(f"x{i}" for i in range(WIDTH))
    signature = Signature.build(
        {
            "rows": Layout([column(name, "float32") for name in names]),
            "answers": Layout([column(name, "float32") for name in functions], 1, "columns"),
        },
        [Block("x", "rows", names)],
        [Block(name, "answers", (name,)) for name in functions],
        {"n": RowRange(8, 10_000)},
    )
    return program_of(Layers(dict(functions)), signature)


def with_output(program: ExportedProgram, number: int) -> ExportedProgram:
    """The part of a program that computes one of its outputs."""
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    graph.graph_copy(program.graph, copies)
    outputs: Any = program.graph.output_node().args[0]
    graph.output((copies[outputs[number]],))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    signature = SimpleNamespace(
        input_specs=program.graph_signature.input_specs,
        output_specs=[program.graph_signature.output_specs[number]],
    )
    parts = {"state_dict": program.state_dict, "constants": program.constants}
    return cast(ExportedProgram, SimpleNamespace(graph=graph, graph_signature=signature, **parts))


@cache
def programs(some: bool) -> dict[str, ExportedProgram]:
    """A program for each function; one export for all takes a third of the time."""
    every = {**DEPENDENT, **INDEPENDENT}
    functions = {name: f for name, f in every.items() if (name in SOME) is some}
    whole = functions_as_program(functions)
    return {name: with_output(whole, i) for i, name in enumerate(functions)}


def differ(function: Function, n: int, scale: float) -> bool:
    """Whether rows 5 to 20 get other answers if they are run alone instead of among n rows."""
    layers = Layers({}).eval()
    x = scale * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole, part = answer(layers, function, x), answer(layers, function, x[5:20])
    return not torch.allclose(whole[5:20], part, atol=1e-4, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", light_and_long(DEPENDENT))
def test_rows_that_see_each_other_are_not_let_through(name: str) -> None:
    dependence = why_dependent(programs(name in SOME)[name])
    assert dependence is not None and dependence.known
    assert "aten." in dependence.text and "apart.py:" in dependence.text


@pytest.mark.parametrize("name", light_and_long(DEPENDENT))
def test_rows_of_dependent_models_see_each_other(name: str) -> None:
    """In eager torch, their answers change with the other rows: of some models only where numbers
    are large or rows are many."""
    tries = ((40, 1.0), (40, 5.0), (6000, 1.0))
    assert any(differ(DEPENDENT[name], n, scale) for n, scale in tries)


@pytest.mark.parametrize("name", light_and_long(INDEPENDENT))
def test_rows_that_do_not_see_each_other_are_let_through(name: str) -> None:
    assert why_dependent(programs(name in SOME)[name]) is None


@pytest.mark.parametrize("name", light_and_long(INDEPENDENT))
def test_rows_of_independent_models_do_not_see_each_other(name: str) -> None:
    assert not differ(INDEPENDENT[name], 40, 1.0)


# -- jagged rows, and several row dimensions -------------------------------------------------------

LENGTH = 4


class Jagged(nn.Module):
    """Applies functions to items (m, 2), offsets (n, 2) and the padded items (n, 2, LENGTH)."""

    def __init__(self, functions: Iterable[Callable[[Tensor, Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = list(functions)
        self.padding = Padded(nn.Identity(), [Padding(1, LENGTH, 0)])

    def forward(self, items: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        (padded,) = self.padding.prepare([items, offsets])
        return tuple(function(items, offsets, padded) for function in self.functions)


# Whether rows are independent, and the function.
JAGGED: dict[str, tuple[bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "what the padding gives": (True, lambda items, offsets, padded: padded.sum((1, 2))),
    "how many there are": (True, lambda items, offsets, padded: 1.0 * offsets.diff(dim=1)[:, 0]),
    "the mean of all items": (False, lambda items, offsets, padded: padded[:, 0, 0] - items.mean()),
    "a softmax of all items": (
        False,
        lambda items, offsets, padded: Padded(nn.Identity(), [Padding(1, LENGTH, 0)]).prepare(
            [items.softmax(0), offsets]
        )[0].sum((1, 2)),
    ),
    "the first item": (False, lambda items, offsets, padded: padded[:, 0, 0] + items[0, 0]),
    "the item behind its own": (
        False,
        lambda items, offsets, padded: items[offsets[:, 1].clamp(max=items.shape[0] - 1), 0],
    ),
    "how many items there are in all": (
        False,
        lambda items, offsets, padded: padded[:, 0, 0] * items.shape[0],
    ),
    "other rows": (False, lambda items, offsets, padded: padded[:, 0, 0].cumsum(0)),
}  # fmt: skip


def jagged_signature(outputs: Sequence[str]) -> Signature:
    """Jets with two columns, their offsets, and one number for each output."""
    return Signature.build(
        {
            "jets": Layout([column("pt", "float32"), column("eta", "float32")], 1, "columns"),
            "jets_offsets": offsets_layout(),
            "scores": Layout([column(name, "float32") for name in outputs], 1, "columns"),
        },
        [
            Block("jets", "jets", ("pt", "eta")),
            Block("jets_offsets", "jets_offsets", ("begin", "end")),
        ],
        [Block(name, "scores", (name,)) for name in outputs],
        {"n": RowRange(2, 70), "jet": RowRange(2, 500)},
        {"jets": "jet"},
        jagged={"jets": LENGTH},
    )


@pytest.fixture(scope="module")
def jagged() -> dict[str, ExportedProgram]:
    outputs = [f"a{i}" for i in range(len(JAGGED))]
    functions = [function for _, function in JAGGED.values()]
    whole = program_of(Jagged(functions), jagged_signature(outputs))
    return {name: with_output(whole, i) for i, name in enumerate(JAGGED)}


@pytest.mark.parametrize("name", JAGGED)
def test_items_belong_to_rows_by_offsets_alone(
    name: str, jagged: dict[str, ExportedProgram]
) -> None:
    independent, _ = JAGGED[name]
    assert (why_dependent(jagged[name]) is None) is independent


class OneEach(nn.Module):
    """An output for each input."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y + 1


def test_several_row_dimensions_without_offsets_are_not_let_through() -> None:
    names = ("x", "y", "u", "v")
    signature = Signature.build(
        {name: Layout([column(name, "float32")]) for name in names},
        [Block("x", "x", ("x",)), Block("y", "y", ("y",))],
        [Block("u", "u", ("u",)), Block("v", "v", ("v",))],
        {"n": RowRange(0, 70), "m": RowRange(0, 90)},
        {"x": "n", "u": "n", "y": "m", "v": "m"},
    )
    dependence = why_dependent(program_of(OneEach(), signature))
    assert dependence is not None and "row dimensions" in dependence.text


# -- programs drawn at random ----------------------------------------------------------------------

Factors = list[list[int]]
"""The factors of each dimension's size; ROWS stands for the number of rows."""
ROWS = -1


class Drawn(nn.Module):
    """A random model on (n, 2 * 3); `apart` is whether its steps keep rows apart.

    A step takes a tensor, a dimension and a number, and keeps `factors` up to date.
    """

    def __init__(self, drawn: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.drawn = drawn
        self.apart = True

    def forward(self, x: Tensor) -> Tensor:
        self.n, self.factors, self.apart = x.shape[0], [[ROWS], [2, 3]], True
        for name, first, second in self.drawn:
            x = getattr(self, name)(x, first % x.dim(), second)
        return torch.tanh(self.by_row(x).sum(1))

    def by_row(self, x: Tensor) -> Tensor:
        """The elements of each row: (n, elements)."""
        (dim,) = [d for d, factors in enumerate(self.factors) if ROWS in factors]
        at = self.factors[dim].index(ROWS)
        before, after = self.size(self.factors[dim][:at]), self.size(self.factors[dim][at + 1 :])
        whole = x.reshape(*x.shape[:dim], before, self.n, after, *x.shape[dim + 1 :])
        return whole.movedim(dim + 1, 0).flatten(1)

    def size(self, factors: Sequence[int]) -> int:
        """The product of the factors."""
        # No math.prod: while torch exports the model, n is a symbol.
        size = 1
        for factor in factors:
            size = size * (self.n if factor == ROWS else factor)
        return size

    def across(self, *dims: int) -> None:
        """Notes that a step combines values along these dimensions."""
        self.apart = self.apart and not any(ROWS in self.factors[dim] for dim in dims)

    def turned(self, x: Tensor, dim: int, by: int) -> Tensor:
        """The dimension and those behind it come first."""
        order = [*range(dim, x.dim()), *range(dim)]
        self.factors = [self.factors[d] for d in order]
        return x.permute(order)

    def merged(self, x: Tensor, dim: int, by: int) -> Tensor:
        """The dimension and the next one become one."""
        if dim + 1 < x.dim():
            self.factors[dim : dim + 2] = [self.factors[dim] + self.factors[dim + 1]]
            x = x.flatten(dim, dim + 1)
        return x

    def cut(self, x: Tensor, dim: int, by: int, swapped: bool = False) -> Tensor:
        """The dimension becomes two; `swapped`: of the sizes in the other order, which mixes rows,
        unless the other one is 1."""
        factors = self.factors[dim]
        if len(factors) > 1:
            at = 1 + by % (len(factors) - 1)
            pieces = [factors[:at], factors[at:]]
            if swapped:
                other = next((piece for piece in pieces if ROWS not in piece), [])
                self.apart &= ROWS not in factors or self.size(other) == 1
                pieces.reverse()
            self.factors[dim : dim + 1] = pieces
            x = x.reshape(*x.shape[:dim], *map(self.size, pieces), *x.shape[dim + 1 :])
        return x

    def cut_the_other_way(self, x: Tensor, dim: int, by: int) -> Tensor:
        """See `cut`."""
        return self.cut(x, dim, by, swapped=True)

    def centred(self, x: Tensor, dim: int, by: int) -> Tensor:
        """Less its mean along the dimension."""
        self.across(dim)
        return x - x.mean(dim, keepdim=True)

    def running(self, x: Tensor, dim: int, by: int) -> Tensor:
        """Sums so far along the dimension."""
        self.across(dim)
        return x.cumsum(dim).tanh()

    def flipped(self, x: Tensor, dim: int, by: int) -> Tensor:
        """A sum with itself, turned round along the dimension."""
        self.across(dim)
        return x + 2 * x.flip(dim)

    def in_order(self, x: Tensor, dim: int, by: int) -> Tensor:
        """Sorted along the dimension."""
        self.across(dim)
        return x.gather(dim, x.argsort(dim))

    def product(self, x: Tensor, dim: int, by: int) -> Tensor:
        """A product of its matrices, in the last two dimensions."""
        if x.dim() > 1:
            self.across(-1, -2)
            x = (x @ x.mT @ x).tanh()
        return x

    def weighted(self, x: Tensor, dim: int, by: int) -> Tensor:
        """A product with weights in the last dimension, if that is not of rows."""
        if ROWS not in self.factors[-1]:
            x = x @ torch.linspace(-1, 1, 3 * self.size(self.factors[-1])).view(-1, 3)
            self.factors[-1] = [3]
        return x

    def some(self, x: Tensor, dim: int, by: int) -> Tensor:
        """The last and the first element of a dimension that is not of rows."""
        if ROWS not in self.factors[dim]:
            x = x.index_select(dim, torch.tensor([self.size(self.factors[dim]) - 1, 0]))
            self.factors[dim] = [2]
        return x

    def one(self, x: Tensor, dim: int, by: int) -> Tensor:
        """One element of a dimension that is not of rows."""
        if ROWS not in self.factors[dim]:
            x = x.select(dim, by % self.size(self.factors[dim]))
            del self.factors[dim]
        return x

    def again(self, x: Tensor, dim: int, by: int) -> Tensor:
        """Each element twice, or all elements twice, along the dimension."""
        if by % 2:
            self.factors[dim] = [2, *self.factors[dim]]
            return x.repeat(*[2 if d == dim else 1 for d in range(x.dim())])
        self.factors[dim] = [*self.factors[dim], 2]
        return x.repeat_interleave(2, dim)

    def by_number(self, x: Tensor, dim: int, by: int) -> Tensor:
        """Each row picked by its own number, if rows are outermost in the dimension."""
        if self.factors[dim][0] == ROWS:
            x = x.index_select(dim, torch.arange(x.shape[dim])) + 1
        return x


STEPS = (
    "turned", "merged", "cut", "cut_the_other_way", "centred", "running", "flipped", "in_order",
    "product", "weighted", "some", "one", "again", "by_number",
)  # fmt: skip
DRAWN = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=6
)


@pytest.mark.long
@settings(
    max_examples=100, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)  # an example takes a second, and shrinking some minutes
@given(DRAWN)
def test_drawn_programs_pass_if_they_keep_rows_apart(
    drawn: list[tuple[str, int, int]],
) -> None:
    names = tuple(f"x{i}" for i in range(WIDTH))
    signature = Signature.build(
        {
            "rows": Layout([column(name, "float32") for name in names]),
            "answers": Layout([column("y", "float32")]),
        },
        [Block("x", "rows", names)],
        [Block("y", "answers", ("y",))],
        {"n": RowRange(8, 10_000)},
    )
    model = Drawn(drawn)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))
    whole, part, apart = model(x), model(x[5:20]), model.apart
    try:
        dependence = why_dependent(program_of(model, signature))
    except CaptureError:
        reject()
    assert (dependence is None) is apart, dependence
    if apart:
        torch.testing.assert_close(whole[5:20], part, atol=1e-4, rtol=1e-3)


# -- the networks that there are -------------------------------------------------------------------

NETWORKS = ["demo", "hzz", "nanoaod", *sorted(p.stem for p in (CONFIGS / "zoo").glob("*.yaml"))]


@pytest.mark.long
@pytest.mark.parametrize("name", [*NETWORKS, *SHAPES])
def test_only_the_network_of_a_graph_has_dependent_rows(name: str, tmp_path: Path) -> None:
    """The rows of `edge_gnn` are the nodes and edges of one event."""
    paths = [*CONFIGS.rglob("*.yaml"), *write_configs(tmp_path)]
    config = load_config(next(path for path in paths if path.stem == name))
    dependence = why_dependent(program_of(build_model(source_of(config)), config.signature()))
    if name == "edge_gnn":
        assert dependence is not None and "edge_gnn.py:" in dependence.text
    else:
        assert dependence is None


@pytest.mark.long
@pytest.mark.parametrize("name", ["particlenet", "particlenet_raw"])
def test_particlenet_keeps_rows_apart(name: str) -> None:
    pytest.importorskip("weaver", reason="ParticleNet is weaver-core's")
    config = load_config(CONFIGS / f"{name}.yaml")
    source = replace(source_of(config), weights=None)
    assert why_dependent(program_of(build_model(source), config.signature())) is None
