from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError
from soa.errors import SoaPipelineError
from tests.pipeline.config import mistakes
from tests.pipeline.config.mistakes import load

FULL = (Path(__file__).parent / "full.yaml").read_text()
MINIMAL = (Path(__file__).parent / "minimal.yaml").read_text()


def refused(folder: Path, text: str) -> list[str]:
    """The problems of a config with this text, as `line: rest`."""
    return mistakes.refused(load_config, folder / "c.yaml", text)


def test_a_config_error_is_a_users_mistake() -> None:
    assert issubclass(ConfigError, SoaPipelineError)


MISTAKES = [
    ("name: jet-tagger", "name: jet tagger", 1, "name: found 'jet tagger'; allowed: letters"),
    ("name: jet-tagger\n", "", 1, "config: the key 'name' is missing"),
    ("name: jet-tagger", "name: 2024", 1, "name: found 2024; expected text (quote it)"),
    ("name: jet-tagger", "name:", 1, "name: found nothing; expected text"),
    ("description:", "descripton:", 2, "; did you mean 'description'?"),
    ("script\n", "scirpt\n", 8, "route: found 'scirpt'; allowed: auto, script,"),
    ("  factory: model.py:build\n", "", 3, "model: found none of them; give exactly one of"),
    ("  factory: model.py:build", "  program: model.pt2", 3, "model: found kwargs, weights, weig"),
    ("  weights: weights.safetensors\n", "", 3, "model: found weights_prefix without weights"),
    ("  kwargs:", "  program: model.pt2\n  kwargs:", 3, "model: found factory and program; give"),
    ("kwargs: {widths: [24, 32], dropout: 1e-3}", "kwargs: 3", 5, "found 3; expected a mapping"),
    ("model.py:build", "model.py", 4, "model.factory: found 'model.py'; write file.py:callable"),
    ("model.py:build", "nothere.py:build", 4, "nothere.py does not exist"),
    ("weights.safetensors", ".", 6, "is a folder"),
    ("weights.safetensors", "${SOA_UNSET}/w", 6, "variable SOA_UNSET is not set; set it or write"),
    ("weights.safetensors", "${1}", 6, "model.weights: found '${1}'; write ${NAME} or"),
    ("pt, dtype: float32", "pt", 12, "jets.columns[0]: the key 'dtype' is missing"),
    ("pt, dtype: float32", "p-t, dtype: float32", 12, "columns[0].name: found 'p-t'; allowed: le"),
    ("pt, dtype: float32", "pt, dtype: int8, opaque: 3", 12, "found both dtype and opaque"),
    (
        "pt, dtype: float32",
        "pt, opaque: 12",
        24,
        "inputs[0]: block 'features' names 'pt', which is",
    ),
    ("pt, dtype: float32", "pt, dtype: uint64", 24, "block 'features' names 'pt', which is uint64"),
    ("eigen: [3]", "eigen: 3", 13, "columns[1].eigen: found 3; expected a list"),
    ("eigen: [3]", "eigen: []", 13, "columns[1].eigen: found no entry; expected at least 1"),
    ("eigen: [3]", "eigen: [3.0]", 13, "columns[1].eigen[0]: found 3.0; expected a whole number"),
    ("[2, 3]}", "[2, 3, 4]}", 14, "columns[2].eigen: found 3 entries; expected at most 2"),
    ("scalar: true", "scalar: yes", 15, "scalar: found 'yes'; expected true or false"),
    ("scalar: true", "scalar: true, eigen: [2]", 15, "columns[3]: found both eigen and scalar"),
    ("alignment: 64", "alignment: 48", 10, "collections.jets: alignment 48 is not a power of two"),
    ("    rows: n", "    rows: m", 18, "collections.jets.rows: 'rows' has no range for it: found"),
    (
        "inputs:\n",
        "  more: {columns: [{name: x, dtype: int8}]}\ninputs:\n",
        1,
        "config: collection 'more' has no block",
    ),
    ("[pt, dir]", "[pt, dri]", 24, "inputs[0].columns[1]: found 'dri'; allowed: pt, dir,"),
    ("shape: [2, 2]", "shape: [5]", 24, "inputs[0]: block 'features': shape [5] does not hold"),
    ("name: run\n", "name: probabilities\n", 1, "config: two blocks are called 'probabilities'"),
    ("rtol: 1e-4", 'rtol: "1e-4"', 33, "found '1e-4'; expected a number (without quotes)"),
    ("rtol: 1e-4", "rtol: .inf", 33, "rtol: found Infinity; expected a finite number"),
    ("[p_qcd, p_top]", "[p_top]", 34, "classifier: found true; a classifier has two or more"),
    ("max: 4096", 'max: "64"', 36, "rows.n.max: found '64'; expected a whole number (without"),
    ("max: 4096", "max: 1", 36, "rows.n.max: found 1; it should be greater than or equal to 2"),
    ("max: 4096", "max: 999", 36, "rows.n: typical n 1000 lies outside 1 … 999"),
    ("min: 1", "min: 5000", 36, "rows.n: rows from 5000 to 4096 is not a range"),
    (
        "  n: {",
        "  m: {min: 0, max: 9, typical: [1]}\n  n: {",
        36,
        "rows.m: no collection has these",
    ),
    ("[20, 500.0]", "[20]", 39, "reference.ranges.pt: found 1 entry; expected 2"),
    ("[20, 500.0]", "[]", 39, "reference.ranges.pt: found 0 entries; expected 2"),
    ("[20, 500.0]", "[1, 2, 3]", 39, "reference.ranges.pt: found 3 entries; expected at most 2"),
    ("[20, 500.0]", "[500, 20]", 39, "found [500.0, 20.0]; expected [low, high]"),
    ("{pt: [20", "{pT: [20", 39, "not a column of an input collection: found 'pT'; all"),
    ("seed: 7", "factory: data.py:make", 37, "reference: found ranges and a factory; a factory"),
    ("cuda/sm_90a", "cuda/90", 40, "targets[2]: unknown target 'cuda/90': use cpu, cpu/"),
    ("cuda/sm_90a", "cpu", 40, "targets: found 'cpu' a second time"),
    ("timeout_s: 60", "timeout_s: [60]", 42, "compile.timeout_s: found a list; expected a number"),
    ("[cpu/x86-64-v3]", "[gpu]", 46, "gates.required_targets[0]: unknown target 'gpu': use cp"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "says"), MISTAKES, ids=[new.strip() for _, new, *_ in MISTAKES]
)
def test_a_mistake_is_named_with_its_line(
    folder: Path, old: str, new: str, line: int, says: str
) -> None:
    assert FULL.count(old) == 1, f"{FULL.count(old)} places"
    problems = refused(folder, FULL.replace(old, new))
    assert any(p.startswith(f"{line}: ") and says in p for p in problems), problems


