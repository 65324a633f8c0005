"""Capture: from a model to one portable program in the calling convention.

The model is exported inside the calling convention, and also scripted or traced inside it. The
eager model's answers are its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from engines.errors import first_line
from engines.exported import make_zero_divisions_zero, quiet_torch, with_model_lines
from engines.lanes import why_dependent
from runtime.checked import compare, default_tolerance
from soa.dtypes import dtype_name
from soa.signature import Signature
from stages.capture.captured import Capture
from stages.capture.exporting import (
    Exported,
    convention_arguments,
    example_case,
    export_convention,
    export_with_fallback,
    why_refused,
)
from stages.capture.independence import how_rows_depend
from stages.capture.state import Attributes, depends_on_calls
from stages.capture.torchscript import Route, write_buffered, write_torchscript
from stages.errors import CaptureError, ReferenceDataError
from stages.model import (
    Copied,
    InFront,
    Precision,
    Trees,
    as_exportable,
    as_torch,
    checks_off,
    find_difference,
    in_precision,
    why_not_run,
)
from stages.reference import (
    Arrays,
    Case,
    Reference,
    answer_windows,
    compute_reference,
    count_nonfinite,
    eager_outputs,
    find_weaknesses,
    make_cases,
    make_edge_rows,
    make_many_rows,
    make_stress_rows,
    row_major_inputs,
    why_too_nonfinite,
)

_UNCHECKED = (
    "the artifact does not check the arguments of torch.distributions: the checks branch on values"
)
_ZERO = "a divisor of 0 gives 0 in the artifact, where eager torch raises an error"


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
    """Write program.pt2, model.ts and reference.safetensors into `folder`, and find out whether
    rows are independent.

    `inputs` are the reference inputs, with the most rows of every dimension. `more` are further
    rows of the user, for more.safetensors. `many` is the number of rows in many.safetensors; None:
    as many as the model's work allows, 0: no such file. `route` is how model.ts is made, see
    `write_torchscript`. `say` gets a line for each step, and each note for the user.

    The program is in `precision`; the reference is computed in the model's own precision. At most
    the fraction `nonfinite` of an output of the reference may be NaN or infinite. The integer
    columns named in `stated` get no extreme values. With `tried_is_enough`, rows may be cut into
    tiles if a trial finds that they are independent, though no graph shows it.

    Raises CaptureError, which names the model's line, if capture fails, and ReferenceDataError if
    the reference proves nothing.
    """
    example = example_case(signature)
    arguments = row_major_inputs(signature, inputs, example)
    say("checking the eager model")
    fresh = Attributes(model)
    checked = _check_eager(model, signature, arguments, example)
    kept = fresh.changed()
    if kept and depends_on_calls(model, signature, inputs, example, fresh):
        raise CaptureError(
            f"the model writes into {', '.join(map(repr, kept))}, and its answers depend on its "
            "first call: an artifact keeps no state; set it in __init__, or compute it in each call"
        )
    reduced = in_precision(as_torch(model), precision)
    exportable = as_exportable(reduced, arguments)
    if checked.written:
        reduced, exportable = Copied(reduced, checked.written), Copied(exportable, checked.written)
        names = ", ".join(repr(signature.inputs[i].name) for i in checked.written)
        say(f"note: the model writes into {names}: in the graph it gets copies of its own")
    say("exporting in the calling convention")
    soa_arguments = convention_arguments(signature, inputs, example)
    with checks_off() as checks:
        exported = export_with_fallback(exportable, signature, arguments, soa_arguments)
    program = exported.program
    dependence = _find_dependence(
        exported, signature, lambda: how_rows_depend(model, signature, inputs)
    )
    dependence.note(signature, tried_is_enough, say)
    say("scripting")
    script = write_torchscript(
        reduced, signature, arguments, soa_arguments, route, folder, bool(exported.row_wise)
    )
    known = (example, checked.answers)
    reference = _compute_finite_reference(model, signature, inputs, known, nonfinite, say)
    say("computing the eager model's answers to stress rows and extreme values")
    stress = make_stress_rows(model, signature, inputs)
    at_edges = make_edge_rows(model, signature, inputs, stated)
    if many != 0:
        say("computing the eager model's answers to many rows")
    answered = make_many_rows(model, signature, inputs, many)
    notes = (
        *find_weaknesses(model, signature, reference), *_notes_on_errors(program, checks.read),
        *stress.notes, *at_edges.notes, *answered.notes,
    )  # fmt: skip
    for note in notes:
        say(f"note: {note}")
    _save_program(program, folder / "program.pt2")
    reference = replace(reference, edges=(*stress.edges, *at_edges.edges), notes=notes)
    reference.save(folder / "reference.safetensors")
    if more is not None:
        answer_windows(model, signature, more).save(folder / "more.safetensors")
    if answered.edges:
        Reference({}, (), (), edges=answered.edges).save(folder / "many.safetensors")
    result = Capture(
        folder, signature, script.made, script.note, precision,
        dependence="" if dependence.tried and tried_is_enough else dependence.why,
        tried=dependence.why if dependence.tried else "",
    )  # fmt: skip
    result.save()
    return result


def _compute_finite_reference(
    model: torch.nn.Module,
    signature: Signature,
    inputs: Arrays,
    known: tuple[Case, dict[str, torch.Tensor]],
    nonfinite: float,
    say: Callable[[str], None],
) -> Reference:
    """Compute the eager model's answers at all sizes.

    `known` is a case with its answers, which are not computed again. Raises ReferenceDataError if
    more than the fraction `nonfinite` of an output is NaN or infinite.
    """
    cases = make_cases(signature)
    say(f"computing the reference at {len(cases)} sizes")
    reference = compute_reference(model, signature, inputs, cases, known)
    counts = count_nonfinite(signature, cases, reference.outputs)
    if refusal := why_too_nonfinite(counts, nonfinite):
        raise ReferenceDataError(refusal)
    return reference


def _save_program(program: ExportedProgram, file: Path) -> None:
    """Write a program into a file. Torch's notes that differ from process to process are removed
    from the program first, in place."""
    _forget_addresses(program)
    with quiet_torch():
        write_buffered(file, lambda buffer: torch.export.save(program, buffer))


def _notes_on_errors(program: ExportedProgram, checks_are_read: bool) -> Iterator[str]:
    """Yield a sentence for each error that eager torch may raise and the program does not.
    `checks_are_read`: the model uses torch.distributions, whose checks were switched off."""
    if checks_are_read:
        yield _UNCHECKED
    if divisions := make_zero_divisions_zero(program):
        yield f"{with_model_lines('integer division', divisions)}: {_ZERO}"


@dataclass(frozen=True)
class _Dependence:
    """Whether a row's answer may depend on other rows.

    `why` says why it may, or why the graph does not show that it does not; it is empty if the graph
    shows this. `tried`: the graph does not show it, but a trial found no dependence.
    """

    why: str = ""
    tried: bool = False

    def note(self, signature: Signature, tried_is_enough: bool, say: Callable[[str], None]) -> None:
        """Say a note to the user if the graph does not show that rows are independent.

        Raises CaptureError if rows are unbounded, and so must run in tiles, but a row may depend on
        others; or if only a trial shows that it does not, and `tried_is_enough` is false.
        """
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


def _find_dependence(
    exported: Exported, signature: Signature, trial: Callable[[], str | None]
) -> _Dependence:
    """Find out from the graph whether rows depend on each other, or from the `trial` if the graph
    does not show it.

    The trial runs the eager model. It returns how rows depend on each other, None if it finds that
    they do not. Raises CaptureError if the model was captured at one row, and the trial finds that
    its rows depend on each other.
    """
    if exported.row_wise:
        if why := trial():
            raise CaptureError(
                f"{exported.row_wise}. Captured one by one, its rows are wrong: {why}"
            )
        refusal, _, _ = exported.row_wise.partition(". ")  # without the advice
        return _Dependence(f"its rows were captured one by one, since {refusal}", tried=True)
    reason = why_dependent(exported.program)
    if reason is None:
        return _Dependence()
    if reason.known or signature.tile_kinds is None:
        return _Dependence(reason.text)
    why = trial()
    return _Dependence(f"{reason.text}; {why}" if why else reason.text, tried=not why)


def why_rows_may_mix(model: torch.nn.Module, signature: Signature, inputs: Arrays) -> str:
    """Why a row's answer may depend on other rows, or on their number if this has no limit; empty
    if it does not. `inputs` as for `capture`.

    The model is exported to find this out from its graph. If it does not export with a free number
    of rows, torch's reason is returned.
    """
    without_limit = {dim: replace(rows, unbounded=True) for dim, rows in signature.ranges.items()}
    signature = replace(signature, ranges=without_limit)
    example = example_case(signature)
    arguments = row_major_inputs(signature, inputs, example)
    try:
        exportable = as_exportable(as_torch(model), arguments)
    except CaptureError as error:
        return first_line(error)
    try:
        with checks_off():
            soa_arguments = convention_arguments(signature, inputs, example)
            reason = why_dependent(export_convention(exportable, signature, soa_arguments))
        return reason.text if reason else ""
    except CaptureError as error:
        return first_line(why_refused(exportable, signature, arguments) or error)


@dataclass(frozen=True)
class _Checked:
    """The eager model's answers, and the indices of the inputs that the model writes into."""

    answers: dict[str, torch.Tensor]
    written: tuple[int, ...]


