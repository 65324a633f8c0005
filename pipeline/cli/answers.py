"""Code that all commands share: common options such as `--json`, and the output of answers."""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from soa.text import plain

if TYPE_CHECKING:
    from pipeline.building import Show
    from pipeline.report import Part
    from registry.store import Registry
    from runtime.opening import Opened


@dataclass(frozen=True)
class Answer:
    """The result of a command: `data` for machines, `shown` for people."""

    data: object
    """The value that `--json` prints."""
    shown: Iterable[Part] = ()
    """Lines and tables. A generator is not run if the answer is JSON."""
    passed: bool = True
    """If False, the exit status is 1."""


def command(
    name: str | None = None, *, registry: bool = True
) -> Callable[[Callable[..., Answer | None]], click.Command]:
    """Returns a decorator that makes a function a command, with the options that all commands have.

    The answer of the function is printed as JSON or for people; None prints nothing. `name`: that
    of the command, by default the function's. With `registry`, the command has the option
    `--registry`, and the function gets the opened registry as the argument `registry`.
    """

    def decorate(function: Callable[..., Answer | None]) -> click.Command:
        @functools.wraps(function)
        def run_and_print(
            as_json: bool, quiet: bool, verbose: bool, registry_uri: str | None = None, **rest: Any
        ) -> None:
            click.get_current_context().meta.update(quiet=quiet, verbose=verbose, as_json=as_json)
            if verbose:
                logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
            if registry:
                from registry.store import Registry

                rest["registry"] = Registry(registry_uri)
            answer = function(**rest)
            if answer is not None:
                print_answer(answer)

        click_command = click.command(name)(run_and_print)
        if registry:
            click_command.params.append(
                click.Option(
                    ["--registry", "registry_uri"],
                    metavar="URI",
                    help="MLflow tracking URI of the registry: sqlite:///FILE, http://HOST:PORT, … "
                    "Default: $PIPELINE_REGISTRY, else an SQLite file in ./pipeline-registry.",
                )
            )
        click_command.params += [
            click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
            click.Option(["-q", "--quiet"], is_flag=True, help="Do not show the progress."),
            click.Option(
                ["-v", "--verbose"], is_flag=True, help="Show logs, and where an error comes from."
            ),
        ]
        return click_command

    return decorate


def print_answer(answer: Answer) -> None:
    """Print an answer, as JSON if the user asked for that. Exit with 1 if it did not pass."""
    context = click.get_current_context()
    if context.params["as_json"]:
        _print_json(answer.data)
    else:
        from pipeline.report import show

        show(answer.shown)
    if not answer.passed:
        context.exit(1)


def fail(text: str, code: str) -> NoReturn:
    """Print an error with its code on stderr, and exit with 1. If the user asked for JSON and no
    answer has been printed yet, also print the error as JSON on stdout."""
    for line in f"pipeline: {text} [{code}]".split("\n"):  # a config error has a line per mistake
        complain(line)
    if is_option_set("verbose"):
        for line in traceback.format_exc().splitlines():
            complain(line)
    context = click.get_current_context()
    if is_option_set("as_json"):
        _print_json({"error": {"code": code, "message": text}})
    context.exit(1)


def _print_json(data: object) -> None:
    """Print a JSON value. A command prints only one, so this also unsets `--json`."""
    click.get_current_context().meta["as_json"] = False
    click.echo(json.dumps(data, indent=1))  # ASCII only


html_option: Callable[[Any], Any] = click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Also write an HTML page, which needs no other file.",
)  # fmt: skip


def write_page(html: Path | None, make_page: Callable[[], str]) -> list[str]:
    """Make a page and write it to the file `html`. Returns the line that says so, in a list. If
    `html` is None, do nothing and return []."""
    from soa.files import write_whole

    if html is None:
        return []
    text = make_page()
    html.parent.mkdir(parents=True, exist_ok=True)
    write_whole(html, text)
    return [f"wrote {html}"]


def open_ref(ref: str, registry: Registry) -> Opened:
    """Open the version that a REF names in test mode, so that it need not be promoted."""
    from runtime.opening import Opening, open_version

    return open_version(Opening(ref, mode="test", registry=registry))


def is_option_set(name: Literal["quiet", "verbose", "as_json"]) -> bool:
    """True if the running command was called with this option. False if no command is running."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(name))


def say(text: object) -> None:
    """Print a line about the progress on stderr, unless the command was called with `--quiet`."""
    if not is_option_set("quiet"):
        complain(text)


def make_say() -> Callable[[object], None]:
    """Returns a function that does what `say` does, for other threads: there, click does not know
    the running command and its options."""
    return (lambda text: None) if is_option_set("quiet") else complain


def complain(text: object) -> None:
    """Print a line on stderr, with `--quiet` too."""
    from pipeline.report import write

    write(text, err=True)


def has_live_progress() -> bool:
    """True if progress is shown live: stderr must be a terminal, whose lines are overwritten, and
    UTF-8, and the command must not be called with `--quiet`, `--verbose` or `--json`."""
    if not sys.stderr.isatty() or sys.stderr.encoding.lower() != "utf-8":
        return False
    return not (is_option_set("quiet") or is_option_set("verbose") or is_option_set("as_json"))


@contextmanager
def show_steps() -> Iterator[Show]:
    """Yields a function that makes a context manager, `show(name, before)`: inside, a line below
    all others shows the step `name` and the time spent. `before`: the seconds that the step took
    before, which are shown as an estimate, or None. Without live progress, nothing is shown."""
    if not has_live_progress():
        yield lambda name, before: nullcontext()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    @contextmanager
    def show_step(name: str, before: float | None) -> Iterator[None]:
        estimate = "" if before is None else f", about {format_duration(before)}:"
        task = bars.add_task(plain(name) + estimate)
        try:
            yield
        finally:
            bars.remove_task(task)
            bars.refresh()

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    # The display is updated only once a second, so that it hardly disturbs time measurements here.
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=1, redirect_stdout=False
    ) as bars:
        yield show_step


def format_duration(seconds: float) -> str:
    """Returns a duration as text: `99 s`; in minutes from 100 s on: `2 min`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Number(click.FloatRange):
    """A finite number in a range. click alone accepts nan, which is neither below nor above."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
