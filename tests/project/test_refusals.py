"""Each refusal has its own code and a section on the page, and its mistake raises it."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

import pipeline
from engines import Executable, engine
from engines.target import Target
from pipeline.config import load_config
from pipeline.errors import DataError
from registry import Manifest, Ref
from registry.bundle import Bundle, seal
from registry.promotion import Decision, PromotionRefused
from registry.store import Registry
from runtime.checked import Tolerance
from runtime.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.errors import SoaPipelineError, needs_extra
from soa.records import as_record
from soa_pipeline import PACKAGES
from stages.judging.validate import validate_session
from stages.reports import ValidationReport
from tests.models import rogues
from tests.models.building import JETS, TAGS, mlp_signature
from tests.models.bundles import manifest_data, provable, write_bundle
from tests.models.our_modules import modules
from tests.models.project import answer, cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/refusals.md").read_text()
ANYWHERE = {"missing-library", "disk", "port"}  # raised with exceptions of several classes


def classes(root: type[SoaPipelineError] = SoaPipelineError) -> Iterator[type[SoaPipelineError]]:
    """The exception classes of our packages, without those that other tests define."""
    if root.__module__.partition(".")[0] in PACKAGES:
        yield root
    for subclass in root.__subclasses__():
        yield from classes(subclass)


@cache
def nodes() -> list[ast.AST]:
    """The syntax of our packages."""
    return [node for _, tree in modules() for node in ast.walk(tree)]


for _package in PACKAGES:
    if (ROOT / _package / "errors.py").is_file():
        importlib.import_module(f"{_package}.errors")
CPP = (ROOT / "engines/native/include/soa_error.hpp").read_text()
CPP_CODES = re.findall(r'\b\w+\{"([a-z-]+)", SOA_\w+\}', CPP)
CPP_ALONE = {"header"}
"""The codes that Python does not have."""
CLASSES = {error.__name__: error for error in classes()}


def codes() -> Iterator[str]:
    """Every code: of a class, of a `raise`, of a verdict, of a gate."""
    yield from (str(error.code) for error in CLASSES.values())
    for node in nodes():
        if isinstance(node, ast.keyword) and node.arg == "code" and text_of(node.value):
            yield text_of(node.value)
        elif text_of(node).startswith("candidate-"):
            yield text_of(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Decision", "Measured"):
            gate = text_of(node.args[0]) if node.args else ""
            if gate:
                yield Decision(gate, False, "", "", "").code
    yield from ANYWHERE
    yield from CPP_ALONE


def text_of(node: ast.AST) -> str:
    """The text of a literal; of all other syntax, an empty one."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_each_class_has_a_code_of_its_own() -> None:
    assert all("code" in vars(error) for error in CLASSES.values())
    assert len({error.code for error in CLASSES.values()}) == len(CLASSES) > 40


def test_a_more_special_code_begins_with_that_of_its_class() -> None:
    checked = 0
    for node in nodes():
        call = node.exc if isinstance(node, ast.Raise) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        for code in (text_of(word.value) for word in call.keywords if word.arg == "code"):
            if code not in ("", *ANYWHERE):
                assert code.startswith(f"{CLASSES[call.func.id].code}-"), code
                checked += 1
    assert checked > 40


def test_each_code_has_one_section_and_each_section_is_of_a_code() -> None:
    sections = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert Counter(sections) == Counter(set(codes()))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", section) for section in sections)


def test_each_section_has_an_example_and_what_to_do() -> None:
    for section in PAGE.split("\n### ")[1:]:
        code, text = section.split("\n", 1)
        assert f"[{code}]\n```" in text, f"the example of {code}"
        assert "**Do**: " in text, code


def test_cpp_has_one_table_with_codes_of_python() -> None:
    assert len(CPP_CODES) == len(set(CPP_CODES)) > 20
    assert len(CPP_CODES) == CPP.count(", SOA_")
    assert CPP_ALONE <= set(CPP_CODES) <= set(codes())


