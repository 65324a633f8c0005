"""What a capture wrote: files in a folder, and facts about them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

from engines.exported import load_program
from engines.lanes import why_dependent
from soa.files import digest_of
from soa.signature import Signature
from stages.model import Precision


@dataclass(frozen=True)
class Capture:
    """The files and facts that capture wrote into its folder."""

    folder: Path
    signature: Signature
    torchscript: Literal["scripted", "traced"] | None
    torchscript_note: str | None
    precision: Precision = "fp32"
    dependence: str | None = None
    """Why a row's answer may depend on other rows; empty if it does not, None if not recorded."""
    tried: str = ""
    """Why no graph shows that rows are independent, if only a trial found it; else empty."""

    @cached_property
    def why_dependent(self) -> str | None:
        """Why a row's answer may depend on other rows; None if it does not. The program is read if
        this was not recorded."""
        return dependence_of(self.dependence, self.program)

    @property
    def program(self) -> Path:
        """The exported program in the calling convention."""
        return self.folder / "program.pt2"

    @property
    def script(self) -> Path | None:
        """The TorchScript file; None if none was made."""
        return self.folder / "model.ts" if self.torchscript else None

    @property
    def reference(self) -> Path:
        """The file of the reference."""
        return self.folder / "reference.safetensors"

    @property
    def more(self) -> Path | None:
        """The file of answers to further rows, with a case for each window; None if the user gave
        no further rows."""
        return self._file_if_present("more.safetensors")

    @property
    def many(self) -> Path | None:
        """The file of answers to many rows like those of the reference; None if there are none."""
        return self._file_if_present("many.safetensors")

    def _file_if_present(self, name: str) -> Path | None:
        """The path of a file in the folder; None if there is no such file."""
        file = self.folder / name
        return file if file.exists() else None

    def digest(self) -> str:
        """A digest of the contents of all captured files together."""
        digest = hashlib.sha256()
        for file in (self.program, self.script, self.reference, self.more, self.many):
            if file is not None:
                digest.update(digest_of(file).encode())
        return digest.hexdigest()

    def save(self) -> None:
        """Write the facts into the folder, as JSON."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["signature"] = self.signature.to_dict()
        del data["folder"]
        (self.folder / "capture.json").write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Capture:
        """The capture that `save` wrote into this folder."""
        data = json.loads((folder / "capture.json").read_text())  # trusted
        return cls(folder, **{**data, "signature": Signature.from_dict(data["signature"])})


def dependence_of(recorded: str | None, program: Path) -> str | None:
    """Why a row's answer may depend on other rows; None if it does not.

    `recorded` is this text as a capture or a manifest has it, empty if it does not depend. It is
    None in older ones, which did not record it: then the program is read to find out.
    """
    if recorded is not None:
        return recorded or None
    reason = why_dependent(load_program(program))
    return None if reason is None else reason.text