@pytest.mark.parametrize("text", ["1.5", "e", "..", "-"])
def test_without_its_quotes_this_text_is_no_whole_number_either(folder: Path, text: str) -> None:
    (problem,) = refused(folder, FULL.replace("max: 4096", f'max: "{text}"'))
    assert text in problem
    assert "without quotes" not in problem


def test_all_mistakes_are_listed_in_the_order_of_the_file(folder: Path) -> None:
    text = FULL.replace("max: 4096", "max: many").replace("model:", "modle:")
    assert refused(folder, text) == [
        "1: config: the key 'model' is missing",
        "3: modle: unknown key; allowed: name, description, model, collections, inputs, outputs, "
        "rows, reference, targets, engines, precision, compile, gates, session, apply; did you "
        "mean 'model'?",
        "36: rows.n.max: found 'many'; expected a whole number",
    ]


def test_mistakes_between_parts_are_listed_together(folder: Path) -> None:
    text = (
        FULL.replace("[pt, dir]", "[pt, x]")
        .replace("weights.s", "w.s")
        .replace("n: 1,", "n: 9999,")
    )
    assert [p.split(":")[0] for p in refused(folder, text)] == ["6", "24", "36"]


def test_a_collection_may_be_called_like_a_key_of_ours(folder: Path) -> None:
    """Hints for an unknown key depend on its place in the config, not only on names."""
    text = MINIMAL.replace("  c: {", "  columns: {alignmet: 8, ").replace("n: c,", "n: columns,")
    [problem] = refused(folder, text)
    assert problem.startswith("4: collections.columns.alignmet: unknown key; allowed: columns, ")
    assert problem.endswith("did you mean 'alignment'?")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("columns: [y]", "columns: [x]", "1: config: column 'x' of 'c' is an input and an output"),
        ("columns: [x]", "columns: [x, x]", "5: inputs[0]: block 'i' names column 'x' twice"),
        ("name: x, dtype: float32", "name: y, dtype: int8", "4: collections.c: column 'y' is decl"),
    ],
)
def test_what_a_signature_refuses_has_its_place(
    folder: Path, old: str, new: str, says: str
) -> None:
    assert refused(folder, MINIMAL.replace(old, new))[0].startswith(says)


