"""A program in the format of `torch.export.save`, and copies of it with other records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

MODEL = "models/model.json"


class Linear(torch.nn.Module):
    """Has a weight, a buffer and a constant, and leaves out the first row."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("offset", torch.ones(2))
        self.scale = torch.full((2,), 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.layer(x[1:]) * self.scale + self.offset
        return answers


def save_program(path: Path) -> Path:
    """Writes the program of `Linear` for 3 to 100 rows, and returns its path."""
    rows = torch.export.Dim("rows", min=3, max=100)
    program = torch.export.export(Linear(), (torch.ones(4, 3),), dynamic_shapes=({0: rows},))
    torch.export.save(program, path)
    return path


def doctored(program: Path, into: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of the archive with records replaced, added or left out, written by torch's writer."""
    reader = torch._C.PyTorchFileReader(str(program))
    records = {
        name: reader.get_record(name)
        for name in reader.get_all_records()
        if not name.startswith(".data/") and name != "byteorder"
    }
    writer = torch._C.PyTorchFileWriter(str(into))
    for name, content in {**records, **changes}.items():
        if content is not None:
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return into


def record(program: Path, name: str) -> Any:
    """One of the archive's JSON records."""
    return json.loads(torch._C.PyTorchFileReader(str(program)).get_record(name))