def _check_eager(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor], case: Case
) -> _Checked:
    """Run the eager model twice on copies of `arguments`, the example's inputs. Raises CaptureError
    if it fails, if the two answers differ, or if trees get their features in another order."""
    inputs: list[torch.Tensor] = []  # the arguments of the last run

    def ask() -> dict[str, torch.Tensor]:
        inputs[:] = [argument.clone() for argument in arguments]
        return eager_outputs(model, signature, inputs, case)

    try:
        answers, again = ask(), ask()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(why_not_run(model, signature, arguments, error)) from error
    if isinstance(model, Trees):
        _require_order(model, signature.inputs[0].block.columns)
    differing = _differing_output(answers, again)
    if differing is not None:
        user_model = model
        while isinstance(user_model, InFront):
            user_model = user_model.model
        raise CaptureError(
            f"the model gives two answers to the same inputs (output {differing!r}): "
            f"{find_difference(user_model, ask)}. An artifact has one: switch off what is for "
            "training alone (model.eval(), F.dropout(x, training=self.training)), and keep no state"
        )
    # torch counts the writes into a tensor and into all its views.
    return _Checked(answers, tuple(i for i, tensor in enumerate(inputs) if tensor._version))


def _require_order(trees: Trees, columns: tuple[str, ...]) -> None:
    """Raise CaptureError if the columns have the names of the trees' features in another order."""
    if trees.names != columns and sorted(trees.names) == sorted(columns):
        order = ", ".join(trees.names)
        raise CaptureError(f"the trees take their features in the order {order}: list them so")


def _differing_output(
    answers: dict[str, torch.Tensor], again: dict[str, torch.Tensor]
) -> str | None:
    """The name of the first output that differs between two runs; None if there is none."""
    for name, answer in answers.items():
        # Sums in another order, as threads make them, may differ a little.
        allowed = default_tolerance(dtype_name(answer.dtype))
        if compare(again[name], answer, allowed, classifier=False).outside:
            return name
    return None


def _forget_addresses(program: ExportedProgram) -> None:
    """Remove torch's notes on the graph from which a node came, in place. They have addresses of
    this process, so that two programs of one model would differ in them."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("from_node", None)