def test_cpp_throws_only_refusals_of_its_table() -> None:
    native = ROOT / "engines/native"
    for file in (*native.rglob("*.h"), *native.rglob("*.hpp"), *native.rglob("*.cpp")):
        for thrown in re.findall(r"throw \w*Error\(.*?\);", file.read_text(), re.DOTALL):
            assert "refusal" in thrown, (file, thrown)


# -- each mistake raises its code ----------------------------------------------------------------


class Nothing(Executable):
    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Does nothing: no test calls it."""


SESSION = Session(mlp_signature(100, (), 2), Nothing())


def bind(jets: object, tags: object = None) -> None:
    SESSION.bind(jets, Collection(TAGS, 5) if tags is None else tags)  # type: ignore[arg-type]


def other_jets(**changes: str) -> Collection:
    """A collection with some columns added or changed: `name=dtype`."""
    dtypes = {jet.name: jet.dtype for jet in JETS.columns} | changes
    return Collection(Layout([column(name, dtype) for name, dtype in dtypes.items()]), 5)


def read_only() -> Collection:
    buffer = np.zeros(TAGS.nbytes(5) + 128, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 128 :][: TAGS.nbytes(5)]
    buffer.flags.writeable = False
    return Collection.wrap(TAGS, buffer, 5)


def bind_overlapping() -> None:
    """Bind two collections in the same bytes."""
    memory = np.zeros(max(JETS.nbytes(5), TAGS.nbytes(5)) + 128, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :]
    bind(
        Collection.wrap(JETS, memory[: JETS.nbytes(5)], 5),
        Collection.wrap(TAGS, memory[: TAGS.nbytes(5)], 5),
    )


def import_missing() -> None:
    with needs_extra("data", DataError):
        import a_library_that_nobody_has  # type: ignore[import-not-found] # noqa: F401


def load_changed(folder: Path, change: Callable[[Path], object]) -> None:
    """Write a bundle, change it, and load it."""
    write_bundle(folder / "bundle", as_record(Manifest, provable(manifest_data())))
    change(folder / "bundle")
    pipeline.load(folder / "bundle")


def make_newer(bundle: Path) -> None:
    """Give the bundle a format that only a later release knows."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    seal(bundle)


def refused_by(gate: str) -> None:
    raise PromotionRefused("jets/1", [Decision(gate, False, "no", "yes", "because")])


