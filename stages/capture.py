"""Capture: from a model to one portable program in the calling convention.

The model is exported inside the calling convention, with dynamic row counts, and also scripted or
traced inside it. If this export fails, the bare model is exported on row-major tensors. The error
of that export names the user's own line, where the model keeps state, fixes n, or does not export.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import cached_property
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import Dim, ExportedProgram

from engines.errors import first_line
from engines.exported import load_program, placed, quiet_torch, zero_by_zero
from engines.lanes import why_dependent
from runtime.checked import compare, default_tolerance
from soa.dtypes import itemsize
from soa.files import digest_of
from soa.memory import Collection, argument_tensors
from soa.signature import Argument, Signature
from stages.errors import CaptureError, ReferenceDataError
from stages.independence import rows_differ
from stages.model import (
    Copied,
    InFront,
    Precision,
    RowWise,
    SoaProgram,
    TracedProgram,
    Trees,
    as_torch,
    checks_off,
    exports,
    in_precision,
    mutation_line,
    stack_arguments,
    stacks_of,
    what_differs,
    where_raised,
    why_not_exported,
    why_not_run,
    with_columns,
)
from stages.reference import (
    Arrays,
    Case,
    answers_of_windows,
    compute_reference,
    count_nonfinite,
    eager_outputs,
    edge_rows,
    make_cases,
    many_rows,
    row_major_inputs,
    stress_rows,
    too_much,
    weaknesses,
)

Route = Literal["auto", "script", "trace", "none"]

_UNCHECKED = (
    "the artifact does not check the arguments of torch.distributions: the checks branch on values"
)
_ZERO = "a divisor of 0 gives 0 in the artifact, where eager torch raises an error"
# Row counts to export at: primes, so that no size in a model is equal to one of them by chance.
_EXAMPLE_ROWS = (37, 41, 43, 47, 53)


@dataclass(frozen=True)
class Capture:
    """The files and facts that capture wrote into its folder."""

    folder: Path
    signature: Signature
    torchscript: Literal["scripted", "traced"] | None
    torchscript_note: str | None
    precision: Precision = "fp32"
    dependence: str | None = None
    """Why a row's answer may depend on other rows. Empty: it does not. None: not recorded."""
    tried: str = ""
    """If no graph shows that rows are independent, but a trial found it: why none shows it."""

    @cached_property
    def why_dependent(self) -> str | None:
        """Why a row's answer may depend on other rows; None if not. Reads the graph if needed."""
        return dependence_of(self.dependence, self.program)

    @property
    def program(self) -> Path:
        return self.folder / "program.pt2"

    @property
    def script(self) -> Path | None:
        return self.folder / "model.ts" if self.torchscript else None

    @property
    def reference(self) -> Path:
        return self.folder / "reference.safetensors"

    @property
    def more(self) -> Path | None:
        """The file of answers to further rows, with a case for each window; None if the user gave
        no further rows."""
        file = self.folder / "more.safetensors"
        return file if file.exists() else None

    @property
    def many(self) -> Path | None:
        """The file of answers to many rows like those of the reference; None if there are none."""
        file = self.folder / "many.safetensors"
        return file if file.exists() else None

    def digest(self) -> str:
        """One digest of all captured files."""
        digest = hashlib.sha256()
        for file in (self.program, self.script, self.reference, self.more, self.many):
            if file is not None:
                digest.update(digest_of(file).encode())
        return digest.hexdigest()

    def save(self) -> None:
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["signature"] = self.signature.to_dict()
        del data["folder"]
        (self.folder / "capture.json").write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Capture:
        data = json.loads((folder / "capture.json").read_text())  # ours
        return cls(folder, **{**data, "signature": Signature.from_dict(data["signature"])})


def dependence_of(recorded: str | None, program: Path) -> str | None:
    """Why a row's answer may depend on other rows; None if it does not. `recorded` is this text in
    a capture or manifest; older ones did not record it (None), so the program is read."""
    if recorded is not None:
        return recorded or None
    found = why_dependent(load_program(program))
    return None if found is None else found.text


