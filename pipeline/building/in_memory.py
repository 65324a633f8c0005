"""One line in a notebook: compile a model for the columns that you have, without a config.

fast = pipeline.compile(net, jets)
answers = fast(jets)
"""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engines.errors import RunError, first_line
from engines.exported import quiet_torch
from engines.processes import in_fork
from pipeline.applying import Array, Source, from_awkward
from pipeline.building.run_config import build_unregistered
from pipeline.config import load_config, reference_inputs, source_of
from pipeline.errors import InitError
from pipeline.init import Request, Written, model_of, read_model, rewrite, written
from registry.bundle import Bundle
from runtime.opening import Opening, open_artifact, open_version
from runtime.session import Binding, Collections, Session
from soa.memory import (
    Collection,
    as_collection,
    columns_of,
    from_jagged,
    library_of,
    plain_arrow,
    require_column,
    to_numpy,
)
from soa.options import AT_LEAST_ONE, BY_NAME, FLAG, FUNCTION, PATH, TEXT, at_least, takes
from soa.text import number
from stages.capture import example_case
from stages.compile import TO_READ_PROGRAMS
from stages.errors import CaptureError, SourceError
from stages.model import put_in_eval_mode, with_fronts
from stages.reference import row_major_inputs

_IN_HAND: dict[str, torch.nn.Module] = {}
"""The modules that are compiled now. The children that run a user's model are forks of this
process, so they find a module here."""
_CONFIG, _ROWS, _PROGRAM = "config.yaml", "reference.npz", "model.pt2"

_ARGUMENTS = (
    (r"--(input|output) '(\w+)=([^']*)'", r'\1s={"\2": "\3"}'),
    (r"--(input|output) (\w+)=([^\s;:]+)", r'\1s={"\2": "\3"}'),
    (r"--(input|output)\b", r"\1s"),
    (r"--flatten\b", "flatten=True"),
    (r"--(rows|length) N\b", r"\1=N"),
    (r"--(rows|length|weights|kwargs|name)\b", r"\1"),
)
"""The options of `init` as regular expressions, and the arguments of `compile` in their place."""

Words = Mapping[str, str | Sequence[str]]


def in_hand(key: str) -> torch.nn.Module:
    """The factory of a module in memory, for its config."""
    return _IN_HAND[key]


class _Columns(Source):
    """Columns in memory, read as a file is."""

    def __init__(self, data: Any) -> None:
        super().__init__(Path("the data"))
        self._data = columns_of(data)
        self.columns = [*self._data]

    def head(self, names: Sequence[str], rows: int) -> dict[str, Any]:
        return {name: _to_plain(name, self._data[name])[:rows] for name in names}


def _to_plain(name: str, column: Any) -> Any:
    """A column as an array of NumPy or Arrow."""
    library = library_of(column)
    if library == "pyarrow":
        return plain_arrow(column)
    if library == "awkward":
        return from_awkward(column)
    if library == "numpy":
        return column
    return to_numpy(as_collection({name: column}))[name]


def _zip_records(columns: Mapping[str, Any]) -> Any:
    """Columns of lists as one Awkward array of records of lists."""
    import awkward as ak

    lists = {
        name: column if isinstance(column, ak.Array) else ak.from_arrow(column)
        for name, column in columns.items()
    }
    return ak.zip(lists, depth_limit=1)


@dataclass(frozen=True)
class _Result:
    """A compiled model: its config, the bundle, and the temporary folder that holds both."""

    folder: Path
    config: Written
    bundle: Bundle