# By code.
MISTAKES: dict[str, Callable[[Path], object]] = {
    "layout": lambda _: column("jet pt", "float32"),
    "collection": lambda _: Collection(JETS, 5, capacity=4),
    "block": lambda _: Signature.build(
        {"jets": JETS, "tags": TAGS},
        [Block("x", "jets", ("nothing",))],
        [Block("y", "tags", ("nothing",))],
        {"n": RowRange(0, 10)},
    ),
    "model-signature": lambda _: RowRange(5, 2),
    "option": lambda _: pipeline.load("jets", devcie="cpu"),  # type: ignore[call-overload]
    "target": lambda _: Target.parse("toaster"),
    "engine": lambda _: engine("toaster"),
    "bind": lambda _: bind({"muons": Collection(JETS, 5)}),
    "bind-dtype": lambda _: bind(other_jets(**{JETS.columns[0].name: "float64"})),
    "bind-layout": lambda _: bind(other_jets(more="float32")),
    "bind-device": lambda _: Session(SESSION.signature, Nothing(), "cuda:0").bind(
        Collection(JETS, 5), Collection(TAGS, 5)
    ),
    "bind-read-only": lambda _: bind(Collection(JETS, 5), read_only()),
    "bind-overlap": lambda _: bind_overlapping(),
    "bind-rows": lambda _: bind(Collection(JETS, 200), Collection(TAGS, 200)),
    "load": lambda folder: pipeline.load(folder, mode="prod"),  # type: ignore[call-overload]
    "load-not-promoted": lambda folder: load_changed(folder, lambda bundle: None),
    "bundle": lambda folder: Bundle.open(folder / "nowhere"),
    "bundle-altered": lambda folder: load_changed(
        folder, lambda bundle: (bundle / "model.ts").write_text("x")
    ),
    "bundle-newer": lambda folder: load_changed(folder, make_newer),
    "registry": lambda _: Ref("jets/x"),
    "config": lambda folder: load_config(folder / "nowhere.yaml"),
    "missing-library": lambda _: import_missing(),
    "gate-reference-set": lambda _: refused_by("reference set"),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_each_mistake_has_its_code(code: str, tmp_path: Path) -> None:
    """Also once it was pickled, as an exception of another process is."""
    with pytest.raises(SoaPipelineError) as caught:
        MISTAKES[code](tmp_path)
    assert caught.value.code == code
    restored = pickle.loads(pickle.dumps(caught.value))
    assert type(restored) is type(caught.value)
    assert str(restored) == str(caught.value)
    assert restored.code == code


def test_a_refused_promotion_has_the_code_of_the_gate_that_refused() -> None:
    decisions = [Decision(gate, gate == "speed", "", "", "") for gate in ("speed", "in place")]
    refused = pickle.loads(pickle.dumps(PromotionRefused("jets/1", decisions)))
    assert refused.code == "gate-in-place"
    assert list(refused.decisions) == decisions


def test_a_promotion_that_no_gate_refused_has_the_general_code() -> None:
    assert PromotionRefused("jets/1", []).code == "gate"


@pytest.mark.parametrize(
    ("executable", "code"),
    [
        (rogues.honest(), ""),
        (rogues.off_by(1e-3), "candidate-deviates"),
        (rogues.writes_padding(), "candidate-elsewhere"),
        (rogues.changes_inputs(), "candidate-elsewhere"),
        (rogues.LeavesGaps(), "candidate-unwritten"),
        (rogues.ReadsPadding(), "candidate-padding"),
        (rogues.nondeterministic(), "candidate-unsteady"),
        (rogues.Fails(), "candidate-failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_verdict_has_its_code(executable: Executable, code: str) -> None:
    session = Session(mlp_signature(), executable)
    tight = {"probabilities": Tolerance(1e-5, 1e-5)}
    report = validate_session(session, "by hand", rogues.reference(), tight)
    assert (report.valid, report.code) == (not code, code)
    restored = ValidationReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert restored == report
    assert code in restored.why


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        ({"valid": True}, ""),
        ({"reason": "wrong"}, "candidate-refused"),
        ({"reason": "broke", "verdict": "failed"}, "candidate-failed"),
        ({"reason": "not for it", "verdict": "not applicable"}, "not-applicable"),
        ({"reason": "no device", "unverified": True}, "candidate-unverified"),
    ],
)
def test_an_old_report_without_a_code_gets_one(stored: dict[str, object], code: str) -> None:
    old = {"engine": "aoti", "valid": False, "reason": None, **stored}
    assert ValidationReport.from_dict(old).code == code


# -- the command ---------------------------------------------------------------------------------


def test_the_command_ends_its_message_with_the_code(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("nme: jets\nmodle: x\n")
    lines = cli("run", config, code=1).stderr.splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line.endswith(" [config]")] == lines[-1:]


def test_an_error_in_json_has_its_code(tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    error = answer("show", "jets", registry=registry, code=1)["error"]
    assert error["code"] == "no-registry"
    assert registry.uri in error["message"]
    definitions = json.loads((ROOT / "docs/answers.schema.json").read_text())["$defs"]
    jsonschema.validate({"error": error}, {"$ref": "#/$defs/error", "$defs": definitions})


def test_an_error_of_the_disk_has_its_code_in_json(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_bundle(tmp_path / "bundle", as_record(Manifest, provable(manifest_data())))
    result = cli("cxx", tmp_path / "bundle", "-o", tmp_path / "file" / "x.hpp", "--json", code=1)
    assert json.loads(result.stdout)["error"]["code"] == "disk"
