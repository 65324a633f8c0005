"""A config is translated into the arguments of the stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config, assemble, load_config
from runtime.checked import default_tolerance
from soa.signature import RowRange, offsets_layout
from stages.errors import ReferenceDataError
from stages.model.fronts.expressions import Expression, Features, Operation
from stages.model.fronts.padding import Padding
from stages.reference.answers import Arrays

CONFIG = """
name: hits
model: {factory: model.py:build, kwargs: {a: 1}, weights: weights.safetensors}
collections:
  hits:
    alignment: 64
    columns:
      - {name: e, dtype: float32}
      - {name: dir, dtype: float32, eigen: [3]}
      - {name: cov, dtype: float32, eigen: [2, 2]}
      - {name: layer, dtype: uint16}
      - {name: run, dtype: uint32, scalar: true}
  scores:
    storage: columns
    columns:
      - {name: s, dtype: float16}
      - {name: id, dtype: int32}
      - {name: p, dtype: float32}
      - {name: q, dtype: float32}
inputs:
  - {name: all, collection: hits, columns: [cov, e, layer], dtype: float32, shape: [2, 3]}
  - {name: run, collection: hits, columns: [run], dtype: float32}
outputs:
  - {name: score, collection: scores, columns: [s]}
  - {name: id, collection: scores, columns: [id]}
  - name: p
    collection: scores
    columns: [p, q]
    tolerance: {atol: 0.5, rtol: 0.25}
    classifier: true
rows: {n: {min: 1, max: 50, typical: [10, 20]}}
reference: {factory: data.py:reference, seed: 7}
targets: [cpu, cpu/x86-64-v2, cpu/x86-64-v3]
gates: {max_outside: 0.125}
"""


@pytest.fixture
def config(folder: Path) -> Config:
    """The config above."""
    return write(folder, CONFIG)


def write(folder: Path, text: str) -> Config:
    """Writes a config and reads it."""
    (folder / "c.yaml").write_text(text)
    return load_config(folder / "c.yaml")


def test_collections_of_a_config_become_layouts(config: Config) -> None:
    signature = config.signature()
    hits = signature.layouts["hits"]
    assert [(c.name, c.dtype, c.kind, c.shape) for c in hits.columns] == [
        ("e", "float32", "column", ()),
        ("dir", "float32", "eigen", (3,)),
        ("cov", "float32", "eigen", (2, 2)),
        ("layer", "uint16", "column", ()),
        ("run", "uint32", "scalar", ()),
    ]
    assert (hits.alignment, hits.storage) == (64, "buffer")
    assert signature.layouts["scores"].storage == "columns"


def test_inputs_and_outputs_of_a_config_become_blocks(config: Config) -> None:
    signature = config.signature()
    features, run = signature.inputs
    assert features.block.columns == ("cov", "e", "layer")
    assert features.shape(5) == (5, 2, 3)
    assert run.plan.kind == "scalars"
    assert [bound.name for bound in signature.outputs] == ["score", "id", "p"]


def test_rows_of_a_config_become_ranges(config: Config) -> None:
    signature = config.signature()
    assert dict(signature.ranges) == {"n": RowRange(1, 50, (10, 20))}


def test_a_source_has_absolute_paths(config: Config, folder: Path) -> None:
    source = assemble.source_of(config)
    assert source.factory == f"{folder}/model.py:build"
    assert source.weights == folder / "weights.safetensors"
    assert source.kwargs == {"a": 1}


def test_expressions_become_what_the_model_is_built_with(folder: Path) -> None:
    old = "dtype: float32, shape: [2, 3]}"
    new = "dtype: float32, preprocess: {exists: e, pad: -1, features: FEATURES}}"
    features = "[cov, [cov, log, {clip: [-5, 5]}, {ratio: e}], [e, {add: [cov, {above: 0}]}]]"
    config = write(folder, CONFIG.replace(old, new.replace("FEATURES", features)))
    ratio = Operation("ratio", operand=Expression("e"))
    above = Expression("cov", (Operation("above", (0.0,)),))
    expressions = (
        Expression("cov"),
        Expression("cov", (Operation("log"), Operation("clip", (-5.0, 5.0)), ratio)),
        Expression("e", (Operation("add", operand=above),)),
    )
    columns = (("cov", (2, 2)), ("e", ()), ("layer", ()))
    preprocess = assemble.source_of(config).preprocess
    assert preprocess == (Features(columns, expressions, "e", -1.0), None)


def test_without_expressions_a_model_is_built_as_before_there_were_any(config: Config) -> None:
    """Its fingerprint has no such key, so that earlier results of stages are used."""
    source = assemble.source_of(config)
    assert source.preprocess == (None, None)
    assert "preprocess" not in source.fingerprint()


def test_tolerances_are_the_configs_else_the_dtypes(config: Config) -> None:
    tolerances = assemble.tolerances_of(config, config.signature())
    half, integer, configured = tolerances["score"], tolerances["id"], tolerances["p"]
    default = default_tolerance("float16")
    assert (half.atol, half.rtol) == (default.atol, default.rtol)
    assert half.atol > 0
    assert (integer.atol, integer.rtol) == (0.0, 0.0)
    assert (configured.atol, configured.rtol) == (0.5, 0.25)
    assert {tolerance.max_outside for tolerance in tolerances.values()} == {0.125}


DATA = """
import numpy as np