def test_columns_of_several_dtypes_need_the_dtype_of_the_block(folder: Path) -> None:
    mixed = MINIMAL.replace("[x]", "[x, z]").replace(
        "columns: [{", "columns: [{name: z, dtype: int8}, {"
    )
    [problem] = refused(folder, mixed)
    assert problem.startswith("5: inputs[0]: block 'i' has columns of float32, int8")
    config = load(folder, mixed.replace("[x, z]", "[x, z], dtype: float32"))
    assert config.inputs[0].dtype == "float32"


def test_opaque_and_64_bit_columns_are_carried_in_memory(folder: Path) -> None:
    """A model reads neither, but each has its place in a buffer with an alignment of 128."""
    carried = "columns: [{name: hit, opaque: 12}, {name: id, dtype: uint64}, {"
    layout = load(folder, MINIMAL.replace("columns: [{", carried)).signature().layouts["c"]
    assert [c.dtype for c in layout.columns[:2]] == ["opaque12", "uint64"]
    assert layout.nbytes(1) == 128 * len(layout.columns)


@pytest.mark.parametrize(("storage", "alignment"), [("buffer", 128), ("columns", 1)])
def test_the_alignment_of_each_storage(folder: Path, storage: str, alignment: int) -> None:
    text = MINIMAL.replace("  c: {", f"  c: {{storage: {storage}, ")
    assert load(folder, text).signature().layouts["c"].alignment == alignment


