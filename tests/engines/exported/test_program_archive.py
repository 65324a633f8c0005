"""Archives that would run code when torch loads them: they are refused before torch opens them."""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive import _package

from engines.base import engine
from engines.errors import EngineError
from engines.exported.archive import load_program
from tests.models.archives import MODEL, doctored, record, save_program

WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_program(tmp_path_factory.mktemp("program") / "program.pt2")


class Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def saved(value: object) -> bytes:
    """The bytes that torch.save writes."""
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def refused(path: Path) -> str:
    """The error, of one line, with which the engine refuses a file."""
    with pytest.raises(EngineError) as caught:
        engine("exported").open(path, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_program_loads(program: Path) -> None:
    x = torch.arange(18.0).reshape(6, 3)
    expected = torch.export.load(program).module()(x)
    assert torch.equal(load_program(program).module()(x), expected)


def test_a_doctored_program_without_a_change_loads(program: Path, tmp_path: Path) -> None:
    """So the refusals below are for what was changed."""
    x = torch.arange(18.0).reshape(6, 3)
    again = doctored(program, tmp_path / "again.pt2", {})
    assert torch.equal(load_program(again).module()(x), load_program(program).module()(x))


def test_the_program_of_a_capture_loads_as_in_torch(mlp: Any) -> None:
    path = mlp.capture.program
    assert load_program(path).graph_signature == torch.export.load(path).graph_signature


def test_the_program_of_a_bundle_loads_as_in_torch(jets: Any) -> None:
    path = jets.bundle.file("program.pt2")
    assert load_program(path).graph_signature == torch.export.load(path).graph_signature


# The places of an archive in which code can stand: the members to replace, so that loading the
# archive creates the marker.


def in_the_samples(program: Path, marker: Path) -> dict[str, bytes | None]:
    return {SAMPLES: saved(((Touches(marker),), {}))}


def in_a_weight(program: Path, marker: Path) -> dict[str, bytes | None]:
    config = record(program, WEIGHTS)
    config["config"]["layer.bias"]["use_pickle"] = True
    return {WEIGHTS: json.dumps(config).encode(), "data/weights/weight_1": saved(Touches(marker))}


def in_an_opaque_constant(program: Path, marker: Path) -> dict[str, bytes | None]:
    config = record(program, CONSTANTS)
    (constant,) = config["config"].values()
    constant |= {"path_name": "opaque_obj_0", "use_pickle": True}
    content = pickle.dumps(Touches(marker))
    return {CONSTANTS: json.dumps(config).encode(), "data/constants/opaque_obj_0": content}


def in_the_older_form_of_weights(program: Path, marker: Path) -> dict[str, bytes | None]:
    return {"data/weights/model.pt": saved({"layer.bias": Touches(marker)})}


def in_a_shape(program: Path, marker: Path) -> dict[str, bytes | None]:
    text = torch._C.PyTorchFileReader(str(program)).get_record(MODEL).decode()
    model = json.loads(text)
    values = model["graph_module"]["graph"]["tensor_values"]
    values["x"]["sizes"][0]["as_expr"]["expr_str"] = (
        f"Integer(__import__('pathlib').Path({str(marker)!r}).touch() or 4)"
    )
    return {MODEL: json.dumps(model).encode()}


def in_a_name(program: Path, marker: Path) -> dict[str, bytes | None]:
    """The name becomes a parameter of the generated function, and the code its default value."""
    text = torch._C.PyTorchFileReader(str(program)).get_record(MODEL).decode()
    evil = f"x=__import__('pathlib').Path('{marker}').touch()"
    return {MODEL: text.replace('"name": "x"', f'"name": "{evil}"').encode()}


Changes = Callable[[Path, Path], dict[str, bytes | None]]
"""A function of a program and the marker: the members to replace."""
RUNS: list[Changes] = [
    in_the_samples,
    in_a_weight,
    in_an_opaque_constant,
    in_the_older_form_of_weights,
    in_a_shape,
]


@pytest.mark.parametrize("changes", RUNS)
def test_torch_alone_runs_code_in_an_archive(
    program: Path, tmp_path: Path, changes: Changes
) -> None:
    """So these archives need our checks. It may raise an error afterwards."""
    marker = tmp_path / "ran"
    path = doctored(program, tmp_path / "evil.pt2", changes(program, marker))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(_package.logger, "disabled", True)
        with contextlib.suppress(Exception):
            torch.export.load(path)
    assert marker.exists()


@pytest.mark.parametrize("changes", [*RUNS, in_a_name])
def test_code_in_an_archive_is_refused_and_not_run(
    program: Path, tmp_path: Path, changes: Changes
) -> None:
    marker = tmp_path / "ran"
    path = doctored(program, tmp_path / "evil.pt2", changes(program, marker))
    assert "evil.pt2 is not a program torch can load" in refused(path)
    assert not marker.exists()


def test_the_older_form_of_a_program_is_refused_and_not_run(program: Path, tmp_path: Path) -> None:
    """A plain zip of pickles: torch tries this form if it cannot read the newer one."""
    marker = tmp_path / "ran"
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("version", "8.17")
        archive.writestr("serialized_exported_program.json", "{}")
        for part in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{part}.pt", saved(Touches(marker)))
    refused(tmp_path / "old.pt2")
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "data/aotinductor/model/wrapper.so",
        "../../outside",
        "/tmp/outside",
        "models/other.json",
        "data/constants/custom_obj_0",
        "data/weights/model.pt",
    ],
)
def test_other_members_are_refused(program: Path, tmp_path: Path, name: str) -> None:
    path = doctored(program, tmp_path / "more.pt2", {name: b"content"})
    assert "which is no part of a program" in refused(path)


