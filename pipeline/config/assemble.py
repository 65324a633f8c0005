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
from stages.reference import Arrays, check_inputs, random_inputs, read_more_rows, read_rows


def source_of(config: Config) -> ModelSource:
    """Returns what the stages need to build the config's model: its file or factory as an absolute
    path, its weights, and how its inputs are made from the blocks. Raises ValueError if a file that
    the config names does not exist."""
    model = config.model

    def path_of(written: str | None) -> Path | None:
        return None if written is None else config.file(written)

    return ModelSource(
        factory=None if model.factory is None else config.factory(model.factory),
        program=path_of(model.program),
        torchscript=path_of(model.torchscript),
        onnx=path_of(model.onnx),
        trees=path_of(model.trees),
        kwargs=model.kwargs,
        weights=path_of(model.weights),
        weights_prefix=model.weights_prefix,
        preprocess=tuple(
            features_of(block.preprocess, config.members(block)) if block.preprocess else None
            for block in config.inputs
            if not block.mask
        )
        # The signature has one block more for each jagged collection: its offsets.
        + (None,) * len(config.signature().jagged),
        padding=_make_padding(config),
        arrangement=_make_arrangement(config),
    )


def _make_arrangement(config: Config) -> Arrangement:
    """Returns how the model is called: with tensors, a dict or a list, and with which order of the
    axes of each input and output."""
    return Arrangement(
        inputs=tuple(Order(block.permute, block.flatten) for block in config.inputs),
        outputs=tuple(Order(block.permute) for block in config.outputs),
        takes=config.model.takes,
        names=tuple(block.name for block in config.inputs),
    )


def _make_padding(config: Config) -> tuple[int | Padding, ...]:
    """Returns for each input of the model how it is made from the blocks of the signature: the
    index of its block, or a `Padding` if the input is jagged or a mask. If the signature has no
    jagged block, returns (): then the inputs are the blocks."""
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
    """Returns the tolerance of each output, by name: what the config says, else the default for the
    output's dtype or for the precision of the computation, whichever is larger."""
    tolerances: dict[str, Tolerance] = {}
    for output, bound in zip(config.outputs, signature.outputs, strict=True):
        stated = output.tolerance
        default = default_tolerance(bound.plan.dtypes[0])
        if default.rtol:  # it is 0 for integers and booleans: these agree exactly in any precision
            of_precision = precision_tolerance(config.precision)
            default = max(default, of_precision, key=lambda tolerance: tolerance.rtol)
        tolerances[output.name] = Tolerance(
            default.atol if stated is None else stated.atol,
            default.rtol if stated is None else stated.rtol,
            config.gates.max_outside,
        )
    return tolerances


def reference_inputs(config: Config, signature: Signature) -> Arrays:
    """Returns the inputs on which the reference is computed: from the file or the factory that the
    config names, else random. Raises ReferenceDataError if the factory fails."""
    settings = config.reference
    if settings.file is not None:
        return read_rows(signature, config.file(settings.file))
    if settings.factory is None:
        return random_inputs(signature, settings.seed, dict(settings.ranges))
    factory = config.factory(settings.factory)
    make_arrays = load_callable(factory)
    rows = {dim: signature.ranges[dim].proven for dim in signature.dims}
    try:
        arrays = make_arrays(rows=rows, seed=settings.seed)
    except Exception as error:
        raise ReferenceDataError(
            f"{factory} failed: {type(error).__name__}: {str(error).strip()}"
        ) from error
    return check_inputs(signature, arrays)


def stated_columns(config: Config, signature: Signature) -> frozenset[str]:
    """Returns the names of the input columns whose values the user chose: all input columns if the
    config names a file or a factory, else those in `ranges`."""
    if config.reference.file is None and config.reference.factory is None:
        return frozenset(config.reference.ranges)
    return frozenset(
        column.name
        for name in signature.input_collections
        for column in signature.layouts[name].columns
    )


def further_inputs(config: Config, signature: Signature) -> Arrays | None:
    """Returns rows of the reference file that `reference_inputs` leaves unused. Returns None if the
    config names no file, if no rows are left, and for jagged rows or several row dimensions."""
    file = config.reference.file
    return None if file is None else read_more_rows(signature, config.file(file))


def reference_fingerprint(config: Config) -> dict[str, str]:
    """Returns what the reference inputs depend on: the settings as JSON, and the digest of the file
    of rows, or of the Python file of the factory. Modules that this file imports are not included:
    they are known only after it has run."""
    parts = {"settings": config.reference.model_dump_json()}
    if config.reference.file is not None:
        parts["file"] = digest_of(config.file(config.reference.file))
    if config.reference.factory is not None:
        file = config.factory(config.reference.factory).rpartition(":")[0]
        if file.endswith(".py"):
            parts["code"] = digest_of(file)
    return parts


def metrics_fingerprint(config: Config) -> dict[str, str]:
    """Returns the digests of the files that the metrics depend on besides the model and the config:
    the Python file of each metric by the name of the metric, and the labelled rows as `data`. {} if
    the config has no metrics."""
    metrics = config.gates.metrics
    if metrics is None:
        return {}
    # The part before the colon is a Python file, or a module, which is not digested.
    code = {name: factory.rpartition(":")[0] for name, factory in metric_code(config).items()}
    files = {name: Path(file) for name, file in code.items() if file.endswith(".py")}
    files["data"] = config.file(metrics.data)
    return {name: digest_of(file) for name, file in files.items()}


def metric_code(config: Config) -> dict[str, str]:
    """Returns the metric functions that are the user's own, by the name of the metric. Each is
    `/path/file.py:callable` or `module:callable`. Raises ValueError for another form."""
    metrics = config.gates.metrics
    callables = metrics.own_functions if metrics else {}
    return {name: config.factory(written) for name, written in callables.items()}
