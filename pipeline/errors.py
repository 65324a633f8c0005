"""What the `pipeline` command refuses by itself."""

from __future__ import annotations

from soa.errors import SoaPipelineError
from soa.text import plain


class ConfigError(SoaPipelineError):
    """A config that cannot be used.

    `problems` holds one line for each mistake, `file:line: key: what was found; what is allowed`;
    the text of the error is these lines.
    """

    code = "config"

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "\n".join(map(plain, self.problems))


class InitError(SoaPipelineError):
    """A model or a file that no config can be written for, or a question with nobody to ask."""

    code = "init"


class DataError(SoaPipelineError):
    """A file of rows that cannot be read or written, or lacks a column that is needed."""

    code = "data"


class FormatError(DataError):
    """Rows that a file of that format cannot hold: writing them again fails again."""

    code = "format"


class ApplyError(SoaPipelineError):
    """A job on files that cannot begin or go on."""

    code = "apply"


class ReportError(SoaPipelineError):
    """A page that cannot be made, or shown."""

    code = "report"
