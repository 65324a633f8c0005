from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engines
from pipeline.config import Config, load_config, source_of
from pipeline.config.yaml_lines import CoreLoader
from pipeline.errors import ConfigError
from registry.ref import NAME_PATTERN
from tests.models.signatures import problems
from tests.pipeline.config.mistakes import load

FULL = (Path(__file__).parent / "full.yaml").read_text()
MINIMAL = (Path(__file__).parent / "minimal.yaml").read_text()


def test_the_model_of_a_config(folder: Path) -> None:
    config = load(folder, FULL)
    assert config.name == "jet-tagger"
    assert config.model.kwargs == {"widths": [24, 32], "dropout": 0.001}
    assert config.model.torchscript_route == "script"


def test_the_collections_of_a_config(folder: Path) -> None:
    config = load(folder, FULL)
    assert list(config.collections) == ["jets", "tags"]
    jets = config.collections["jets"]
    assert [c.eigen for c in jets.columns] == [None, (3,), (2, 3), None]
    assert [c.scalar for c in jets.columns] == [False, False, False, True]
    assert (jets.alignment, jets.storage, jets.rows) == (64, "columns", "n")


def test_the_blocks_of_a_config(folder: Path) -> None:
    config = load(folder, FULL)
    assert (config.inputs[0].shape, config.inputs[0].dtype) == ((2, 2), "float16")
    tolerance = config.outputs[0].tolerance
    assert tolerance is not None
    assert (tolerance.atol, tolerance.rtol) == (1e-5, 1e-4)


def test_how_a_config_is_built(folder: Path) -> None:
    config = load(folder, FULL)
    assert config.rows["n"].typical == (10, 1000)
    assert config.reference.ranges == {"pt": (20.0, 500.0)}
    assert config.compile.timeout_s == 60.0
    assert (config.session.threads, config.session.instances) == (2, 8)


def test_the_gates_of_a_config(folder: Path) -> None:
    gates = load(folder, FULL).gates
    assert (gates.required_targets, gates.max_outside) == (("cpu/x86-64-v3",), 1e-6)


def test_a_config_that_names_no_targets_and_engines(folder: Path) -> None:
    config = load(folder, MINIMAL)
    assert (config.targets, config.engines) == (("cpu",), engines.DEFAULT_ENGINES)
    assert "tensorrt" not in config.engines


def test_defaults_of_memory_and_rows(folder: Path) -> None:
    config = load(folder, MINIMAL)
    assert config.collections["c"].layout().alignment == 128
    assert config.collections["c"].storage == "buffer"
    assert config.rows["n"].min == 0


def test_defaults_of_gates_and_sessions(folder: Path) -> None:
    config = load(folder, MINIMAL)
    assert config.outputs[0].tolerance is None
    assert (config.gates.max_slowdown, config.gates.max_outside) == (1.1, 0.0)
    assert config.gates.required_targets is None
    assert (config.session.threads, config.session.instances) == (1, None)
    assert config.reference.seed == 1


@pytest.fixture
def nested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config in a folder below its files, as named from the working folder.

    Its weights are in the folder of the variable WHERE, or else beside the model.
    """
    (folder / "configs").mkdir()
    text = FULL.replace("model.py", "../model.py").replace("weights.s", "${WHERE:-..}/weights.s")
    text = text.replace("  ranges: {pt: [20, 500.0]}", "  factory: ../data.py:make")
    (folder / "configs" / "c.yaml").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WHERE", raising=False)
    return "configs/c.yaml"


def test_files_are_found_from_the_configs_folder(folder: Path, nested: str) -> None:
    config = load_config(nested)
    source = source_of(config)
    assert source.factory == f"{folder / 'model.py'}:build"
    assert source.weights == folder / "weights.safetensors"
    assert source.program is None
    assert config.factory(config.reference.factory or "") == f"{folder / 'data.py'}:make"


def test_a_variable_in_a_path_is_replaced_when_the_file_is_looked_for(
    folder: Path, nested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config itself keeps the variable, so that its digest is the same on every host."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "weights.safetensors").touch()
    monkeypatch.setenv("WHERE", str(folder / "elsewhere"))
    config = load_config(nested)
    assert source_of(config).weights == folder / "elsewhere" / "weights.safetensors"
    assert config.model.weights == "${WHERE:-..}/weights.safetensors"


def test_an_empty_variable_has_the_default(
    folder: Path, nested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "")
    assert source_of(load_config(nested)).weights == folder / "weights.safetensors"


@pytest.mark.parametrize(
    ("kind", "file"),
    [("program", "model.pt2"), ("torchscript", "model.ts"), ("onnx", "model.pt2"),
     ("trees", "model.pt2")],
)  # fmt: skip
def test_a_file_as_the_source_of_a_model(folder: Path, kind: str, file: str) -> None:
    config = load(folder, MINIMAL.replace("program: model.pt2", f"{kind}: {file}"))
    assert getattr(source_of(config), kind) == folder / file


def test_a_module_as_the_source_of_a_model_is_not_a_file(folder: Path) -> None:
    config = load(folder, MINIMAL.replace("program: model.pt2", "factory: 'pkg.mod:build'"))
    assert source_of(config).factory == "pkg.mod:build"


LINES = MINIMAL.splitlines(keepends=True)


@pytest.mark.parametrize(
    "text",
    [
        "# a comment\n" + MINIMAL,
        MINIMAL + "targets: [cpu]\n",  # a default, written out
        "".join([*sorted(LINES[4:]), *LINES[:4]]),
        yaml.safe_dump(yaml.load(MINIMAL, CoreLoader), default_flow_style=True),
    ],
    ids=["comment", "default", "other order", "other style"],
)
def test_the_same_config_in_other_words_has_the_same_digest(folder: Path, text: str) -> None:
    digest = load(folder, MINIMAL).digest()
    assert len(digest) == 64
    assert load(folder, text).digest() == digest


def test_the_digest_is_not_of_the_folder_and_its_files(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "model.pt2").write_text("not the same")
    assert load(other, MINIMAL).digest() == load(folder, MINIMAL).digest()


@pytest.mark.parametrize(
    ("old", "new"), [("max: 16", "max: 17"), ("[4]", "[5]"), ("name: tiny", "name: tinny")]
)
def test_another_value_has_another_digest(folder: Path, old: str, new: str) -> None:
    assert load(folder, MINIMAL.replace(old, new)).digest() != load(folder, MINIMAL).digest()


def test_the_digest_counts_the_order_of_collections(folder: Path) -> None:
    def ordered(*names: str) -> str:
        collections = "".join(f"  {c}: {{columns: [{{name: {c}, dtype: int8}}]}}\n" for c in names)
        return (
            f"name: t\nmodel: {{program: model.pt2}}\ncollections:\n{collections}"
            "inputs: [{name: i, collection: a, columns: [a]}]\n"
            "outputs: [{name: o, collection: b, columns: [b]}]\n"
            "rows: {n: {max: 16, typical: [4]}}\n"
        )

    assert load(folder, ordered("a", "b")).digest() != load(folder, ordered("b", "a")).digest()


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import pipeline.config, sys\n"
        "heavy = {'torch', 'mlflow', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


class CoreDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as another type."""


