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
from engines.processes import run_in_fork
from pipeline.applying import Array, Source, from_awkward
from pipeline.building.run_config import build_unregistered
from pipeline.config import load_config, reference_inputs, source_of
from pipeline.errors import InitError
from pipeline.init import Request, Written, describe_model, read_model, rewrite, write_config_for
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
"""The modules that are being compiled, by key. The child processes that run a user's model are
forks of this process, so they find the module here."""
_CONFIG, _ROWS, _PROGRAM = "config.yaml", "reference.npz", "model.pt2"

_ARGUMENTS = (
    (r"--(input|output) '(\w+)=([^']*)'", r'\1s={"\2": "\3"}'),
    (r"--(input|output) (\w+)=([^\s;:]+)", r'\1s={"\2": "\3"}'),
    (r"--(input|output)\b", r"\1s"),
    (r"--flatten\b", "flatten=True"),
    (r"--(rows|length) N\b", r"\1=N"),
    (r"--(rows|length|weights|kwargs|name)\b", r"\1"),
)
"""Pairs for `re.sub`: an option of `pipeline init` in a message, and the argument of `compile` that
replaces it."""

Words = Mapping[str, str | Sequence[str]]
"""By name of an input or output: the value of an option of `init`, or a list of columns."""


def in_hand(key: str) -> torch.nn.Module:
    """Return the module that is being compiled under this key. Its config names this function as
    the factory of the model."""
    return _IN_HAND[key]


class _Columns(Source):
    """Columns in memory that `pipeline init` reads like those of a file."""

    def __init__(self, data: Any) -> None:
        super().__init__(Path("the data"))
        self._data = columns_of(data)
        self.columns = [*self._data]

    def head(self, names: Sequence[str], rows: int) -> dict[str, Any]:
        return {name: _to_plain(name, self._data[name])[:rows] for name in names}


def _to_plain(name: str, column: Any) -> Any:
    """Convert a column of any library to an array of NumPy or Arrow."""
    library = library_of(column)
    if library == "pyarrow":
        return plain_arrow(column)
    if library == "awkward":
        return from_awkward(column)
    if library == "numpy":
        return column
    return to_numpy(as_collection({name: column}))[name]


def _zip_records(columns: Mapping[str, Any]) -> Any:
    """Join columns of lists into one Awkward array, in which each row is a record of lists."""
    import awkward as ak

    lists = {
        name: column if isinstance(column, ak.Array) else ak.from_arrow(column)
        for name, column in columns.items()
    }
    return ak.zip(lists, depth_limit=1)


@dataclass(frozen=True)
class _Result:
    """What `_build` makes: a config and its bundle, and the temporary `folder` that holds both."""

    folder: Path
    config: Written
    bundle: Bundle


