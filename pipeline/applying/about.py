"""What an output of `pipeline apply` says of what made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import first_line
from pipeline.applying.sources import open_source
from pipeline.errors import DataError
from registry.version import Promotion
from soa.errors import SoaPipelineError
from soa.records import as_record, parse_json


@dataclass(frozen=True)
class Input:
    """A file as it was when the job began."""

    path: str
    tree: str | None
    """Of a ROOT file: the name of the TTree, or of the RNTuple (`ntuple`)."""
    ntuple: bool
    rows: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class About:
    """What an output says of what made it."""

    model: str
    version: int | None
    """None: it was a folder, and `registry` is None too."""
    registry: str | None
    mode: str
    promotion: Promotion | None
    digest: str
    """Of the version's bundle."""
    targets: tuple[str, ...]
    engines: tuple[str, ...]
    hosts: tuple[str, ...]
    software: str
    created: str
    by: str
    rows: int
    columns: Mapping[str, str]
    outputs: Mapping[str, str]
    keep: tuple[str, ...]
    inputs: tuple[Input, ...]
    job: str
    """The key of the job."""


def read_about(path: Path) -> About:
    """What an output says of what made it. DataError for a file that is none of ours."""
    try:
        with open_source(path) as source:
            text = source.about()
        if not isinstance(text, str):
            raise ValueError("`pipeline apply` did not write it")
        said = as_record(dict[str, Any], parse_json(text))
        if said.keys() == {"target", "engine", "host"}:
            raise ValueError("it is a part of a job that is not done: run that again")
        return as_record(About, said)
    except SoaPipelineError:
        raise
    except Exception as error:  # whatever a library makes of what others wrote there
        raise DataError(f"{path} does not say what made it: {first_line(error)}") from error