def capture(
    model: torch.nn.Module,
    signature: Signature,
    inputs: Arrays,
    folder: Path,
    route: Route = "auto",
    say: Callable[[str], None] = lambda text: None,
    precision: Precision = "fp32",
    nonfinite: float = 0.0,
    more: Arrays | None = None,
    stated: frozenset[str] = frozenset(),
    tried_is_enough: bool = False,
    many: int | None = 0,
) -> Capture:
    """Write program.pt2, model.ts and reference.safetensors, and find out if rows are independent.

    `inputs` are the reference inputs, with the largest n of every row dimension. With `more` rows
    more.safetensors is written too; with `many`, many.safetensors with so many rows (None: by the
    model's work). Integer columns named in `stated` get no extreme values. The program is in
    `precision`; the reference is in the precision of the model. Of each output of the reference, at
    most the fraction `nonfinite` may be NaN or infinite. `tried_is_enough`: rows may be cut into
    tiles if a trial finds that they are independent, though no graph shows it. Raises CaptureError
    with the model's line if capture fails, ReferenceDataError if the reference proves nothing.
    """
    example = example_case(signature)
    arguments = row_major_inputs(signature, inputs, example)
    say("checking the eager model")
    checked = _check_eager(model, signature, arguments, example)
    taken = in_precision(as_torch(model), precision)
    exportable = exports(taken, arguments)
    if written := checked.written:
        taken, exportable = Copied(taken, written), Copied(exportable, written)
        names = ", ".join(repr(signature.inputs[i].name) for i in written)
        say(f"note: the model writes into {names}: in the graph it gets copies of its own")
    say("exporting in the calling convention")
    soa_arguments = convention_arguments(signature, inputs, example)
    with checks_off() as checks:
        exported = _exported(exportable, signature, arguments, soa_arguments)
    program = exported.program
    dependence = _dependence(exported, signature, lambda: rows_differ(model, signature, inputs))
    dependence.tell(signature, tried_is_enough, say)
    cases = make_cases(signature)
    say(f"computing the reference at {len(cases)} sizes")
    reference = compute_reference(model, signature, inputs, cases, (example, checked.answers))
    if refusal := too_much(count_nonfinite(signature, reference), nonfinite):
        raise ReferenceDataError(refusal)
    notes = weaknesses(model, signature, reference) + ((_UNCHECKED,) if checks.read else ())
    if divisions := zero_by_zero(program):
        notes += (f"{placed('integer division', divisions)}: {_ZERO}",)
    reference = replace(reference, notes=notes)
    for weakness in reference.notes:
        say(f"note: {weakness}")
    say("scripting")
    made, note = _torchscript(
        taken, signature, arguments, soa_arguments, route, folder, bool(exported.row_wise)
    )
    say("computing the eager model's answers to stress rows and extreme values")
    stress, kept = stress_rows(model, signature, inputs)
    at_edges, untried = edge_rows(model, signature, inputs, stated)
    if many != 0:
        say("computing the eager model's answers to many rows")
    answered, left_out = many_rows(model, signature, inputs, many)
    for each in (*kept, *untried, *left_out):
        say(f"note: {each}")
    notes = (*reference.notes, *kept, *untried, *left_out)
    reference = replace(reference, edges=(*stress, *at_edges), notes=notes)
    _forget_addresses(program)
    with quiet_torch():
        _write(folder / "program.pt2", lambda buffer: torch.export.save(program, buffer))
    reference.save(folder / "reference.safetensors")
    if more is not None:
        answers_of_windows(model, signature, more).save(folder / "more.safetensors")
    if answered is not None:
        answered.save(folder / "many.safetensors")
    result = Capture(
        folder, signature, made, note, precision,
        "" if dependence.tried and tried_is_enough else dependence.why,
        dependence.why if dependence.tried else "",
    )  # fmt: skip
    result.save()
    return result


@dataclass(frozen=True)
class _Dependence:
    """Why a row's answer may depend on other rows; empty if the graph shows that it does not.

    `tried`: a trial found that it does not.
    """

    why: str = ""
    tried: bool = False

    def tell(self, signature: Signature, tried_is_enough: bool, say: Callable[[str], None]) -> None:
        """Print a note if rows are not shown to be independent. Raises CaptureError if this does
        not allow unbounded rows, which run in tiles."""
        if not self.why or signature.tile_kinds is None:
            return
        unbounded = any(rows.unbounded for rows in signature.ranges.values())
        if self.tried:
            if unbounded and not tried_is_enough:
                raise CaptureError(
                    "rows are unbounded, and that rows are independent is only tried, not shown: "
                    f"{self.why}. Leave out unbounded, or write gates: independence: tried"
                )
            say(f"note: that rows are independent is tried, not shown: {self.why}")
            return
        if unbounded:
            raise CaptureError(
                "rows are unbounded, and so run in tiles, but a row may see other rows: "
                f"{self.why}. Let each answer come from its own row, or leave out unbounded"
            )
        say(f"note: all rows run at once, since a row may see others: {self.why}")