class Compiled:
    """A compiled model. `compiled(data)` computes the answers to the columns of `data`.

    `session` is a session like that of `pipeline.load`; `bind` and `collection` are its methods. To
    free the memory and the temporary files at once, use the model in a `with` block, or call
    `close`. Otherwise they are freed when nothing refers to the session any more.
    """

    def __init__(
        self,
        result: _Result,
        session: Session,
        net: torch.nn.Module | None,
        remove: Callable[[], None],
    ) -> None:
        """`net`: the module, or None if the model came from a file. `remove`: a function that
        deletes the temporary files."""
        self.session = session
        self._result, self._net = result, net
        self._remove = weakref.finalize(session, remove)

    def __call__(self, data: Any) -> dict[str, Array]:
        """Run the model, and return its answers by column: new NumPy arrays, `(n,)` or `(n, ...)`.

        `data`: anything that `as_collection` takes, with the same columns as the data that the
        model was compiled with. Columns are read in place if their memory can be bound. Raises
        CollectionError or BindError if they do not fit the model.
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
        """Make the collections that the model reads from the user's columns, and return them by
        name. CollectionError if a column is missing."""
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
        """Bind collections for repeated calls, as `Session.bind` does."""
        return self.session.bind(inputs, outputs)

    def collection(self, name: str, n: int) -> Collection:
        """Make a collection of `n` rows with the layout `name`, as `Session.collection` does."""
        return self.session.collection(name, n)

    def save(self, path: str | Path) -> list[Path]:
        """Write a config to `path`, and the reference rows and the model beside it. `pipeline run`
        on that config makes a version with the same answers. Returns the files; existing ones are
        replaced.

        A module in memory is written as a program of `torch.export`. Raises SourceError if torch
        cannot export it with a free number of rows: then write a file with a function that makes
        the module, and compile that. Raises RunError after `close`.
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
            run_in_fork("the model", lambda say: _export_program(result, self._net, program))
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

    `net`: a torch module on the CPU, or anything that `pipeline init` takes: `file.py:callable`, a
    program, ONNX, or boosted trees. It is not changed. `data`: anything that `as_collection` takes.
    The answers are compared on its first rows, and on rows with other values in every column.

    `pipeline init` finds which column each input reads, and in which order of axes. Where that is
    wrong, state it in the form of its options: `inputs={"x": "(n, items, features): a,b"}` or a
    list of columns, `outputs={"p": "p_b,p_c"}`, `flatten`, `length` and `rows`.

    `say` gets a few sentences: what was chosen, the largest difference, and the speed compared with
    the model's own. Nothing is registered, and no file stays. Raises InitError, CaptureError, or
    the error of the step that refuses the model. A model whose answers differ is never returned.

    Examples
    --------
    >>> fast = pipeline.compile(net, {"pt": pt, "eta": eta})  # doctest: +SKIP
    >>> fast({"pt": pt, "eta": eta})["output"]  # doctest: +SKIP
    """
    module = net if isinstance(net, torch.nn.Module) else None
    if module is not None:
        _require_cpu(module)
    # Not in a child process: a reader can be read only once, and polars does not work in a fork.
    columns = columns_of(data)
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
    """Write the config of a model for these columns, and build its bundle, both in the folder of
    `request.out`. `module`: the model, or None if the request names a file.

    The first attempt assumes that rows do not depend on each other. If the capture fails, a second
    attempt does without that assumption, and replaces the files of the first.
    """
    folder = request.out.parent
    key = str(folder)

    def build(variant: Request) -> _Result:
        config = run_in_fork("the model", lambda _: _write_config(variant, module, key, columns))
        return _Result(folder, config, build_unregistered(variant.out, folder / "work", say))

    for name in TO_READ_PROGRAMS:  # once here, instead of in each child that is forked
        import_module(name)
    try:
        if module is not None:
            _IN_HAND[key] = module
        try:
            return build(replace(request, independent=True))
        except CaptureError:  # perhaps because its rows depend on each other
            return build(replace(request, force=True))  # `force`: replace the config
    finally:
        _IN_HAND.pop(key, None)


def _write_config(request: Request, module: torch.nn.Module | None, key: str, data: Any) -> Written:
    """Write the config of a model and its data, as `pipeline init` does, and return it.

    `module`: the model, or None if the request names a file. `key`: the key of the module in
    `_IN_HAND`. `data`: columns by name. Runs in a child process.
    """
    if module is None:
        model = read_model(request.model, request.out.parent, request.weights, request.kwargs)
    else:
        source = {"factory": f"{__name__}:in_hand", "kwargs": {"key": key}}
        notes = put_in_eval_mode(module)
        model = replace(describe_model(module, source), notes=notes)
    return write_config_for(
        model, _Columns(data), request, _take_default, request.out.parent / _ROWS
    )


def _format_words(by_name: Words | None) -> tuple[str, ...]:
    """Format `inputs` or `outputs` as options of `pipeline init`: `{"x": ["a", "b"]}` becomes
    `("x=a,b",)`."""
    options = []
    for name, words in (by_name or {}).items():
        columns = words if isinstance(words, str) else ",".join(words)
        options.append(f"{name}={columns}")
    return tuple(options)


def _name_arguments(text: str) -> str:
    """Replace the options of `pipeline init` in a message by the arguments of `compile`: `--rows N`
    becomes `rows=N`."""
    for option, argument in _ARGUMENTS:
        text = re.sub(option, argument, text)
    return text


def _take_default(option: str, question: str, default: str | None) -> str:
    """Answer a question of `pipeline init` by its default, since nobody can be asked. InitError if
    there is none."""
    if default is None:
        raise InitError(f"nothing says {question}: give {option}")
    return default


def _open_chosen(bundle: Bundle, threads: int | None) -> Session:
    """Open a session of the artifact that the build has chosen. `threads`: None for the default."""
    opened = open_version(Opening(ref=bundle.path, mode="test", threads=threads))
    ((target, record),) = bundle.manifest.targets.items()
    device = torch.device("cpu")
    executable = open_artifact(opened, target, str(record.chosen), device, opened.threads)
    return Session(opened.signature, executable, device)


def _result_lines(bundle: Bundle, progress: Sequence[str]) -> list[str]:
    """Return lines about the engine, the largest difference from the model's own answers, the
    speed, and that the independence of rows is only tried. `progress`: the lines of the build; the
    last two are among them."""
    ((target, record),) = bundle.manifest.targets.items()
    worst = record.candidates[str(record.chosen)].worst.values()
    largest = number(max((deviation.max_abs for deviation in worst), default=0.0))
    prefix, tried = f"  {target}: ", "that rows are independent is tried"
    notes = [line.strip().removeprefix("note: ") for line in progress]
    return [
        *(note for note in notes if note.startswith(tried)),
        f"{record.chosen}: the largest difference from the model's own answers is {largest}",
        *(line.removeprefix(prefix) for line in progress if line.startswith(prefix)),
    ]


def _export_program(result: _Result, net: torch.nn.Module | None, path: Path) -> None:
    """Export the module with a free number of rows, and write the program to `path`. Runs in a
    child process. SourceError if torch cannot export it.

    The module may have a front that prepares its arguments. So the reference rows run through the
    front, and a hook notes the arguments with which the module itself is called.
    """
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
    """Return the `dynamic_shapes` of torch.export for an argument, which is a tensor, or a mapping,
    tuple or list of arguments. Each dimension whose size is in `sizes` is free.

    A dimension may have such a size by chance, and be fixed in the model. torch finds that out,
    because the dimensions are declared as AUTO.
    """
    if isinstance(value, Mapping):
        return {key: _free_dimensions(inner, sizes) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_free_dimensions(inner, sizes) for inner in value)
    return {i: torch.export.Dim.AUTO for i, size in enumerate(value.shape) if size in sizes}