class Compiled:
    """A compiled model. `compiled(data)` computes the answers to the columns of `data`.

    `session` is a session as of `pipeline.load`; `bind` and `collection` are the session's. Use it
    in a `with` block, or call `close`, to free its memory and its temporary files at once; else
    they are freed with the session.
    """

    def __init__(
        self,
        result: _Result,
        session: Session,
        net: torch.nn.Module | None,
        remove: Callable[[], None],
    ) -> None:
        """`net`: the module, if it was in memory. `remove`: deletes the temporary files."""
        self.session = session
        self._result, self._net = result, net
        self._remove = weakref.finalize(session, remove)

    def __call__(self, data: Any) -> dict[str, Array]:
        """The answers as new NumPy arrays, `(n,)` or `(n, ...)`, by the names of their columns.

        `data`: as for `as_collection`, with the columns of the data that it was compiled with. They
        are read where they lie if their memory can be bound. Raises CollectionError, BindError.
        """
        signature = self.session.signature
        inputs = self._inputs(columns_of(data))
        rows = {signature.rows_of[name]: collection.n for name, collection in inputs.items()}
        outputs = {
            name: self.session.collection(name, rows[signature.rows_of[name]])
            for name in signature.output_collections
        }
        self.session.run(inputs, outputs)
        answers: dict[str, Array] = {}
        for collection in outputs.values():
            answers |= to_numpy(collection)
        return answers

    def _inputs(self, columns: Mapping[str, Any]) -> dict[str, Collection]:
        """The collections that the model reads, by name. `columns`: those of the user's data."""
        signature = self.session.signature
        inputs: dict[str, Collection] = {}
        for name, user_names in self._result.config.columns.items():
            members = {}
            for member, user_name in user_names.items():
                require_column(user_name, [*columns])
                members[member] = columns[user_name]
            if name in signature.jagged:
                inputs |= from_jagged(_zip_records(members), signature, name)
            else:
                inputs[name] = as_collection(members, signature.layouts[name])
        return inputs

    def bind(self, inputs: Collections, outputs: Collections) -> Binding:
        """As `Session.bind`."""
        return self.session.bind(inputs, outputs)

    def collection(self, name: str, n: int) -> Collection:
        """As `Session.collection`."""
        return self.session.collection(name, n)

    def save(self, path: str | Path) -> list[Path]:
        """Write a config, the reference rows and the model, from which `pipeline run` makes a
        version with the same answers. Returns the files. Existing files are replaced.

        A module in memory is written as a program of `torch.export`, beside the config. Raises
        SourceError if torch cannot export it with a free number of rows: then write a file with a
        function that makes the module, and compile that. RunError after `close`.
        """
        if not self._remove.alive:
            raise RunError("save: the compiled model is closed: save it before")
        config = Path(path)
        rows = config.with_name(f"{config.stem}.{_ROWS}")
        program = config.with_name(f"{config.stem}.{_PROGRAM}")
        result = self._result
        source = dict(result.config.config["model"])
        config.parent.mkdir(parents=True, exist_ok=True)
        files = [config, rows]
        if self._net is not None:
            in_fork("the model", lambda say: _export_program(result, self._net, program))
            source = {k: v for k, v in source.items() if k == "takes"} | {"program": program.name}
            files.append(program)
        shutil.copyfile(result.folder / _ROWS, rows)
        rewrite(result.config, config, source, rows.name)
        return files

    def close(self) -> None:
        """Free the session's memory, and remove the temporary files."""
        self.session.close()
        self._remove()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@takes(
    InitError,
    inputs=BY_NAME.or_none,
    outputs=BY_NAME.or_none,
    weights=PATH.or_none,
    kwargs=BY_NAME.or_none,
    flatten=FLAG,
    length=AT_LEAST_ONE.or_none,
    rows=at_least(2).or_none,
    name=TEXT,
    threads=AT_LEAST_ONE.or_none,
    say=FUNCTION,
)
def compile(
    net: torch.nn.Module | str | Path,
    data: Any,
    *,
    inputs: Words | None = None,
    outputs: Words | None = None,
    weights: str | Path | None = None,
    kwargs: Mapping[str, Any] | None = None,
    flatten: bool = False,
    length: int | None = None,
    rows: int | None = None,
    name: str = "model",
    threads: int | None = None,
    say: Callable[[str], None] = print,
) -> Compiled:
    """Compile a model for the columns of `data`, and compare its answers with the model's own.

    `net`: a torch module on the CPU, or what `pipeline init` takes: `file.py:callable`, a program,
    ONNX, or boosted trees. It is not changed. `data`: what `as_collection` takes. Its first rows,
    and rows with other values in every column, are computed by both.

    Which column goes where, and in which order of axes, is found as `pipeline init` does. Where
    that is wrong, say it with the words of its options: `inputs={"x": "(n, items, features): a,b"}`
    or a list of columns, `outputs={"p": "p_b,p_c"}`, `flatten`, `length` and `rows`.

    `say` gets a few sentences: what was chosen, the largest difference, and the time beside the
    model's own. Nothing is registered, and no file stays. Raises InitError, CaptureError, and the
    error of the step that refuses the model: a model whose answers differ is never returned.

    Examples
    --------
    >>> fast = pipeline.compile(net, {"pt": pt, "eta": eta})  # doctest: +SKIP
    >>> fast({"pt": pt, "eta": eta})["output"]  # doctest: +SKIP
    """
    module = net if isinstance(net, torch.nn.Module) else None
    if module is not None:
        _require_cpu(module)
    columns = columns_of(data)  # here: a reader can be read once, and polars does not fork
    temporary = TemporaryDirectory(prefix="pipeline-compile-")
    folder = Path(temporary.name)
    request = Request(
        "in memory" if module is not None else str(net),
        Path("the data"),
        out=folder / _CONFIG,
        name=name,
        weights=Path(weights) if weights is not None else None,
        kwargs=kwargs or {},
        inputs=_format_words(inputs),
        outputs=_format_words(outputs),
        flatten=flatten,
        length=length,
        rows=rows,
    )
    progress: list[str] = []
    compiled: Compiled | None = None
    try:
        result = _build(request, module, columns, progress.append)
        compiled = Compiled(result, _open_chosen(result.bundle, threads), module, temporary.cleanup)
    except InitError as error:
        raise InitError(_name_arguments(str(error))) from None
    finally:
        if compiled is None:
            temporary.cleanup()
    for line in [*result.config.said, *_result_lines(result.bundle, progress)]:
        say(_name_arguments(line))
    return compiled


