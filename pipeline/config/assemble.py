"""Converts a config into the objects that the stages take."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.expressions import features_of
from pipeline.config.schema import Config, InputConfig
from runtime.checked import Tolerance, default_tolerance
from soa.files import digest_of
from soa.signature import Signature, offsets_of
from stages.errors import ReferenceDataError
from stages.model import (
    Arrangement,
    ModelSource,
    Order,
    Padding,
    load_callable,
    precision_tolerance,
)
from stages.reference import Arrays, check_inputs, more_rows, random_inputs, read_rows


def source_of(config: Config) -> ModelSource:
    """Where the model of a config is from, with paths of this host. Raises ValueError."""
    model = config.model

    def path(written: str | None) -> Path | None:
        return None if written is None else config.file(written)

    return ModelSource(
        factory=None if model.factory is None else config.factory(model.factory),
        program=path(model.program),
        torchscript=path(model.torchscript),
        onnx=path(model.onnx),
        trees=path(model.trees),
        kwargs=model.kwargs,
        weights=path(model.weights),
        weights_prefix=model.weights_prefix,
        preprocess=tuple(
            features_of(block.preprocess, config.members(block)) if block.preprocess else None
            for block in config.inputs
            if not block.mask
        )
        + (None,) * len(config.signature().jagged),
        padding=_padding(config),
        arrangement=_arrangement(config),
    )


def _arrangement(config: Config) -> Arrangement:
    """How the model is called: the order of the axes of its inputs and outputs."""
    return Arrangement(
        tuple(Order(block.permute, block.flatten) for block in config.inputs),
        tuple(Order(block.permute) for block in config.outputs),
        config.model.takes,
        tuple(block.name for block in config.inputs),
    )


def _padding(config: Config) -> tuple[int | Padding, ...]:
    """How each input of the model is made from the blocks: the index of its block, or a `Padding`
    if the block is jagged. () if no block is jagged: then the inputs are the blocks."""
    signature = config.signature()
    if not signature.jagged:
        return ()
    index_of = {bound.name: i for i, bound in enumerate(signature.inputs)}

    def index_or_padding(block: InputConfig) -> int | Padding:
        jagged = config.jagged(block)
        if jagged is None:
            return index_of[block.name]
        offsets = index_of[offsets_of(block.collection)]
        items = None if block.mask else index_of[block.name]
        pad = block.pad or 0.0
        if block.preprocess and block.pad is None:
            pad = block.preprocess.pad
        return Padding(offsets, jagged.length, items, pad, block.shape, block.dtype or "float32")

    return tuple(map(index_or_padding, config.inputs))


def tolerances_of(config: Config, signature: Signature) -> dict[str, Tolerance]:
    """The tolerance of each output: from the config, else the default for dtype and precision."""
    tolerances: dict[str, Tolerance] = {}
    for output, bound in zip(config.outputs, signature.outputs, strict=True):
        stated = output.tolerance
        of_dtype = default_tolerance(bound.plan.dtypes[0])
        reduced = precision_tolerance(config.precision)
        # Integers and booleans must agree exactly, whatever the precision of the computation.
        base = max(of_dtype, reduced, key=lambda t: t.rtol) if of_dtype.rtol else of_dtype
        tolerances[output.name] = Tolerance(
            base.atol if stated is None else stated.atol,
            base.rtol if stated is None else stated.rtol,
            config.gates.max_outside,
        )
    return tolerances


def reference_inputs(config: Config, signature: Signature) -> Arrays:
    """Inputs for the reference: from the file or the factory in the config, else random."""
    settings = config.reference
    if settings.file is not None:
        return read_rows(signature, config.file(settings.file))
    if settings.factory is None:
        return random_inputs(signature, settings.seed, dict(settings.ranges))
    factory = config.factory(settings.factory)
    make = load_callable(factory)
    rows = {dim: signature.ranges[dim].proven for dim in signature.dims}
    try:
        arrays = make(rows=rows, seed=settings.seed)
    except Exception as error:
        raise ReferenceDataError(
            f"{factory} failed: {type(error).__name__}: {str(error).strip()}"
        ) from error
    return check_inputs(signature, arrays)


def stated_columns(config: Config, signature: Signature) -> frozenset[str]:
    """The input columns whose values the user chose: those in `ranges`; all columns if the config
    names a file or a factory."""
    if config.reference.file is None and config.reference.factory is None:
        return frozenset(config.reference.ranges)
    return frozenset(
        column.name
        for name in signature.input_collections
        for column in signature.layouts[name].columns
    )


def further_inputs(config: Config, signature: Signature) -> Arrays | None:
    """Rows of the reference file that `reference_inputs` does not use; None if none are left."""
    file = config.reference.file
    return None if file is None else more_rows(signature, config.file(file))


def reference_fingerprint(config: Config) -> dict[str, str]:
    """The settings that the reference inputs depend on, and the digest of the file of rows or of
    the factory. Modules that a factory imports are only known after it has run."""
    parts = {"settings": config.reference.model_dump_json()}
    if config.reference.file is not None:
        parts["file"] = digest_of(config.file(config.reference.file))
    if config.reference.factory is not None:
        file = config.factory(config.reference.factory).rpartition(":")[0]
        if file.endswith(".py"):
            parts["code"] = digest_of(file)
    return parts


def metrics_fingerprint(config: Config) -> dict[str, str]:
    """Digests of the files that metrics depend on besides the model and the config."""
    metrics = config.gates.metrics
    if metrics is None:
        return {}
    code = {name: factory.rpartition(":")[0] for name, factory in metric_code(config).items()}
    files = {name: Path(file) for name, file in code.items() if file.endswith(".py")}
    files["data"] = config.file(metrics.data)
    return {name: digest_of(file) for name, file in files.items()}


def metric_code(config: Config) -> dict[str, str]:
    """For each metric with a callable of the user: the callable, in the form of a factory."""
    metrics = config.gates.metrics
    callables = metrics.own_functions if metrics else {}
    return {name: config.factory(written) for name, written in callables.items()}