CoreDumper.yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configs with any signature."""
    signature = draw(problems()).signature.to_dict()

    def column(stored: dict[str, Any]) -> dict[str, Any]:
        kinds = {"scalar": {"scalar": True}, "eigen": {"eigen": stored["shape"]}}
        kind = kinds.get(stored["kind"], {})
        return {"name": stored["name"], "dtype": stored["dtype"], **kind}

    def blocks(role: str) -> list[dict[str, Any]]:
        keys = ("name", "collection", "columns", "dtype", "shape", "broadcast")
        return [{k: b[k] for k in keys if b.get(k) is not None} for b in signature[role]]

    tolerance = {name: draw(st.floats(0, 1e6)) for name in ("atol", "rtol")}
    collections: dict[str, Any] = signature["collections"]
    return {
        "name": draw(st.from_regex(NAME_PATTERN, fullmatch=True)),
        "description": draw(st.text()),
        "model": {"factory": "m.n:f", "kwargs": draw(st.dictionaries(st.text(), plain_values))},
        "collections": {
            name: {**stored, "columns": [column(entry) for entry in stored["columns"]]}
            for name, stored in collections.items()
        },
        "inputs": blocks("inputs"),
        "outputs": [{**block, "tolerance": tolerance} for block in blocks("outputs")],
        "rows": {"n": {"min": 0, "max": 100, "typical": [draw(st.integers(0, 100))]}},
        "gates": {"max_slowdown": draw(st.floats(1, 1e6))},
    }


def as_yaml(value: Any) -> Any:
    """A dumped model with lists in place of tuples, as YAML has them."""
    if isinstance(value, dict):
        return {key: as_yaml(inner) for key, inner in value.items()}
    return [as_yaml(inner) for inner in value] if isinstance(value, list | tuple) else value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=configs(), flow=st.booleans())
def test_a_valid_config_survives_the_way_through_yaml(
    folder: Path, data: dict[str, Any], flow: bool
) -> None:
    text = yaml.dump(data, Dumper=CoreDumper, default_flow_style=flow, sort_keys=False)
    config = load(folder, text)
    assert config.model_dump() == Config.model_validate(data).model_dump()
    assert as_yaml(config.model_dump(exclude_unset=True)) == data
    assert config.digest() == Config.model_validate(data).digest()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=configs(), random=st.randoms(use_true_random=False))
def test_an_unknown_key_anywhere_is_found_on_its_line(
    folder: Path, data: dict[str, Any], random: Any
) -> None:
    mappings = [data, data["model"], data["gates"], *data["rows"].values(), *data["inputs"]]
    for collection in data["collections"].values():
        mappings += [collection, *collection["columns"]]
    random.choice(mappings)["unheard_of"] = 1
    # Without free text, which may hold line breaks that only splitlines counts.
    data["description"] = ""
    data["model"]["kwargs"] = {}
    text = yaml.dump(data, Dumper=CoreDumper, default_flow_style=False, sort_keys=False)
    lines = [i for i, line in enumerate(text.splitlines(), 1) if "unheard_of: 1" in line]
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    [problem] = caught.value.problems
    assert problem.startswith(f"{folder / 'c.yaml'}:{lines[0]}: ")
    assert "unheard_of: unknown key" in problem