def _dependence(
    exported: _Exported, signature: Signature, trial: Callable[[], str | None]
) -> _Dependence:
    """What is known about the rows. Raises CaptureError if the program is one for each row, and
    the `trial` finds that the model's rows depend on each other."""
    if exported.row_wise:
        if found := trial():
            raise CaptureError(
                f"{exported.row_wise}. Captured one by one, its rows are wrong: {found}"
            )
        refusal, _, _ = exported.row_wise.partition(". ")  # without the advice
        return _Dependence(f"its rows were captured one by one, since {refusal}", tried=True)
    reason = why_dependent(exported.program)
    if reason is None:
        return _Dependence()
    if reason.known or signature.tile_kinds is None:
        return _Dependence(reason.text)
    found = trial()
    return _Dependence(f"{reason.text}; {found}" if found else reason.text, tried=not found)


def why_rows_may_mix(model: torch.nn.Module, signature: Signature, inputs: Arrays) -> str:
    """Why a row's answer may depend on other rows, from the graph of an export; "" if it does not.
    `inputs` as for `capture`. A model that does not export with a free number of rows has no graph
    that shows it: then this is the reason of the export."""
    example = example_case(signature)
    arguments = row_major_inputs(signature, inputs, example)
    try:
        with checks_off():
            exportable = exports(as_torch(model), arguments)
            given = convention_arguments(signature, inputs, example)
            found = why_dependent(export_convention(exportable, signature, given))
        return found.text if found else ""
    except CaptureError as error:
        return first_line(error)


def example_case(signature: Signature) -> Case:
    """Row counts to export at: one per dimension, inside its range, different if possible.

    At least 2, because torch.export takes a row count of 0 or 1 for a constant. Below the largest,
    because a compiler may conclude that n >= the example's n, and other n must then remain.
    """
    case: Case = {}
    for dim, wanted in zip(signature.dims, _EXAMPLE_ROWS, strict=False):
        rows = signature.ranges[dim]
        below = range(rows.max - 1, max(rows.min, 2) - 1, -1)[:8]
        free = [n for n in (*below, rows.max) if n not in case.values()]
        case[dim] = wanted if rows.min <= wanted < rows.max else free[0] if free else rows.max
    return case


def convention_arguments(signature: Signature, inputs: Arrays, case: Case) -> list[torch.Tensor]:
    """Arguments in the calling convention for a case, in new memory.

    Each collection gets spare room, so that the padded length is not equal to a row count by
    chance.
    """
    collections: dict[str, Collection] = {}
    for i, (name, layout) in enumerate(signature.layouts.items()):
        n = case[signature.rows_of[name]]
        collections[name] = Collection(layout, n, capacity=n + 64 * (i + 1))
        for column in layout.numbers if name in inputs else ():
            collections[name].fill(column.name, inputs[name][column.name])
    # Clones, since torch cannot save example inputs that share memory under different dtypes.
    return [tensor.clone() for tensor in argument_tensors(signature, collections, case)]


@dataclass(frozen=True)
class _Checked:
    """The eager model's answers, and the indices of the inputs that the model writes into."""

    answers: dict[str, torch.Tensor]
    written: tuple[int, ...]


def _check_eager(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor], case: Case
) -> _Checked:
    given: list[torch.Tensor] = []

    def ask() -> dict[str, torch.Tensor]:
        given[:] = [a.clone() for a in arguments]
        return eager_outputs(model, signature, given, case)

    try:
        answers, again = ask(), ask()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(why_not_run(model, signature, arguments, error)) from error
    users = model
    while isinstance(users, InFront):
        users = users.model
    if isinstance(model, Trees):
        names, columns = model.names, signature.inputs[0].block.columns
        if names != columns and sorted(names) == sorted(columns):
            order = ", ".join(names)
            raise CaptureError(f"the trees take their features in the order {order}: list them so")
    for name, answer in answers.items():
        # Sums in another order, as threads make them, may differ a little.
        allowed = default_tolerance(str(answer.dtype).removeprefix("torch."))
        if compare(again[name], answer, allowed, classifier=False).outside:
            raise CaptureError(
                f"the model gives two answers to the same inputs (output {name!r}): "
                f"{what_differs(users, ask)}. An artifact has one: switch off what is for training "
                "alone (model.eval(), F.dropout(x, training=self.training)), and keep no state"
            )
    # torch counts the writes into a tensor and into all its views.
    return _Checked(answers, tuple(i for i, tensor in enumerate(given) if tensor._version))


