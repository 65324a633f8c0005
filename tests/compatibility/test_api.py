"""Public names and signatures stay as they are; so do the names and options of the commands.

Public are the names of `pipeline` and `soa_runtime`, and the four of `engines` from which an engine
of one's own is made. `api.txt` has a line for each name, parameter and option. New ones are added
to it by `python -m tests.compatibility.test_api`, which removes no line before the next major
version. Every public name of 1.0 can still be imported (`names-1.0.txt`).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import BaseModel

from pipeline.cli.main import main
from soa_pipeline import PACKAGES, __version__

RECORD = Path(__file__).with_name("api.txt")
PLUGIN = ("Engine", "Executable", "NotApplicableError", "Target")
FACES = {"pipeline": import_module("pipeline").__all__, "engines": PLUGIN}
BEFORE = RECORD.with_name("names-1.0.txt")
WORKER = Path(__file__).parents[2] / "packages" / "soa-runtime" / "soa_runtime" / "__init__.py"
HIDDEN = ("_", "model_")  # `model_` is of pydantic
STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def ours(thing: Any) -> bool:
    """Whether a class or function is defined in one of our packages."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] in PACKAGES


def parameters(name: str, function: Any) -> Iterator[str]:
    """A line for each parameter, without its type: a wider type breaks no caller."""
    place = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        word = f"{STARS.get(parameter.kind, '')}{parameter.name}"
        if parameter.kind in POSITIONAL:
            word = f"{place} {word}"
            place += 1
        if parameter.default is not parameter.empty:
            word = f"{word} = {value(parameter.default)}"
        yield f"{name}({word})"


def value(default: Any) -> str:
    """A default value as text; `...` for an object whose text is only its address."""
    text = repr(default)
    return "..." if re.search(r" at 0x|<factory>", text) else text


def bases(kind: type) -> Iterator[str]:
    """The names of a class's public bases; for a base of ours that is not public, its own bases."""
    public = {getattr(import_module(face), name) for face, names in FACES.items() for name in names}
    for base in kind.__bases__:
        if ours(base) and base not in public:
            yield from bases(base)
        elif base is not object:
            yield base.__name__


def of_class(name: str, kind: type) -> Iterator[str]:
    """The lines of a class: its bases, how it is made, its members and fields."""
    yield f"{name} ({', '.join(bases(kind))})"
    if issubclass(kind, BaseModel):
        kind.model_rebuild()  # pydantic makes its signature at first use
    if not issubclass(kind, BaseException):
        yield from parameters(name, kind)
    classes = [base for base in kind.__mro__ if ours(base)]
    members = {member for base in classes for member in vars(base)}
    for member in sorted(member for member in members if not member.startswith(HIDDEN)):
        value_of = inspect.getattr_static(kind, member)
        if isinstance(value_of, classmethod | staticmethod):
            value_of = getattr(kind, member)
        if inspect.isfunction(value_of) or inspect.ismethod(value_of):
            yield f"{name}.{member}()"
            yield from parameters(f"{name}.{member}", value_of)
        else:
            yield f"{name}.{member}"
    for field in sorted({f for base in classes for f in getattr(base, "__annotations__", {})}):
        if not field.startswith(HIDDEN) and field not in kind.__dict__:
            yield f"{name}.{field}"


def of_worker() -> Iterator[str]:
    """Names of soa-runtime; each is one of soa-pipeline's."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from (f"soa_runtime.{name}" for name in ast.literal_eval(node.value))


def of_faces() -> Iterator[str]:
    """The lines of all public names; one that is public twice is described where it comes first."""
    first: dict[int, str] = {}
    for face, names in FACES.items():
        for short in names:
            name, thing = f"{face}.{short}", getattr(import_module(face), short)
            home = first.setdefault(id(thing), name)
            if home != name:
                yield f"{name} = {home}"
            elif inspect.isclass(thing) and ours(thing):
                yield from of_class(name, thing)
            elif inspect.isfunction(thing):
                yield f"{name}()"
                yield from parameters(name, thing)
            else:
                yield name


def of_command(name: str, command: click.Command) -> Iterator[str]:
    """The lines of a command and of those within it."""
    yield name
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            shape = " ".join(parameter.opts + parameter.secondary_opts)
        else:
            shape = str(parameter.name).upper()
        yield f"{name} {shape}{' (required)' if parameter.required else ''}"
    for word, inner in getattr(command, "commands", {}).items():
        yield from of_command(f"{name} {word}", inner)


def public() -> set[str]:
    """The lines of this version."""
    return {*of_faces(), *of_worker(), *of_command("pipeline", main)}


def recorded() -> tuple[str, set[str]]:
    """The version since which the names are public, and the lines of api.txt."""
    head, *lines = RECORD.read_text().splitlines()
    return head.split()[-1], set(lines)


def demanded(new: set[str], old: set[str]) -> set[str]:
    """The new lines that make an existing call fail: required parameters of existing names."""
    callables = {line.partition("(")[0] for line in old}
    needs = re.compile(r"(?P<name>[\w.]+)\((\d+ )?\w+\)")

    def asks_for_more(line: str) -> bool:
        if line.endswith("(required)"):  # a parameter of a command
            return line.rpartition(" (")[0].rpartition(" ")[0] in old
        without_default = needs.fullmatch(line)
        return without_default is not None and without_default["name"] in callables

    return {line for line in new if asks_for_more(line)}


def broken(new: set[str], old: set[str]) -> list[str]:
    """The lines that are gone, and those that make an existing call fail."""
    return sorted(old - new) + sorted(demanded(new - old, old))


def test_nothing_that_somebody_uses_is_gone_or_asks_for_more() -> None:
    _, old = recorded()
    assert broken(public(), old) == []


@pytest.mark.parametrize("line", BEFORE.read_text().splitlines())
def test_the_public_names_of_before_can_be_imported(line: str) -> None:
    package, names = line.split(": ")
    module = import_module(package)
    assert [name for name in names.split() if not hasattr(module, name)] == []


def test_everything_public_is_recorded() -> None:
    _, old = recorded()
    new = public() - old
    assert not new, f"record it: python -m tests.compatibility.test_api\n{sorted(new)}"


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        ({"f()", "f(0 a)", "f(b = 1)"}, []),
        ({"f()", "f(0 a)", "g()", "g(0 a)"}, []),
        ({"f()", "f(0 b)"}, ["f(0 a)", "f(0 b)"]),
        ({"f()", "f(0 a)", "f(1 b)"}, ["f(1 b)"]),
        ({"f()", "f(0 a)", "f(b)"}, ["f(b)"]),
        ({"f()", "f(0 a = 1)"}, ["f(0 a)"]),
        (set(), ["f()", "f(0 a)"]),
    ],
)
def test_names_that_are_gone_or_ask_for_more_break(now: set[str], wrong: list[str]) -> None:
    assert broken(now, {"f()", "f(0 a)"}) == wrong


def record() -> None:
    """Writes api.txt, if it breaks nothing since the last major version."""
    since, old = recorded() if RECORD.exists() else ("", set())
    new = public()
    if since.partition(".")[0] == __version__.partition(".")[0] and (wrong := broken(new, old)):
        sys.exit("\n".join((*wrong, f"public since {since}: a major version alone may break it")))
    RECORD.write_text("\n".join((f"# public since {__version__}", *sorted(new))) + "\n")


if __name__ == "__main__":
    record()
