"""The zoo: each architecture's properties and its config; two of them from config to registry.

Shapes and row counts are those of configs/zoo, so the tests cover what is built.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.export import Dim

from engines.target import Target
from examples.zoo.edge_gnn import EdgeGNN, Interaction, edge_gnn
from examples.zoo.multi_head import MultiHead, multi_head
from examples.zoo.particle_transformer import (
    ParticleTransformer,
    pair_features,
    particle_transformer,
)
from examples.zoo.particle_transformer import reference as transformer_reference
from pipeline.building.run_config import run
from pipeline.config import Config, load_config
from pipeline.config.assemble import reference_inputs, source_of
from registry.store.registry import Registry
from soa.signature import Signature
from stages.model.source import build_model
from stages.reference.answers import Arrays, eager_outputs, make_cases, row_major_inputs
from stages.reference.nonfinite import Case

CONFIGS = Path(__file__).parents[2] / "configs" / "zoo"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
ZOO = ["deep_sets", "edge_gnn", "mlp", "multi_head", "particle_transformer", "tiny_resnet"]
LARGE = {"particle_transformer", "demo"}
"""They take seconds to export."""


class Entry:
    """A config of the zoo with its eager model and its reference inputs."""

    def __init__(self, name: str) -> None:
        folder = CONFIGS.parent if name == "demo" else CONFIGS
        self.config: Config = load_config(folder / f"{name}.yaml")
        self.signature: Signature = self.config.signature()
        self.model = build_model(source_of(self.config))
        self.inputs: Arrays = reference_inputs(self.config, self.signature)

    def arguments(self, case: Case) -> list[Tensor]:
        """The model's arguments: the first rows of the reference inputs."""
        return row_major_inputs(self.signature, self.inputs, case)

    def case(self, n: int) -> Case:
        """n rows of the first dimension, and more of each next one."""
        return {dim: n + 4 * i for i, dim in enumerate(self.signature.dims)}


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {name: Entry(name) for name in (*NAMES, "demo")}


def test_every_architecture_has_a_config_and_a_row_in_the_table() -> None:
    assert NAMES == ZOO
    table = (CONFIGS.parents[1] / "examples" / "README.md").read_text()
    for name in NAMES:
        assert f"`zoo/{name}.py`" in table
        assert f"`configs/zoo/{name}.yaml`" in table


@pytest.mark.parametrize("name", ZOO)
def test_a_factory_gives_the_same_weights_every_time(name: str) -> None:
    """Whatever torch's generator has drawn before."""
    torch.manual_seed(11)
    first = factory(name)().state_dict()
    torch.manual_seed(12)
    second = factory(name)().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ZOO)
def test_a_factory_draws_nothing_from_torchs_generator(name: str) -> None:
    torch.manual_seed(11)
    undisturbed = torch.rand(3)
    torch.manual_seed(11)
    factory(name)()
    assert torch.equal(torch.rand(3), undisturbed)


def factory(name: str) -> Any:
    """The function that makes a model of the zoo."""
    return getattr(importlib.import_module(f"examples.zoo.{name}"), name)


@pytest.mark.parametrize("name", [*ZOO, "demo"])
def test_answers_are_finite_and_inputs_stay(name: str, entries: dict[str, Entry]) -> None:
    entry = entries[name]
    case = entry.case(60)
    arguments = entry.arguments(case)
    before = [argument.clone() for argument in arguments]
    answers = eager_outputs(entry.model, entry.signature, arguments, case)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert all(values.isfinite().all() for values in answers.values())