def _dims(signature: Signature) -> dict[str, Any]:
    """A symbol per row dimension, or None (torch's sign for a fixed size) if it has one value."""
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    return {
        dim: None if r.min == r.max else Dim(f"rows_{dim}", min=r.min, max=r.max)
        for dim, r in ranges.items()
    }


@dataclass(frozen=True)
class _Exported:
    """A program in the calling convention. `row_wise`: why torch.export takes the model only at
    one row, so that the program runs each row on its own; empty if it takes all rows at once."""

    program: ExportedProgram
    row_wise: str = ""


def _exported(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
) -> _Exported:
    """The program in the calling convention. An error names the model's own line."""
    try:
        program = export_convention(model, signature, soa_arguments)
    except CaptureError as error:
        refusal = _why_refused(model, signature, arguments) or error
        made = _row_wise(model, signature, arguments, soa_arguments)
        if made is None:
            raise refusal from error
        return _Exported(made, str(refusal))
    if _writes_state(program):
        plain = CaptureError("the model writes into its own state: an artifact keeps none")
        raise _why_refused(model, signature, arguments) or plain
    return _Exported(program)


def _writes_state(program: ExportedProgram) -> bool:
    found = program.graph_signature
    return any(
        "MUTATION" in s.kind.name and s.target not in found.user_inputs for s in found.output_specs
    )


def _row_wise(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
) -> ExportedProgram | None:
    """The program that runs each row on its own, or None if the model does not export at one row
    either, or has more than rows of one dimension."""
    if len(signature.dims) > 1 or signature.jagged or signature.tile_kinds is None:
        return None
    try:
        with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            by_row = RowWise(model, signature, arguments)
        return export_convention(by_row, signature, soa_arguments)
    except Exception:  # torch has no exception type for this; the first refusal says more
        return None


def _why_refused(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor]
) -> CaptureError | None:
    """The reason why the bare model does not export with every row count dynamic, and the line at
    fault; None if it does."""
    dims = _dims(signature)
    shapes: tuple[Any, ...] = tuple(
        None if bound.rowless else {0: dims[bound.rows]} for bound in signature.inputs
    )
    parameters = inspect.signature(model.forward).parameters.values()
    if [p.kind for p in parameters] == [inspect.Parameter.VAR_POSITIONAL]:
        shapes = (shapes,)  # *inputs is one parameter
    with quiet_torch():
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # torch prints graphs
                exported = torch.export.export(
                    model, tuple(arguments), dynamic_shapes=shapes, strict=False
                )
            functional = exported.run_decompositions({})
        except Exception as error:
            return CaptureError(why_not_exported(model, arguments, shapes, error))
    found = functional.graph_signature
    mutated = [s.target for s in found.output_specs if "MUTATION" in s.kind.name]
    if state := [name for name in mutated if name not in found.user_inputs]:
        return CaptureError(
            f"the model writes into {', '.join(map(repr, state))}{mutation_line(exported)}: an "
            "artifact keeps no state; use the out-of-place operation"
        )
    return None


def export_convention(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor]
) -> ExportedProgram:
    """The program in the calling convention, exported with arguments of an example's sizes."""
    dims = _dims(signature)
    shapes: list[dict[int, Any] | None] = []
    for i, argument in enumerate(signature.arguments):
        if argument.kind == "matrix":
            shapes.append({1: Dim(f"padded_{i}", min=_least_padded(signature, argument))})
        elif argument.kind == "scalar":
            shapes.append(None)
        else:
            shapes.append({0: dims[argument.rows]})
    stacks = stacks_of(signature)
    wrapped = SoaProgram(model, signature, frozenset(stack.block for stack in stacks))
    given = tuple(stack_arguments(arguments, stacks, lambda columns: torch.stack(columns, 1)))
    shapes = stack_arguments(shapes, stacks, lambda columns: columns[0])
    with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            # Functional form: torch 2.13 cannot save a program that returns nothing, and here the
            # written outputs are the program's results.
            exported = torch.export.export(
                wrapped, given, dynamic_shapes=(tuple(shapes),), strict=False
            )
            functional = with_columns(exported.run_decompositions({}), stacks, arguments)
            _keep_apart(functional)
            return functional
        except Exception as error:
            if "data-dependent" in str(error):  # from state that changes, such as a counter
                why = why_not_exported(wrapped, list(given), (tuple(shapes),), error)
                raise CaptureError(why) from error
            raise CaptureError(
                "the model exports alone, but not in the calling convention "
                f"({where_raised(error)}): {first_line(error)}"
            ) from error