def edited(program: Path, into: Path, old: str, new: str) -> Path:
    """A copy of a program with another text in its model."""
    text = torch._C.PyTorchFileReader(str(program)).get_record(MODEL).decode()
    assert old in text
    return doctored(program, into, {MODEL: text.replace(old, new).encode()})


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("torch.ops.aten.linear.default", "torch.os.system", "not an allowed operator"),
        ("torch.ops.aten.linear.default", "torch.ops.load_library", "not an allowed operator"),
        ("torch.ops.aten.linear.default", "torch.load", "not an allowed operator"),
        ("torch.ops.aten.linear.default", "nowhere", "Failed deserializing"),
        ("layer.bias", "layer.bias']; import os; x['", "is not a name"),
        ("builtins.tuple", "collections.defaultdict", "is not a kind of container"),
    ],
)
def test_names_that_reach_elsewhere_are_refused(
    program: Path, tmp_path: Path, old: str, new: str, why: str
) -> None:
    assert why in refused(edited(program, tmp_path / "edited.pt2", old, new))


@pytest.mark.parametrize(
    "text",
    [
        "open('/etc/passwd')",
        "s0.__class__",
        "[1 for _ in range(9)]",
        "(lambda: 1)()",
        "exec",
        "Symbol('s0); import os')",
        "f'{1}'",
        "s0()",
        "x if y else z",
        "(" * 2000,
        "Integer(4)\nimport os",
        "10**10**10",
        "1 << 10**10",
        "s0(size=10)",
    ],
)
def test_what_is_no_shape_is_refused(program: Path, tmp_path: Path, text: str) -> None:
    assert "is not a shape" in refused(with_shape(program, tmp_path / "shape.pt2", text))


def with_shape(program: Path, into: Path, text: str) -> Path:
    """A copy of a program whose input has this text as its first size."""
    model = record(program, MODEL)
    values = model["graph_module"]["graph"]["tensor_values"]
    values["x"]["sizes"][0]["as_expr"]["expr_str"] = text
    return doctored(program, into, {MODEL: json.dumps(model).encode()})


SYMBOL = "Symbol('s77', positive=True, integer=True)"
SUMS = [
    f"Add(Symbol('s{i % 6}', integer=True), Mul(Integer({i + 2}), {SYMBOL}))" for i in range(20)
]


@pytest.mark.parametrize(
    "text",
    [
        "Pow(Integer(10), Pow(Integer(10), Integer(10)))",
        "Pow(Integer(10), Integer(10000000000))",
        "PowByNatural(Pow(Integer(9), Integer(99)), Integer(99))",
        "LShift(Integer(1), Integer(10000000000))",
        "Pow(Integer(2))",
        f"Pow(Integer(2), {SYMBOL})",
        "Float('0.5', precision=1000000000)",
        f"Integer({'9' * 3000})",
        f"FloorDiv(Mul({', '.join(SUMS)}), {SUMS[0]})",
        f"Max({', '.join(SUMS * 10)})",
    ],
)
def test_shapes_that_take_for_ever_are_refused(program: Path, tmp_path: Path, text: str) -> None:
    """sympy would compute for minutes, or without end: they are refused before it starts."""
    assert "shape" in refused(with_shape(program, tmp_path / "shape.pt2", text))


def test_guards_are_not_executed(program: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    model = record(program, MODEL)
    model["guards_code"] = [f"__import__('pathlib').Path({str(marker)!r}).touch() or True"]
    path = doctored(program, tmp_path / "guards.pt2", {MODEL: json.dumps(model).encode()})
    torch.export.load(path).module()(torch.ones(5, 3))
    assert marker.exists()  # torch alone runs the guard
    marker.unlink()
    load_program(path).module()(torch.ones(5, 3))
    assert not marker.exists()


@pytest.mark.parametrize(
    "length",
    [lambda size: 0, lambda size: 10, lambda size: size // 2, lambda size: size - 1],
    ids=["nothing", "ten bytes", "half", "all but a byte"],
)
def test_a_program_that_is_cut_short_is_refused(
    program: Path, tmp_path: Path, length: Callable[[int], int]
) -> None:
    content = program.read_bytes()
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(content[: length(len(content))])
    assert "cut.pt2" in refused(cut)


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere.pt2" in refused(tmp_path / "nowhere.pt2")


def test_torchscript_runs_no_pickle(tmp_path: Path) -> None:
    """torch.jit.load has its own unpickler, which cannot call Python."""
    marker = tmp_path / "ran"
    module = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(module, tmp_path / "model.ts")
    evil = pickle.dumps(Touches(marker), protocol=2)
    with (
        zipfile.ZipFile(tmp_path / "model.ts") as old,
        zipfile.ZipFile(tmp_path / "evil.ts", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, evil if name.endswith("/data.pkl") else old.read(name))
    with pytest.raises(EngineError, match="is not TorchScript"):
        engine("torchscript").open(tmp_path / "evil.ts", torch.device("cpu"))
    assert not marker.exists()