# A graph is one event: its rows depend on each other.
@pytest.mark.parametrize("name", [*(name for name in ZOO if name != "edge_gnn"), "demo"])
def test_rows_do_not_depend_on_the_batch(name: str, entries: dict[str, Entry]) -> None:
    entry = entries[name]

    def answers(n: int) -> dict[str, Tensor]:
        return eager_outputs(entry.model, entry.signature, entry.arguments({"n": n}), {"n": n})

    expected = answers(60)
    for n in (0, 1, 7):
        for output, values in answers(n).items():
            torch.testing.assert_close(values, expected[output][:n], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LARGE)) for name in (*ZOO, "demo")],
)
def test_it_exports_once_for_every_row_count(name: str, entries: dict[str, Entry]) -> None:
    entry = entries[name]
    signature = entry.signature
    dims = {dim: Dim(dim, min=0, max=signature.ranges[dim].max) for dim in signature.dims}
    shapes = tuple(
        None if b.plan.kind == "scalars" else {0: dims[b.rows]} for b in signature.inputs
    )
    program = torch.export.export(
        entry.model, tuple(entry.arguments(entry.case(37))), dynamic_shapes=shapes, strict=False
    ).module()
    for n in (0, 1, 33):
        case = entry.case(n)
        arguments = entry.arguments(case)
        expected = eager_outputs(entry.model, signature, arguments, case)
        answers = eager_outputs(program, signature, arguments, case)
        for output, values in answers.items():
            torch.testing.assert_close(values, expected[output], atol=1e-6, rtol=1e-5)


# -- DeepSets --------------------------------------------------------------------------------------

Sets = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def sets(entries: dict[str, Entry]) -> Sets:
    """Hits (100, 16, features), which of them exist, and the pile-up."""
    hits, exists, pileup = entries["deep_sets"].arguments({"n": 100})
    return hits, exists, pileup


@pytest.fixture
def deep_sets(entries: dict[str, Entry]) -> torch.nn.Module:
    return entries["deep_sets"].model


def test_deep_sets_takes_hits_in_any_order(deep_sets: torch.nn.Module, sets: Sets) -> None:
    hits, exists, pileup = sets
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    answers = deep_sets(hits[:, order], exists[:, order], pileup)
    torch.testing.assert_close(answers, deep_sets(*sets))


@pytest.mark.parametrize("junk", [-7.0, float("inf"), float("nan")])
def test_deep_sets_sees_no_hit_that_does_not_exist(
    deep_sets: torch.nn.Module, sets: Sets, junk: float
) -> None:
    hits, exists, pileup = sets
    dirty = torch.where(exists.unsqueeze(2), hits, junk)
    assert torch.equal(deep_sets(dirty, exists, pileup), deep_sets(*sets))


def test_deep_sets_sees_the_pileup(deep_sets: torch.nn.Module, sets: Sets) -> None:
    hits, exists, pileup = sets
    assert not torch.allclose(deep_sets(hits, exists, pileup + 10.0), deep_sets(*sets))


def test_deep_sets_has_an_answer_to_no_hits(deep_sets: torch.nn.Module, sets: Sets) -> None:
    hits, exists, pileup = sets
    assert deep_sets(hits, torch.zeros_like(exists), pileup).isfinite().all()


# -- the edge GNN ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def event() -> tuple[Tensor, Tensor, Tensor]:
    """40 nodes, their 200 edges (source, target), and the edges' features."""
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(0, 40, (200, 2), generator=generator)
    nodes, edges = (torch.randn(*shape, generator=generator) for shape in ((40, 3), (200, 4)))
    return nodes, index, edges


@pytest.fixture(scope="module")
def gnn() -> EdgeGNN:
    model = edge_gnn()
    assert isinstance(model, EdgeGNN)
    return model.eval().requires_grad_(False)


Event = tuple[Tensor, Tensor, Tensor]


def test_another_order_of_nodes_and_edges_changes_only_the_order(
    gnn: EdgeGNN, event: Event
) -> None:
    nodes, index, edges = event
    scores, hits = gnn(nodes, index, edges)
    generator = torch.Generator().manual_seed(1)
    order, lines = (torch.randperm(n, generator=generator) for n in (40, 200))
    # Node i is now at argsort(order)[i].
    moved_scores, moved_hits = gnn(nodes[order], torch.argsort(order)[index[lines]], edges[lines])
    torch.testing.assert_close(moved_scores, scores[lines])
    torch.testing.assert_close(moved_hits, hits[order])