def _keep_apart(program: ExportedProgram) -> None:
    """Remove stacks of columns that the graph splits again, because they would be copied."""
    for node in program.graph.nodes:
        args: Any = node.args
        if node.target is torch.ops.aten.select.int and (
            args[0].target is torch.ops.aten.stack.default and args[0].args[1:] == args[1:2]
        ):
            node.replace_all_uses_with(args[0].args[0][args[2]])
    program.graph.eliminate_dead_code()


def _least_padded(signature: Signature, argument: Argument) -> int:
    """The least padded length S that export may assume: the least n, and one aligned line.

    Torch also requires S > 2, since it sorts strides, and S != n if the rows are fixed. The
    operations need neither. No engine checks this at run time; validation runs such sizes.
    """
    rows = signature.ranges[argument.rows]
    line = signature.layouts[argument.collection].alignment // itemsize(argument.dtype)
    return max(rows.min + (rows.min == rows.max), line, 4)


def _torchscript(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
    route: Route,
    folder: Path,
    row_wise: bool = False,
) -> tuple[Literal["scripted", "traced"] | None, str | None]:
    """Write model.ts by scripting, else by tracing. Returns which one, and why the other failed.

    A `row_wise` model is not traced: the trace would keep the example's number of rows.
    """
    if route == "none":
        return None, "not wanted"
    notes: list[str] = []
    with quiet_torch(), torch.no_grad():
        core: torch.nn.Module | None = None
        made: Literal["scripted", "traced"] = "scripted"
        if isinstance(model, torch.jit.ScriptModule):
            core = model
        elif route in ("auto", "script"):
            try:
                core = _scripted(model)
            except Exception as error:
                notes.append(f"does not script: {first_line(error)}")
                if route == "script":
                    raise CaptureError(
                        f"the model {notes[0]} (torchscript_route: script)"
                    ) from error
        if core is None:
            made = "traced"
            try:
                core = _traced(model, arguments, row_wise)
            except Exception as error:
                notes.append(f"does not trace: {first_line(error)}")
                if route == "trace":
                    raise CaptureError(
                        f"the model {notes[-1]} (torchscript_route: trace)"
                    ) from error
                return None, "; ".join(notes)
        whole = TracedProgram(SoaProgram(core, signature))
        try:
            traced = torch.jit.trace(whole, tuple(soa_arguments), check_trace=False)
        except Exception as error:
            return None, "; ".join([*notes, f"does not trace: {first_line(error)}"])
        _write(folder / "model.ts", lambda buffer: torch.jit.save(traced, buffer))
    return made, "; ".join(notes) or None


def _traced(
    model: torch.nn.Module, arguments: list[torch.Tensor], row_wise: bool
) -> torch.nn.Module:
    if row_wise:
        raise CaptureError("it takes the number of rows as a plain number")
    traced: torch.nn.Module = torch.jit.trace(model, tuple(arguments), check_trace=False)
    return traced


def _scripted(model: torch.nn.Module) -> torch.nn.Module:
    """Script the user's model. Modules in front of it are left to be traced: they take any number
    of inputs."""
    if isinstance(model, InFront):
        return model.around(_scripted(model.model))
    return model if isinstance(model, torch.jit.ScriptModule) else torch.jit.script(model)


def _forget_addresses(program: ExportedProgram) -> None:
    """Drop torch's notes on which graph a node came from: they are addresses in this process, and
    two programs of one model would differ in them."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("from_node", None)


def _write(path: Path, save: Callable[[BytesIO], None]) -> None:
    """Write through memory: on a full disk torch's own writer ends the whole process."""
    buffer = BytesIO()
    save(buffer)
    path.write_bytes(buffer.getbuffer())
