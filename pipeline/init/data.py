"""The first rows of a user's file, for `pipeline init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.errors import first_line
from pipeline.applying import FileColumn, Source, column_of, open_source
from pipeline.errors import DataError


@dataclass(frozen=True)
class DataFile:
    """A file, and what may be columns in it."""

    source: Source

    @property
    def columns(self) -> list[str]:
        return [*self.source.columns]

    def column(self, name: str, rows: int = 4096) -> FileColumn:
        """At most so many rows of a column. Raises DataError."""
        path = self.source.path
        self.source.require([name])
        try:
            found = column_of(name, self.source.head([name], rows)[name])
        except (OSError, ValueError, TypeError, NotImplementedError) as error:
            raise DataError(f"{path}: {name} {first_line(error)}") from error
        if found.rows == 0:
            raise DataError(f"{path} has no rows: give a file that has some, or none at all")
        return found


def open_data(path: Path, tree: str | None = None) -> DataFile:
    """A file without the values in it; `tree` is for ROOT. Raises DataError."""
    return DataFile(open_source(path, tree))
