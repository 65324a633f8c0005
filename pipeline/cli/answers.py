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

    The answer of the function is printed as JSON or for people; None prints nothing. If `registry`,
    the function gets the opened registry of `--registry` as the argument `registry`.
    """

    def decorate(function: Callable[..., Answer | None]) -> click.Command:
        @functools.wraps(function)
        def answered(
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
                give(answer)

        click_command = click.command(name)(answered)
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


def give(answer: Answer) -> None:
    """Print the answer, as JSON if the user asked for that; exit with 1 if it did not pass."""
    context = click.get_current_context()
    if context.params["as_json"]:
        _give_json(answer.data)
    else:
        from pipeline.report import show

        show(answer.shown)
    if not answer.passed:
        context.exit(1)


def fail(text: str, code: str) -> NoReturn:
    """Print an error with its code, and exit with 1. If a JSON answer was printed before, the error
    is not printed as JSON."""
    for line in f"pipeline: {text} [{code}]".split("\n"):  # a config error has a line per mistake
        complain(line)
    if asked("verbose"):
        for line in traceback.format_exc().splitlines():
            complain(line)
    context = click.get_current_context()
    if asked("as_json"):
        _give_json({"error": {"code": code, "message": text}})
    context.exit(1)


def _give_json(data: object) -> None:
    """Print a JSON value. A command prints only one, so this also turns off JSON output."""
    click.get_current_context().meta["as_json"] = False
    click.echo(json.dumps(data, indent=1))  # ASCII only


html_option: Callable[[Any], Any] = click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Also write an HTML page, which needs no other file.",
)  # fmt: skip


def write_page(html: Path | None, make_page: Callable[[], str]) -> list[str]:
    """Make a page and write it to `html`; without `html`, do neither. Returns the lines that report
    it."""
    from soa.files import write_whole

    if html is None:
        return []
    text = make_page()
    html.parent.mkdir(parents=True, exist_ok=True)
    write_whole(html, text)
    return [f"wrote {html}"]


def opened_at(ref: str, registry: Registry) -> Opened:
    """Open a version to show or to measure it, promoted or not."""
    from runtime.opening import Opening, open_version

    return open_version(Opening(ref, mode="test", registry=registry))


def asked(name: Literal["quiet", "verbose", "as_json"]) -> bool:
    """True if the running command was called with this option."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(name))


def say(text: object) -> None:
    """Print a line about the progress on stderr, unless `--quiet`."""
    if not asked("quiet"):
        complain(text)


def sayer() -> Callable[[object], None]:
    """`say` for other threads, in which click does not know the running command."""
    return (lambda text: None) if asked("quiet") else complain


def complain(text: object) -> None:
    """Print a line about a problem on stderr."""
    from pipeline.report import write

    write(text, err=True)


def on_terminal() -> bool:
    """True if progress is shown live. This needs a terminal, whose lines it overwrites, and UTF-8
    for its characters."""
    if not sys.stderr.isatty() or sys.stderr.encoding.lower() != "utf-8":
        return False
    return not (asked("quiet") or asked("verbose") or asked("as_json"))


@contextmanager
def steps() -> Iterator[Show]:
    """Yields a function that shows a running step below the other lines, with the time that it may
    take and the time spent. The display is removed at the end; without a terminal there is none."""
    if not on_terminal():
        yield lambda name, before: nullcontext()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    @contextmanager
    def show_step(name: str, before: float | None) -> Iterator[None]:
        estimate = "" if before is None else f", about {clock(before)}:"
        task = bars.add_task(plain(name) + estimate)
        try:
            yield
        finally:
            bars.remove_task(task)
            bars.refresh()

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    # The display is updated once a second: so it hardly disturbs time measurements here.
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=1, redirect_stdout=False
    ) as bars:
        yield show_step


def clock(seconds: float) -> str:
    """A duration as text: in seconds, and from 100 s on in minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Number(click.FloatRange):
    """A finite number in a range. click alone would accept nan, since nan passes comparisons."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
