"""Makes sessions from a model with the stages themselves, without a config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from engines import DEFAULT_ENGINES, Executable, Portable, Target, engine
from engines.exported import quiet_torch
from runtime.checked import default_tolerance
from runtime.session.binding import Binding
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
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
from tests.models.mlps import CLASSES, FEATURES

JETS = Layout([column(name, "float32") for name in FEATURES])
# The engines that build every model here; `make core` has no ONNX.
_NOT_HERE = {"aoti-standalone"} if find_spec("onnxscript") else {"aoti-standalone", "onnxruntime"}
ENGINES = tuple(name for name in DEFAULT_ENGINES if name not in _NOT_HERE)
TAGS = Layout([column(name, "float32") for name in CLASSES])


def mlp_signature(
    highest: int = 100, typical: tuple[int, ...] = (), lowest: int = 0, output: str = "float32"
) -> Signature:
    """Six float32 columns in, three out: the signature of `mlps.PointwiseFirst`."""
    return Signature.build(
        {"jets": JETS, "tags": Layout([column(name, output) for name in CLASSES])},
        [Block("features", "jets", FEATURES)],
        [Block("probabilities", "tags", CLASSES)],
        {"n": RowRange(lowest, highest, typical)},
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
        return engine(name).open(self.files[name], torch.device("cpu"))

    def session(self, name: str) -> Session:
        return Session(self.signature, self.executable(name))

    def collections(
        self, case: Case, spare: int = 0
    ) -> tuple[dict[str, Collection], dict[str, Collection]]:
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
        made = engine(name).compile(source, Target.parse("cpu"), {}, out)
        files[name] = artifact_file(name, tuple(made), out, captured)
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
    """Input collections with the first rows of `inputs`, and zeroed output collections."""
    given: dict[str, Collection] = {}
    for name in signature.input_collections:
        n = case[signature.rows_of[name]]
        given[name] = Collection(signature.layouts[name], n, capacity=n + spare)
        for member in signature.layouts[name].columns:
            given[name].fill(member.name, inputs[name][member.name])
    written: dict[str, Collection] = {}
    for name in signature.output_collections:
        n = case[signature.rows_of[name]]
        written[name] = given.get(name) or Collection(
            signature.layouts[name], n, capacity=n + spare
        )
    return given, written


def bound(mlp: Built, session: Session, n: int) -> tuple[Binding, Collection]:
    """A binding on n rows, and its output collection."""
    given, written = mlp.collections({"n": n})
    return session.bind(given, written), written["tags"]


def values(tags: Collection) -> torch.Tensor:
    """The columns of `tags`, as a tensor (columns, n)."""
    return torch.stack([tags.tensor(c.name) for c in TAGS.columns])


def reasons(built: Built) -> dict[str, str | None]:
    """Why each engine's artifact is refused; None where it is valid."""
    tolerances = {b.name: default_tolerance(b.plan.dtypes[0]) for b in built.signature.outputs}
    reference = Reference.load(built.capture.reference)
    return {
        name: validate_session(built.session(name), name, reference, tolerances).reason
        for name in built.files
    }
