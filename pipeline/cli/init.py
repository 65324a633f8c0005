"""The command that writes a first config."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import Answer, command

if TYPE_CHECKING:
    from pipeline.init import Ask

_FILE = click.Path(dir_okay=False, path_type=Path)


@command(registry=False)
@click.argument("model", metavar="MODEL")
@click.argument("data", type=_FILE, required=False)
@click.option("--out", type=_FILE, default="config.yaml", show_default=True, help="The config.")
@click.option("--name", help="The registered model's name.")
@click.option("--weights", type=_FILE, help="Weights for a factory's model.")
@click.option("--kwargs", default="{}", metavar="JSON", help="The arguments of the factory.")
@click.option("--weaver", type=_FILE, help="weaver's data config (YAML) or preprocess.json.")
@click.option("--tree", help="The tree of a ROOT file.")
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME=COLUMN,…",
    help="The columns of an argument of forward; ranges a0 .. a9, patterns a*; `mask` is the mask "
    "of jagged columns. Axes in front: 'x=(n, items, features): a,b'. May be repeated.",
)  # fmt: skip
@click.option(
    "--output", "outputs", multiple=True, metavar="NAME=COLUMN,…",
    help="Names for the columns of an output. May be repeated.",
)  # fmt: skip
@click.option("--flatten", is_flag=True, help="Make a row of each item of jagged columns.")
@click.option("--length", type=click.IntRange(1), help="Items of a jagged row that the model gets.")
@click.option("--rows", type=click.IntRange(2), help="The most rows of a call.")
@click.option("--engine", "engines", multiple=True, help="Only this engine; may be repeated.")
@click.option("--yes", is_flag=True, help="Ask nothing: take the default of each question.")
@click.option("--force", is_flag=True, help="Replace existing files.")
def init(kwargs: str, yes: bool, **options: Any) -> Answer:
    """Write a config for MODEL, whose input rows are in DATA.

    MODEL is file.py:callable or module:callable, which returns a torch module, or a file: .pt2,
    TorchScript (.ts, .pt), .onnx, boosted trees (.json, .ubj, .txt). DATA is .root, .parquet, .h5
    or .npz. What MODEL and DATA do not show is asked on a terminal, or given by an option.
    """
    from pipeline.init import Request
    from pipeline.init import init as write
    from soa.records import parse_json

    try:
        values = parse_json(kwargs)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise click.BadParameter('expected a JSON object, as {"hidden": 48}', param_hint="--kwargs")
    with redirect_stdout(sys.stderr):  # the user's factory may print
        written = write(Request(kwargs=values, **options), _make_ask(yes))
    files = written.files
    lines = [*written.said, *(f"wrote {path}" for path in files), f"next: pipeline run {files[0]}"]
    return Answer({"files": [str(path) for path in files]}, lines)


def _make_ask(yes: bool) -> Ask:
    """Returns a function that asks the user on the terminal. With `yes`, or if stdin is no
    terminal, the function returns the default instead; if there is none, it raises InitError."""
    from pipeline.errors import InitError

    def ask(flag: str, question: str, default: str | None) -> str:
        if sys.stdin.isatty() and not yes:
            return str(click.prompt(question, default=default, err=True))
        if default is None:
            raise InitError(f"nothing says {question}: give {flag}")
        return default

    return ask