def _require_cpu(module: torch.nn.Module) -> None:
    """Raise SourceError if the module is on a GPU."""
    if any(tensor.device.type != "cpu" for tensor in module.state_dict().values()):
        raise SourceError("net is on a GPU: give net.cpu(), since its answers are computed here")


def _build(
    request: Request,
    module: torch.nn.Module | None,
    columns: Mapping[str, Any],
    say: Callable[[str], None],
) -> _Result:
    """The config and the bundle of a model for these columns, in the folder of `request.out`."""
    folder = request.out.parent
    key = str(folder)

    def build(variant: Request) -> _Result:
        config = in_fork("the model", lambda _: _make_config(variant, module, key, columns))
        return _Result(folder, config, build_unregistered(variant.out, folder / "work", say))

    for name in TO_READ_PROGRAMS:  # once here, instead of in each child that is forked
        import_module(name)
    try:
        if module is not None:
            _IN_HAND[key] = module
        try:
            return build(replace(request, independent=True))
        except CaptureError:  # it may be that its rows depend on each other
            return build(replace(request, force=True))
    finally:
        _IN_HAND.pop(key, None)


def _make_config(request: Request, module: torch.nn.Module | None, key: str, data: Any) -> Written:
    """The config of a model and its data, as `pipeline init` writes it. `key`: of the module in
    `_IN_HAND`. `data`: columns by name. Runs in a child."""
    if module is None:
        model = read_model(request.model, request.out.parent, request.weights, request.kwargs)
    else:
        source = {"factory": f"{__name__}:in_hand", "kwargs": {"key": key}}
        notes = put_in_eval_mode(module)
        model = replace(model_of(module, source), notes=notes)
    return written(model, _Columns(data), request, _take_default, request.out.parent / _ROWS)


def _format_words(by_name: Words | None) -> tuple[str, ...]:
    """Values of `inputs` or `outputs` as `pipeline init` takes them: `NAME=a,b`."""
    return tuple(
        f"{name}={words if isinstance(words, str) else ','.join(words)}"
        for name, words in (by_name or {}).items()
    )


def _name_arguments(text: str) -> str:
    """A message of `init`, with the arguments of `compile` in place of its options."""
    for option, argument in _ARGUMENTS:
        text = re.sub(option, argument, text)
    return text


def _take_default(option: str, question: str, default: str | None) -> str:
    """The default answer to a question of `init`. InitError if there is none: nobody is asked."""
    if default is None:
        raise InitError(f"nothing says {question}: give {option}")
    return default


def _open_chosen(bundle: Bundle, threads: int | None) -> Session:
    """A session of the artifact that was chosen."""
    opened = open_version(Opening(ref=bundle.path, mode="test", threads=threads))
    ((target, record),) = bundle.manifest.targets.items()
    device = torch.device("cpu")
    executable = open_artifact(opened, target, str(record.chosen), device, opened.threads)
    return Session(opened.signature, executable, device)


def _result_lines(bundle: Bundle, progress: Sequence[str]) -> list[str]:
    """Lines about the engine, the largest difference from the model's own answers, and the speed:
    those of `progress` that the race of the build wrote."""
    ((target, record),) = bundle.manifest.targets.items()
    worst = record.candidates[str(record.chosen)].worst.values()
    largest = number(max((deviation.max_abs for deviation in worst), default=0.0))
    prefix = f"  {target}: "
    return [
        f"{record.chosen}: the largest difference from the model's own answers is {largest}",
        *(line.removeprefix(prefix) for line in progress if line.startswith(prefix)),
    ]


def _export_program(result: _Result, net: torch.nn.Module | None, path: Path) -> None:
    """Write the module as a program with a free number of rows. Runs in a child."""
    assert net is not None
    config = load_config(result.folder / _CONFIG)
    signature = config.signature()
    case = example_case(signature)
    calls: list[tuple[Any, ...]] = []
    net.eval()
    handle = net.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    rows = row_major_inputs(signature, reference_inputs(config, signature), case)
    with torch.no_grad():
        with_fronts(net, source_of(config))(*rows)
    handle.remove()
    arguments = calls[0]
    try:
        with quiet_torch():
            free_rows = _free_dimensions(arguments, {*case.values()})
            program = torch.export.export(net, arguments, dynamic_shapes=free_rows, strict=False)
            torch.export.save(program, path)
    except Exception as error:  # torch.export raises many types
        raise SourceError(
            f"torch cannot save the module as a program ({first_line(error)}): write a file with a "
            "function that makes it, and compile file.py:function"
        ) from error


def _free_dimensions(value: Any, sizes: set[int]) -> Any:
    """`dynamic_shapes` of torch.export for an argument: each dimension of one of these sizes is
    free. If another dimension has such a size by chance, torch finds out that it is fixed (AUTO).
    """
    if isinstance(value, Mapping):
        return {key: _free_dimensions(inner, sizes) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_free_dimensions(inner, sizes) for inner in value)
    return {i: torch.export.Dim.AUTO for i, size in enumerate(value.shape) if size in sizes}
