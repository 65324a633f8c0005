"""What the commands share: the options for the registry and for machines, and how they speak."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """Without nan, which passes click's comparisons."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
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


def say(text: str) -> None:
    click.echo(text, err=True)
