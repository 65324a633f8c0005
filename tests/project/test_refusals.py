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
    for each in root.__subclasses__():
        yield from classes(each)


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
CLASSES = {each.__name__: each for each in classes()}


def codes() -> Iterator[str]:
    """Every code: of a class, of a `raise`, of a verdict, of a gate."""
    yield from (str(each.code) for each in CLASSES.values())
    for node in nodes():
        if isinstance(node, ast.keyword) and node.arg == "code" and said(node.value):
            yield said(node.value)
        elif said(node).startswith("candidate-"):
            yield said(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Decision", "Measured"):
            gates = [said(each) for each in node.args[:1]]
            yield from (Decision(gate, False, "", "", "").code for gate in gates if gate)
    yield from ANYWHERE
    yield from CPP_ALONE


def said(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_each_class_has_a_code_of_its_own() -> None:
    assert all("code" in vars(each) for each in CLASSES.values())
    assert len({each.code for each in CLASSES.values()}) == len(CLASSES) > 40


def test_a_more_special_code_begins_with_that_of_its_class() -> None:
    found = 0
    for node in nodes():
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            for given in (said(each.value) for each in call.keywords if each.arg == "code"):
                if given not in ("", *ANYWHERE):
                    assert given.startswith(f"{CLASSES[call.func.id].code}-"), given
                    found += 1
    assert found > 40


def test_each_code_has_one_section_and_each_section_is_of_a_code() -> None:
    sections = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert Counter(sections) == Counter(set(codes()))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", section) for section in sections)
    for section in PAGE.split("\n### ")[1:]:
        code, text = section.split("\n", 1)
        assert f"[{code}]\n```" in text, f"the example of {code}"
        assert "**Do**: " in text, code


def test_cpp_has_the_codes_of_python() -> None:
    """C++ has one table of codes, and each refusal takes its code from there."""
    assert len(CPP_CODES) == len(set(CPP_CODES)) > 20
    assert len(CPP_CODES) == CPP.count(", SOA_")
    assert set(CPP_CODES) - set(codes()) == set() and set(CPP_CODES) >= CPP_ALONE
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
    dtypes = {each.name: each.dtype for each in JETS.columns} | changes
    return Collection(Layout([column(name, dtype) for name, dtype in dtypes.items()]), 5)


def read_only() -> Collection:
    buffer = np.zeros(TAGS.nbytes(5) + 128, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 128 :][: TAGS.nbytes(5)]
    buffer.flags.writeable = False
    return Collection.wrap(TAGS, buffer, 5)


def one_memory() -> None:
    """Binds two collections in the same bytes."""
    memory = np.zeros(max(JETS.nbytes(5), TAGS.nbytes(5)) + 128, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :]
    bind(
        Collection.wrap(JETS, memory[: JETS.nbytes(5)], 5),
        Collection.wrap(TAGS, memory[: TAGS.nbytes(5)], 5),
    )


def no_library() -> None:
    with needs_extra("data", DataError):
        import a_library_that_nobody_has  # type: ignore[import-not-found] # noqa: F401


def opened(folder: Path, change: Callable[[Path], object]) -> None:
    write_bundle(folder / "bundle", as_record(Manifest, provable(manifest_data())))
    change(folder / "bundle")
    pipeline.load(folder / "bundle")


def newer(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    seal(bundle)


def refused_by(gate: str) -> None:
    raise PromotionRefused("jets/1", [Decision(gate, False, "no", "yes", "because")])


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
    "bind-overlap": lambda _: one_memory(),
    "bind-rows": lambda _: bind(Collection(JETS, 200), Collection(TAGS, 200)),
    "load": lambda folder: pipeline.load(folder, mode="prod"),  # type: ignore[call-overload]
    "load-not-promoted": lambda folder: opened(folder, lambda bundle: None),
    "bundle": lambda folder: Bundle.open(folder / "nowhere"),
    "bundle-altered": lambda folder: opened(folder, lambda b: (b / "model.ts").write_text("x")),
    "bundle-newer": lambda folder: opened(folder, newer),
    "registry": lambda _: Ref("jets/x"),
    "config": lambda folder: load_config(folder / "nowhere.yaml"),
    "missing-library": lambda _: no_library(),
    "gate-reference-set": lambda _: refused_by("reference set"),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_each_mistake_has_its_code(code: str, tmp_path: Path) -> None:
    """The code also survives pickling, as when the exception comes from another process."""
    with pytest.raises(SoaPipelineError) as caught:
        MISTAKES[code](tmp_path)
    assert caught.value.code == code
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert (str(again), again.code) == (str(caught.value), code)


def test_what_was_refused_by_several_gates() -> None:
    decisions = [Decision(gate, gate == "speed", "", "", "") for gate in ("speed", "in place")]
    refused = pickle.loads(pickle.dumps(PromotionRefused("jets/1", decisions)))
    assert (refused.code, list(refused.decisions)) == ("gate-in-place", decisions)
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
    again = ValidationReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert code in again.why


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
def test_a_report_of_before_there_were_codes(stored: dict[str, object], code: str) -> None:
    old = {"engine": "aoti", "valid": False, "reason": None, **stored}
    assert ValidationReport.from_dict(old).code == code


# -- the command ---------------------------------------------------------------------------------


def test_the_command_says_the_code_once(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("nme: jets\nmodle: x\n")
    lines = cli("run", config, code=1).stderr.splitlines()
    assert len(lines) > 2
    assert [line.endswith(" [config]") for line in lines] == [False] * (len(lines) - 1) + [True]


def test_json_says_it_for_programs(tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    error = answer("show", "jets", registry=registry, code=1)["error"]
    assert error["code"] == "no-registry"
    assert registry.uri in error["message"]
    form = json.loads((ROOT / "docs/answers.schema.json").read_text())
    jsonschema.validate({"error": error}, {"$ref": "#/$defs/error", "$defs": form["$defs"]})


def test_json_of_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_bundle(tmp_path / "bundle", as_record(Manifest, provable(manifest_data())))
    result = cli("cxx", tmp_path / "bundle", "-o", tmp_path / "file" / "x.hpp", "--json", code=1)
    assert json.loads(result.stdout)["error"]["code"] == "disk"