PREPROCESS = """
name: tiny
model: {program: model.pt2}
collections:
  c:
    columns:
      - {name: x, dtype: float32}
      - {name: v, dtype: float32, eigen: [4]}
      - {name: w, dtype: float32, eigen: [4]}
      - {name: k, dtype: int32}
      - {name: s, dtype: float32, scalar: true}
      - {name: m, dtype: float32, eigen: [2, 2]}
      - {name: y, dtype: float32}
inputs:
  - name: i
    collection: c
    columns: [x, v, w]
    preprocess:
      exists: v
      pad: -1.0
      features:
        - v
        - [v, log, {standardise: [1.5, 2]}, {clip: [-5, 5]}, {above: 0}]
        - [v, {ratio: x}, {add: [w, square, {multiply: 2.0}]}, sqrt]
outputs: [{name: o, collection: c, columns: [y]}]
rows: {n: {max: 16, typical: [4]}}
"""
_AT = "inputs[0].preprocess"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("exists: v", "exists: q", 19, "exists: found 'q'; allowed: x, v, w"),
        ("pad: -1.0", "pad: .nan", 20, "pad: found NaN; expected a finite number"),
        ("        - v\n", "        - q\n", 22, "features[0]: found 'q'; allowed: x, v, w"),
        ("        - v\n", "        - 3\n", 22, "found 3; expected a column, or [column, oper"),
        ("        - v\n", "        - [log, v]\n", 22, "features[0][0]: found 'log'; allowed: x"),
        ("[v, log,", "[v, lgo,", 23, "features[1][1]: found 'lgo'; allowed: log,"),
        ("[v, log,", "[v, {log: 2},", 23, "found 1 number for log; expected none"),
        ("[v, log,", "[v, 2,", 23, "features[1][1]: found 2; expected one operation, such as"),
        ("[1.5, 2]", "[1.5]", 23, "found 1 number for standardise; expected [centre, scale]"),
        ("[1.5, 2]", "[1.5, 0]", 23, "standardise: found scale 0, which would make every"),
        ("[1.5, 2]", "[1.5, .inf]", 23, "standardise[1]: found Infinity; expected a finite numb"),
        ("[-5, 5]", "[5, -5]", 23, "features[1][3].clip: found low 5 above high -5"),
        ("{clip: [-5, 5]}", "clip", 23, "found 0 numbers for clip; expected [low, high]"),
        ("above: 0", "above: true", 23, "above[0]: found true; expected a finite number"),
        ("ratio: x", "ratio: y", 24, "features[2][1].ratio: found 'y'; allowed: x, v, w"),
        ("{ratio: x}", "ratio", 24, "found ratio alone; write ratio: with a column or a number"),
        ("    preprocess:", "    shape: [3, 3]\n    preprocess:", 19, "found a shape too; the mo"),
        (
            "[x, v, w]",
            "[x, v, w, k]\n    dtype: int32",
            19,
            "found columns of int32; say 'dtype:",
        ),
        ("[x, v, w]", "[x, v, w, m]", 18, "found Eigen columns of [2, 2] and [4]; they have one"),
        ("[x, v, w]", "[s]", 18, "found a block of scalars; only columns are preprocessed"),
    ],
)
def test_a_mistake_in_an_expression_is_named_with_its_place(
    folder: Path, old: str, new: str, line: int, says: str
) -> None:
    assert PREPROCESS.count(old) == 1, f"{PREPROCESS.count(old)} places"
    assert load(folder, PREPROCESS)
    problems = refused(folder, PREPROCESS.replace(old, new))
    assert any(p.startswith(f"{line}: {_AT}") and says in p for p in problems), problems


def test_an_output_is_not_preprocessed(folder: Path) -> None:
    [problem] = refused(folder, MINIMAL.replace("[y]}]", "[y], preprocess: {features: [y]}}]"))
    assert "outputs[0].preprocess: unknown key" in problem


JAGGED = (Path(__file__).parent / "jagged.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rows: n, length", "rows: m, length", "8: collections.jets.jagged.rows: 'rows' has"),
        ("rows: n, length", "rows: jet, length", "1: config: jagged collection 'jets' needs"),
        ("  out: {", "  jets_offsets: {", "4: collections.jets: its offsets are 'jets_offsets"),
        ("[16, 2]", "[2, 16]", "11: inputs[0].shape: found [2, 16]; expected [16, 2], or none"),
        ("columns: [pt], p", "columns: [pt], shape: [2], p",
         "13: inputs[2].shape: found [2]; expected [16, 1] or [16], or none"),
        ("mask: true", "mask: true, shape: [2, 9]", "12: inputs[1].shape: found [2, 9]"),
        ("mask: true", "mask: true, pad: 1", "12: inputs[1]: found a mask with columns,"),
        ("mask: true", "mask: false", "12: inputs[1]: the key 'columns' is missing"),
        ("mask, collection: jets", "mask, collection: out", "12: inputs[1].mask: collection 'out'"),
        ("[run]}", "[run], pad: 1}", "14: inputs[3].pad: collection 'jets' is not jagged: nothing"),
    ],
)  # fmt: skip
def test_a_mistake_with_jagged_rows_has_its_place(
    folder: Path, old: str, new: str, says: str
) -> None:
    assert JAGGED.count(old) == 1, f"{JAGGED.count(old)} places"
    problems = refused(folder, JAGGED.replace(old, new))
    assert any(p.startswith(says) for p in problems), problems