def test_messages_are_those_of_a_loop_over_edges(gnn: EdgeGNN, event: Event) -> None:
    nodes, index, edges = event
    hidden = torch.relu(gnn.encode_nodes(nodes))
    latent = torch.relu(gnn.encode_edges(edges))
    for interaction in gnn.rounds:
        assert isinstance(interaction, Interaction)
        arrived = torch.zeros_like(hidden)
        sent = []
        for k, (source, target) in enumerate(index.tolist()):
            sent.append(interaction.message(torch.cat([hidden[source], hidden[target], latent[k]])))
            arrived[target] += sent[-1]
        latent = latent + torch.stack(sent)
        hidden = hidden + interaction.update(torch.cat([hidden, arrived], dim=1))
    torch.testing.assert_close(gnn(nodes, index, edges)[1], gnn.node_head(hidden))
    ends = torch.cat([hidden[index[:, 0]], hidden[index[:, 1]], latent], dim=1)
    expected = torch.sigmoid(gnn.edge_head(ends)).squeeze(1)
    torch.testing.assert_close(gnn(nodes, index, edges)[0], expected)


@pytest.mark.parametrize("nowhere", [-1, -(2**31), 40, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_edge_that_leads_nowhere_is_no_edge(
    gnn: EdgeGNN, event: Event, nowhere: int, dtype: torch.dtype
) -> None:
    nodes, index, edges = event
    kept = torch.arange(200) % 5 != 0
    expected, expected_hits = gnn(nodes, index[kept], edges[kept])
    broken = index.to(dtype)
    broken[~kept, 0] = nowhere
    scores, hits = gnn(nodes, broken, edges)
    torch.testing.assert_close(scores[kept], expected)
    assert not scores[~kept].any()
    torch.testing.assert_close(hits, expected_hits)


def test_an_event_without_hits_has_no_edge(gnn: EdgeGNN, event: Event) -> None:
    nodes, index, edges = event
    scores, hits = gnn(nodes[:0], index, edges)
    assert scores.shape == (200,) and not scores.any() and hits.shape == (0, 2)


def test_an_event_without_edges_has_answers_for_its_hits(gnn: EdgeGNN, event: Event) -> None:
    nodes, index, edges = event
    scores, hits = gnn(nodes, index[:0], edges[:0])
    assert scores.shape == (0,) and hits.shape == (40, 2) and bool(hits.isfinite().all())


def test_most_sizes_that_are_validated_have_edges_that_exist(entries: dict[str, Entry]) -> None:
    entry = entries["edge_gnn"]
    existing = []
    for case in make_cases(entry.signature):
        _, index, _ = entry.arguments(case)
        exists = ((index >= 0) & (index < case["nodes"])).all(dim=1)
        existing.append(int(exists.sum()))
        if case["edges"] >= 31 and case["nodes"] > 1:
            assert exists.any() and not exists.all()
    assert max(existing) > 3000  # of at most 4096


# -- the multi-head network ------------------------------------------------------------------------


def test_each_head_has_its_dtype_and_its_rule(entries: dict[str, Entry]) -> None:
    entry = entries["multi_head"]
    kinematics, counts, flags, vertex = entry.arguments({"n": 500})
    dtypes = [a.dtype for a in (kinematics, counts, flags, vertex)]
    assert dtypes == [torch.float32, torch.int32, torch.bool, torch.float64]
    energy, moved, label, keep, weight = entry.model(kinematics, counts, flags, vertex)
    assert (energy.dtype, bool((energy > 0).all())) == (torch.float32, True)
    assert moved.dtype == torch.float64
    assert 0 < (moved - vertex).abs().max() <= 0.01
    assert (label.dtype, keep.dtype, weight.dtype) == (torch.int64, torch.bool, torch.float16)
    assert len(label.unique()) == 4 and 0 < keep.sum() < 500
    assert bool(((weight >= 0) & (weight <= 1)).all())


def test_no_rounding_can_change_a_class_or_a_decision_of_the_reference(
    entries: dict[str, Entry],
) -> None:
    # Classes and decisions must agree exactly on every host: no score of the reference may lie so
    # near a border that rounding changes them.
    model = multi_head().eval().requires_grad_(False)
    assert isinstance(model, MultiHead)
    scores, decision = model.scores(*entries["multi_head"].arguments({"n": 1024}))
    best, second = scores.topk(2, dim=1).values.unbind(1)
    assert float((best - second).min()) > 1e-5 * float(scores.abs().max())
    assert float(decision.abs().min()) > 1e-5 * float(decision.abs().max())


# -- the Particle Transformer ----------------------------------------------------------------------

_FEATURES = (
    "log_pt",
    "log_energy",
    "log_pt_share",
    "log_energy_share",
    "delta_r",
    "deta",
    "dphi",
)


def jets(n: int, seed: int = 3, particles: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """features (n, 7, P), vectors (n, 4, P), exists (n, P); P of the 16 particles of each jet."""
    columns: dict[str, Any] = transformer_reference({"n": n}, seed)["jets"]
    features = torch.tensor(np.stack([columns[name] for name in _FEATURES], 1))
    vectors = torch.tensor(np.stack([columns[name] for name in ("px", "py", "pz", "energy")], 1))
    exists = torch.tensor(columns["exists"])
    return features[:, :, :particles], vectors[:, :, :particles], exists[:, :particles]


def shaken(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights with noise added, so that no parameter is still one or zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        noise = torch.rand(value.shape, generator=generator) if value.is_floating_point() else 0
        state[key] = value + noise * (1.0 if "var" in key else 0.2)
    return state


def transformer(**sizes: Any) -> ParticleTransformer:
    """A Particle Transformer with shaken weights."""
    model = particle_transformer(**sizes)
    assert isinstance(model, ParticleTransformer)
    model.load_state_dict(shaken(model, 5))
    return model.eval().requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "sizes, particles",
    [
        ({}, 16),
        ({}, 1),
        ({"heads": 2, "layers": 3, "class_layers": 2, "classes": 3}, 5),
        ({"widths": (16, 8), "pair_widths": (8, 8, 8), "layers": 1}, 11),
    ],
)
def test_with_the_same_weights_it_has_the_answers_of_weaver(
    sizes: dict[str, Any], particles: int
) -> None:
    module = pytest.importorskip("weaver.nn.model.ParticleTransformer")
    ours = transformer(**sizes)
    theirs = module.ParticleTransformer(
        input_dim=7,
        num_classes=sizes.get("classes", 10),
        embed_dims=list(sizes.get("widths", (32, 64, 32))),
        pair_embed_dims=list(sizes.get("pair_widths", (16, 16))),
        num_heads=sizes.get("heads", 4),
        num_layers=sizes.get("layers", 2),
        num_cls_layers=sizes.get("class_layers", 1),
        trim=False,
    ).eval()
    state = shaken(theirs, 8)
    theirs.load_state_dict(state)
    ours.load_state_dict(state, strict=True)  # strict: the names are the same, and each is used
    features, vectors, exists = jets(200, particles=particles)
    filled = exists.any(dim=1)  # weaver-core gives NaN for a jet without particles
    assert int((~exists[filled]).sum()) > 0 or particles == 1
    with torch.no_grad():
        single = ours.logits(features, vectors, exists)[filled]
        # In double precision: in single precision the logarithm of E^2 - p^2 magnifies rounding in
        # weaver-core's pair features (which changes its scores of these jets by up to 0.1).
        expected = theirs.double()(features.double(), vectors.double(), exists.unsqueeze(1))
        double = ours.double().logits(features.double(), vectors.double(), exists)[filled]
    assert float(expected[filled].std()) > 0.1  # the jets differ
    torch.testing.assert_close(single.double(), expected[filled], atol=1e-5, rtol=0)
    torch.testing.assert_close(double, expected[filled], atol=1e-12, rtol=0)


def test_pair_features_are_those_of_the_paper() -> None:
    # Eq. 3 of arXiv:2202.03772, by hand, of two particles at (pt, y, phi), massless.
    (pt_a, y_a, phi_a), (pt_b, y_b, phi_b) = (30.0, 0.3, 3.0), (12.0, -0.1, -3.1)
    vectors = [
        [pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(y), pt * np.cosh(y)]
        for pt, y, phi in ((pt_a, y_a, phi_a), (pt_b, y_b, phi_b))
    ]
    particles = torch.tensor(vectors, dtype=torch.float64).T.unsqueeze(0)
    features = pair_features(particles, torch.tensor([0]), torch.tensor([1]))[0, 0]
    dphi = 2 * np.pi - 6.1  # across phi = pi
    distance = np.hypot(y_a - y_b, dphi)
    mass2 = 2 * pt_a * pt_b * (np.cosh(y_a - y_b) - np.cos(dphi))
    expected = np.log([pt_b * distance, pt_b / (pt_a + pt_b), distance, mass2])
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-12)


def test_the_transformer_gives_probabilities() -> None:
    answers = transformer()(*jets(100))
    torch.testing.assert_close(answers.sum(dim=1), torch.ones(100))


def test_the_transformer_takes_particles_in_any_order() -> None:
    model, (features, vectors, exists) = transformer(), jets(100)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    answers = model(features[:, :, order], vectors[:, :, order], exists[:, order])
    torch.testing.assert_close(answers, model(features, vectors, exists), atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", [-7.0, 1.0e30, float("nan")])
def test_the_transformer_sees_no_particle_that_does_not_exist(junk: float) -> None:
    model, (features, vectors, exists) = transformer(), jets(100)
    dirty = [torch.where(exists.unsqueeze(1), values, junk) for values in (features, vectors)]
    assert torch.equal(model(*dirty, exists), model(features, vectors, exists))


def test_the_number_of_places_for_absent_particles_does_not_matter() -> None:
    """Jets with no more than 12 particles, in 16 places and in 12."""
    model, (features, vectors, exists) = transformer(), jets(100)
    short = exists[:, 12:].sum(dim=1) == 0
    answers = model(features[short, :, :12], vectors[short, :, :12], exists[short, :12])
    wanted = model(features, vectors, exists)[short]
    torch.testing.assert_close(answers, wanted, atol=1e-6, rtol=0)


# -- from end to end -------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_commits")
@pytest.mark.long  # test_hzz.py builds a config of the examples, too
@pytest.mark.parametrize(("name", "engine"), [("edge_gnn", "aoti"), ("multi_head", "onnxruntime")])
def test_a_config_of_the_zoo_is_built_and_valid(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for part in (document["model"], document["reference"]):
        if "factory" in part:
            part["factory"] = str((CONFIGS / part["factory"]).resolve())
    document["engines"], document["targets"] = [engine], [str(Target.parse("cpu"))]
    document["model"]["torchscript_route"] = "none"
    document["compile"] = {"benchmark_s": 0.1}
    if engine == "aoti":  # a process of another environment imports torch again
        # As users compile; the other tests use a lower optimization level of g++ (conftest.py).
        monkeypatch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O1")
    config = tmp_path / f"{name}.yaml"
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    result = run(config, registry, tmp_path / "work", say=print)
    (target,) = result.bundle.manifest.targets.values()
    candidate = target.candidates[engine]
    assert (candidate.status, candidate.reason, target.chosen) == ("valid", None, engine)
    assert candidate.worst.keys() == {output["name"] for output in document["outputs"]}
    assert all(deviation.outside == 0 for deviation in candidate.worst.values())
