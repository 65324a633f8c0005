"""Makes sessions from a model with the stages themselves, without a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from engines import DEFAULT_ENGINES, Executable, Portable, Target, engine
from engines.exported import quiet_torch
from runtime.checked import Tolerance, default_tolerance
from runtime.session.binding import Binding
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.layout import Column, Storage
from stages.capture import (
    Capture,
    Route,
    capture,
    convention_arguments,
    example_case,
    export_convention,
)
from stages.compile import artifact_file
from stages.judging.validate import validate_session
from stages.model.row_wise import RowWise
from stages.reference import row_major_inputs
from stages.reference.answers import Arrays, Reference, random_inputs
from stages.reference.nonfinite import Case
from stages.reports import ValidationReport
from tests.models.mlps import CLASSES, FEATURES

JETS = Layout([column(name, "float32") for name in FEATURES])
TAGS = Layout([column(name, "float32") for name in CLASSES])
# The engines that build every model here; `make core` has no ONNX.
_NOT_HERE = {"aoti-standalone"} if find_spec("onnxscript") else {"aoti-standalone", "onnxruntime"}
ENGINES = tuple(name for name in DEFAULT_ENGINES if name not in _NOT_HERE)
ROWS = RowRange(0, 100)


def signature_of(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    rows: RowRange = ROWS,
    storage: Storage = "buffer",
    names: tuple[str, str] = ("rows", "answers"),
) -> Signature:
    """A signature with one collection of inputs and one of outputs.

    The columns of a block are the words of a text: `k:int8` has that dtype, `k` is float32.
    """
    layouts, blocks = {}, dict[str, list[Block]]()
    for collection, texts in zip(names, (inputs, outputs), strict=True):
        columns = {block: _columns(text) for block, text in texts.items()}
        layouts[collection] = Layout([c for own in columns.values() for c in own], storage=storage)
        blocks[collection] = [
            Block(block, collection, tuple(c.name for c in own)) for block, own in columns.items()
        ]
    of_inputs, of_outputs = names
    return Signature.build(layouts, blocks[of_inputs], blocks[of_outputs], {"n": rows})


def _columns(text: str) -> list[Column]:
    """The columns of a block, as `signature_of` takes them."""
    words = [word.partition(":") for word in text.split()]
    return [column(name, dtype or "float32") for name, _, dtype in words]


def mlp_signature(
    highest: int = 100, typical: tuple[int, ...] = (), lowest: int = 0, output: str = "float32"
) -> Signature:
    """Six float32 columns in, three out: the signature of `mlps.PointwiseFirst`."""
    return signature_of(
        {"features": " ".join(FEATURES)},
        {"probabilities": " ".join(f"{name}:{output}" for name in CLASSES)},
        RowRange(lowest, highest, typical),
        names=("jets", "tags"),
    )


@dataclass(frozen=True)
class Built:
    """A captured model and its artifacts, by engine."""

    model: torch.nn.Module
    signature: Signature
    inputs: Arrays
    capture: Capture
    files: dict[str, Path]

    def executable(self, name: str) -> Executable:
        """The opened artifact of the engine with this name."""
        return engine(name).open(self.files[name], torch.device("cpu"))

    def session(self, name: str) -> Session:
        """A session of the artifact of the engine with this name."""
        return Session(self.signature, self.executable(name))

    def collections(
        self, case: Case, spare: int = 0
    ) -> tuple[dict[str, Collection], dict[str, Collection]]:
        """See `reference_collections`."""
        return reference_collections(self.signature, self.inputs, case, spare)


def exported(
    model: torch.nn.Module,
    signature: Signature,
    inputs: Arrays,
    file: Path,
    row_wise: bool = False,
) -> Path:
    """Exports the program.pt2 of `capture`, without the other files and checks. `row_wise`: as if
    the model exported only at one row."""
    case = example_case(signature)
    arguments = convention_arguments(signature, inputs, case)
    model = model.eval().requires_grad_(False)
    with quiet_torch():
        if row_wise:
            model = RowWise(model, signature, row_major_inputs(signature, inputs, case))
        program = export_convention(model, signature, arguments)
    with quiet_torch():
        torch.export.save(program, file)
    return file


def build(
    model: torch.nn.Module,
    signature: Signature,
    folder: Path,
    engines: tuple[str, ...] = ENGINES,
    inputs: Arrays | None = None,
    route: Route = "auto",
    nonfinite: float = 0.0,
) -> Built:
    """Capture and compile in this process, for this host's default CPU target."""
    model = model.eval().requires_grad_(False)
    inputs = random_inputs(signature, 1, {}) if inputs is None else inputs
    captured = capture(model, signature, inputs, folder, route, nonfinite=nonfinite)
    files: dict[str, Path] = {}
    for name in engines:
        out = folder / name
        out.mkdir()
        source = Portable(captured.program, captured.script)
        compiled = engine(name).compile(source, Target.parse("cpu"), {}, out)
        files[name] = artifact_file(name, tuple(compiled), out, captured)
    return Built(model, signature, inputs, captured, files)


