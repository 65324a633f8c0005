"""The text that names a version or a bundle folder: `name`, `name/3`, `name@alias`, `./folder`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from registry.errors import RegistryError

NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
"""The name of a registered model. A slash or an at-sign would begin the version or the alias. A
leading dot or dash would make the name a path or an option on a command line."""

TARGET_PATTERN = r"[a-z]+/[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
"""A target's name, which is also the path of a folder. `engines.target` lists the targets."""

_REF = re.compile(
    rf"(?P<name>{NAME_PATTERN})(?:/(?P<version>[1-9][0-9]{{0,8}})|@(?P<alias>[A-Za-z0-9_-]{{1,255}}))?"
)


@dataclass(frozen=True)
class Ref:
    """The name of a version in the registry. With neither number nor alias: the latest version."""

    name: str
    version: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if not _REF.fullmatch(str(self)) or (self.version is not None and self.alias is not None):
            raise RegistryError(f"{self!r} is not a version: a name, and a number or an alias")

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.name}/{self.version}"
        return self.name if self.alias is None else f"{self.name}@{self.alias}"


def parse_ref(text: str) -> Ref | Path:
    """Return a `Ref`, or the `Path` of a bundle folder. The text alone decides, never the disk.

    `name`, `name/3` and `name@alias` are versions. Any other text that has a slash, or begins with
    a dot or a tilde, is a path. So a folder `jets` in the working folder is written `./jets`.
    """
    if match := _REF.fullmatch(text):
        version = match["version"]
        return Ref(match["name"], None if version is None else int(version), match["alias"])
    if text.startswith("oci://"):
        raise RegistryError(f"{text}: `pipeline pull` copies it to a folder, to be named instead")
    if text and "\0" not in text and ("/" in text or text[0] in ".~"):
        try:
            return Path(text).expanduser()
        except RuntimeError:  # `~name`, and there is no user of that name
            return Path(text)
    raise RegistryError(
        f"{text!r} is neither a version (name, name/3, name@alias; names have A-Z a-z 0-9 . _ -) "
        "nor the path of a bundle folder (./folder)"
    )


def check_alias(alias: str) -> None:
    """Raise RegistryError if the text cannot be an alias."""
    # MLflow reserves `latest` and `v1`, `v2`, ...; it would refuse them only after the history and
    # a tag have been written.
    reserved = alias.lower() == "latest" or re.fullmatch(r"[vV][0-9]+", alias)
    if reserved or not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", alias):
        raise RegistryError(
            f"{alias!r} cannot be an alias: use A-Z a-z 0-9 _ -, but not 'latest' or 'v1'"
        )
