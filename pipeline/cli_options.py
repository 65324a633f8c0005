"""What the commands share: the options for the registry and for machines, and how they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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


def say(text: str) -> None:
    click.echo(text, err=True)
