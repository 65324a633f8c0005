"""The record of origin that `pipeline apply` writes into each output file: which version made it,
how, and from which files."""

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
    """An input file as it was when the job began."""

    path: str
    tree: str | None
    """The name of the TTree in a ROOT file, or of the RNTuple if `ntuple` is true. None for other
    formats."""
    ntuple: bool
    rows: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class About:
    """The record of origin: how an output file was made. It is stored in the file as JSON."""

    model: str
    version: int | None
    """The number of the version. None if the model came from a bundle's folder; `registry` is then
    None too."""
    registry: str | None
    mode: str
    promotion: Promotion | None
    digest: str
    """The digest of the version's bundle."""
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
    """The key of the job: see `Job.key`."""


def read_about(path: Path) -> About:
    """Read the record of origin in a file. DataError if the file has none, because `pipeline apply`
    did not write it, or because it is only a part of an unfinished job.

    Examples
    --------
    >>> from pathlib import Path
    >>> from pipeline.applying import read_about
    >>> report = pipeline.apply("jet-tagger@production", "jets.npz", "scored")
    >>> read_about(Path("scored/jets.npz")).version
    1
    """
    try:
        with open_source(path) as source:
            text = source.about()
        if not isinstance(text, str):
            raise ValueError("`pipeline apply` did not write it")
        data = as_record(dict[str, Any], parse_json(text))
        if data.keys() == {"target", "engine", "host"}:
            raise ValueError("it is a part of a job that is not finished: run the job again")
        return as_record(About, data)
    except SoaPipelineError:
        raise
    except Exception as error:  # a library can raise anything for a file that others wrote
        raise DataError(f"{path} does not say what made it: {first_line(error)}") from error