def reference(rows, seed):
    n = rows["n"]
    return {"hits": {
        "e": np.full(n, seed, np.float32),
        "dir": np.zeros((n, 3), np.float32),
        "cov": np.zeros((n, 2, 2), np.float32),
        "layer": np.arange(n, dtype=np.uint16),
        "run": np.array(3, np.uint32),
    }}
"""


def reference(folder: Path, data: str) -> Arrays:
    """The inputs from a module of the user with this text.

    It needs a new folder each time, as a process imports a file only once.
    """
    (folder / "data.py").write_text(data)
    config = write(folder, CONFIG)
    return assemble.reference_inputs(config, config.signature())


def test_a_function_of_the_user_gives_the_reference(folder: Path) -> None:
    hits = reference(folder, DATA)["hits"]
    assert hits["e"].tolist() == [7.0] * 50
    assert hits["cov"].shape == (50, 2, 2)
    assert hits["layer"].tolist() == list(range(50))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("np.float32)", "np.float64)", r"hits\.e is torch\.float64, the layout says float32"),
        ("n = rows", "n = 3 + rows[1]", "reference failed: KeyError: 1"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    folder: Path, old: str, new: str, text: str
) -> None:
    with pytest.raises(ReferenceDataError, match=text) as caught:
        reference(folder, DATA.replace(old, new, 1))
    assert "\n" not in str(caught.value)


def drawn(folder: Path, settings: str) -> list[float]:
    """The column `e` of a random reference with these settings."""
    config = write(folder, CONFIG.replace("{factory: data.py:reference, seed: 7}", settings))
    return list(assemble.reference_inputs(config, config.signature())["hits"]["e"].tolist())


def test_a_random_reference_follows_the_seed(folder: Path) -> None:
    first = drawn(folder, "{seed: 1}")
    assert first == drawn(folder, "{seed: 1}")
    assert first != drawn(folder, "{seed: 2}")


def test_a_random_reference_lies_in_the_ranges(folder: Path) -> None:
    assert all(20 <= e <= 30 for e in drawn(folder, "{ranges: {e: [20.0, 30.0]}}"))


JAGGED = (Path(__file__).parent / "jagged.yaml").read_text()


def test_jagged_blocks_become_items_and_offsets(folder: Path) -> None:
    signature = write(folder, JAGGED).signature()
    assert [(b.name, b.rows, b.plan.feature_shape) for b in signature.inputs] == [
        ("features", "jet", (2,)),
        ("logs", "jet", (1,)),
        ("run", "jet", (1,)),
        ("jets_offsets", "n", (2,)),
    ]
    assert signature.jagged == {"jets": 16}
    assert signature.layouts["jets_offsets"] == offsets_layout("int32")


def test_jagged_blocks_are_padded_before_the_model(folder: Path) -> None:
    source = assemble.source_of(write(folder, JAGGED))
    assert source.padding == (
        Padding(3, 16, 0, -1.0, (16, 2)),
        Padding(3, 16, None),
        Padding(3, 16, 1, 7.0),
        2,
    )
    assert [block is not None for block in source.preprocess] == [False, True, False, False]
    assert source.fingerprint()["padding"]


def test_a_model_without_jagged_blocks_has_no_padding_in_its_fingerprint(config: Config) -> None:
    assert "padding" not in assemble.source_of(config).fingerprint()


def test_one_jagged_column_may_have_the_shape_of_its_items(folder: Path) -> None:
    config = write(folder, JAGGED.replace("columns: [pt], p", "columns: [pt], shape: [16], p"))
    assert assemble.source_of(config).padding[2] == Padding(3, 16, 1, 7.0, (16,))