def save(built: Built, note: Path) -> None:
    """Writes down where the artifacts are, for `opened`."""
    note.write_text(json.dumps({name: str(path) for name, path in built.files.items()}))


def opened(model: torch.nn.Module, signature: Signature, folder: Path, note: Path) -> Built:
    """The result of `build` for this model in `folder`, perhaps made by another process."""
    files = {name: Path(path) for name, path in json.loads(note.read_text()).items()}
    model = model.eval().requires_grad_(False)
    return Built(model, signature, random_inputs(signature, 1, {}), Capture.load(folder), files)


def reference_collections(
    signature: Signature, inputs: Arrays, case: Case, spare: int = 0
) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """Input collections with the first rows of `inputs`, and zeroed output collections. One that is
    both is the same object. `spare`: rows of room behind the last one."""

    def empty(name: str) -> Collection:
        n = case[signature.rows_of[name]]
        return Collection(signature.layouts[name], n, capacity=n + spare)

    filled: dict[str, Collection] = {}
    for name in signature.input_collections:
        filled[name] = empty(name)
        for member in signature.layouts[name].columns:
            filled[name].fill(member.name, inputs[name][member.name])
    written: dict[str, Collection] = {}
    for name in signature.output_collections:
        written[name] = filled[name] if name in filled else empty(name)
    return filled, written


def bound(mlp: Built, session: Session, n: int) -> tuple[Binding, Collection]:
    """A binding on n rows, and its output collection."""
    inputs, written = mlp.collections({"n": n})
    return session.bind(inputs, written), written["tags"]


def values(tags: Collection) -> torch.Tensor:
    """The columns of `tags`, as a tensor (columns, n)."""
    return torch.stack([tags.tensor(c.name) for c in TAGS.columns])


def tolerances_of(signature: Signature) -> dict[str, Tolerance]:
    """The default tolerance of each output."""
    return {b.name: default_tolerance(b.plan.dtypes[0]) for b in signature.outputs}


def reports(
    built: Built, tolerances: Mapping[str, Tolerance] | None = None
) -> dict[str, ValidationReport]:
    """Each engine's artifact compared with the reference."""
    allowed = tolerances or tolerances_of(built.signature)
    reference = Reference.load(built.capture.reference, built.signature)
    return {
        name: validate_session(built.session(name), name, reference, allowed)
        for name in built.files
    }


def reasons(
    built: Built, tolerances: Mapping[str, Tolerance] | None = None
) -> dict[str, str | None]:
    """Why each engine's artifact is refused; None where it is valid."""
    return {name: report.reason for name, report in reports(built, tolerances).items()}


def require_valid(
    model: torch.nn.Module,
    signature: Signature,
    folder: Path,
    engines: tuple[str, ...],
    inputs: Arrays | None = None,
    route: Route = "auto",
) -> Built:
    """Builds artifacts, which must be valid."""
    built = build(model, signature, folder, engines, inputs, route)
    assert reasons(built) == dict.fromkeys(built.files)
    return built
