"""The `pipeline` command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, NoReturn

import click

from engines.errors import FULL_DISK
from pipeline.cli.answers import complain, fail
from pipeline.cli.applying import apply, drift, explain
from pipeline.cli.building import build, cxx, run, source
from pipeline.cli.checking import bench, check, validate, verify
from pipeline.cli.housekeeping import cache, export_command, gc, import_command, pull, push, rm
from pipeline.cli.init import init
from pipeline.cli.inspection import diff, doctor, ls, show, ui
from pipeline.cli.promotion import approve, history, policy, promote, rollback
from pipeline.cli.serving import deploy, serve
from pipeline.cli.signing import sign
from soa.errors import SoaPipelineError
from soa_pipeline import __version__


class _Group(click.Group):
    """A group whose help lists the commands in sections. It turns a user's error into one line on
    stderr, and the exit status 1, or 2 for wrong usage."""

    def __init__(self, *, sections: Mapping[str, Sequence[click.Command]], **rest: Any) -> None:
        super().__init__(**rest)
        self.sections = sections
        for command in chain.from_iterable(sections.values()):
            self.add_command(command)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does. A wrong option of the group itself ends the program
        with the same message as one of a command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            _refuse(ctx, error)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in sections, each with the complete first sentence of its docstring."""
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(str(c.name), c.get_short_help_str(1000).rstrip(".") + ".") for c in commands]
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of the user or of the disk ends the program with its message;
        any other error is raised."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _refuse(error.ctx or ctx, error)
        except SoaPipelineError as error:
            fail(str(error), error.code)
        except OSError as error:
            fail(_explain_disk_error(error), "disk")


def _refuse(ctx: click.Context, error: click.UsageError) -> NoReturn:
    """Print what is wrong about the command line on stderr, and exit with click's status, 2."""
    message, command = error.format_message().rstrip("."), ctx.command_path
    complain(f"{command}: {message}; see {command} --help")
    ctx.exit(error.exit_code)


def _explain_disk_error(error: OSError) -> str:
    """Returns the message for a full disk or for a path that cannot be used. Raises the error again
    if it is neither."""
    if error.errno in FULL_DISK:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: free some space and run again"
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    raise error


registry = _Group(
    name="registry",
    help="Keep the registry: its policies, exports and imports, and what may be removed.",
    sections={"Commands": (policy, export_command, import_command, rm, gc, cache)},
)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    sections={
        "Build": (init, run, build, source, cxx, doctor),
        "Judge": (ls, show, check, drift, ui, promote, approve),
        "Run": (apply, deploy, serve),
        "Keep": (history, rollback, sign, pull, push, registry),
    },
)
@click.version_option(__version__, prog_name="pipeline")
def main() -> None:
    """Compile trained torch models so that they run right, without a copy, on SoA memory.

    \b
    The usual way:
      pipeline init model.py:build rows.root    write a config for your model
      pipeline run config.yaml                  build, validate, register it
      pipeline promote NAME/1 --to production   let it through the gates
      pipeline apply NAME@production F --out D  score a file F into a folder D
      python: pipeline.load("NAME@production")  run it on your own columns

    A REF is NAME (its latest version), NAME/3, NAME@production, or the path of a bundle's folder
    with a slash in it, as ./FOLDER.

    Error messages end with a code such as [bind-dtype]; docs/reference/refusals.md explains them.

    \b
    Completion of words and REFs with Tab, in bash (for zsh and fish see docs):
      eval "$(_PIPELINE_COMPLETE=bash_source pipeline)"
    """
    # MLflow with a server prints a link when a run ends, but standard output is only for answers.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


_OLD = {
    "show": (diff, explain),
    "check": (validate, bench, verify),
    "registry": registry.sections["Commands"],
}
"""Commands that are a part of another one now, by the name of that one. Until version 2, the main
group still has them, hidden from its help."""

for _now, _commands in _OLD.items():
    for _command in _commands:
        _hidden = copy(_command)
        _hidden.hidden, _hidden.epilog = True, f"This is a part of `pipeline {_now}` now."
        main.add_command(_hidden)
