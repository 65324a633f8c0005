"""What the commands share: the options for the registry and for machines, and how they speak."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from soa.text import plain

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite one: nan passes click's comparisons."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def registry_option(command: F) -> F:
    return click.option(
        "--registry",
        "registry_uri",
        metavar="URI",
        help="MLflow tracking URI of the registry: sqlite:///FILE, http://HOST:PORT, … "
        "Default: $PIPELINE_REGISTRY, else an SQLite file in ./pipeline-registry.",
    )(command)


def json_option(command: F) -> F:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON, for machines."
    )(command)


def registry_at(uri: str | None) -> Any:
    from registry.store import Registry

    return Registry(uri)


def opened_at(ref: str, uri: str | None) -> Any:
    """To look at or to measure, whether it was promoted or not."""
    from runtime.opening import Opening, open_version

    return open_version(Opening(ref, mode="test", registry=uri))


def say(text: object) -> None:
    """A line on stderr: what is being done, and what went wrong."""
    click.echo(plain(text), err=True)


def tell(text: object) -> None:
    """A line of the answer, on stdout."""
    click.echo(plain(text))


def tell_json(answer: object) -> None:
    click.echo(json.dumps(answer, indent=1))  # in ASCII
