"""The errors that the `pipeline` package raises itself."""

from __future__ import annotations

from soa.errors import SoaPipelineError
from soa.text import plain


class ConfigError(SoaPipelineError):
    """A config that cannot be used.

    `problems` holds one line for each mistake, `file:line: key: what was found; what is allowed`.
    The text of the error consists of these lines.
    """

    code = "config"

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "\n".join(map(plain, self.problems))


class InitError(SoaPipelineError):
    """`pipeline init` cannot write a config for a model or file, or cannot ask the user."""

    code = "init"


class DataError(SoaPipelineError):
    """A file of rows that cannot be read or written, or lacks a column that is needed."""

    code = "data"


class FormatError(DataError):
    """The file format cannot store these rows; writing them again would fail again."""

    code = "format"


class ApplyError(SoaPipelineError):
    """A job of `pipeline apply` that cannot begin or cannot continue."""

    code = "apply"


class ReportError(SoaPipelineError):
    """A page that cannot be written or shown."""

    code = "report"
