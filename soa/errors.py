"""The exceptions for mistakes of a user. The text of each is one line.

Every error that a user's input can cause derives from `SoaPipelineError`; the `pipeline` command
prints its text and exits non-zero, without a traceback. Each folder defines the errors it raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from soa.text import plain

DISTRIBUTION = "soa-pipeline"
"""The distribution in the advice `pip install 'NAME[extra]'`; soa-runtime sets its own name."""


class SoaPipelineError(Exception):
    """A user's mistake, or a fault outside this software: where, what was found, what to do.

    The text is one line, even if it quotes the message of another library. `code` identifies the
    error for programs: docs/reference/refusals.md has a section for each code.
    """

    code = "error"

    def __init__(self, *message: object, code: str | None = None) -> None:
        """Make an error. `code` may be more specific than the class's, with which it must begin."""
        super().__init__(*message)
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return plain(super().__str__())


class LayoutError(SoaPipelineError):
    """A layout that cannot exist: a bad name, dtype, shape or alignment."""

    code = "layout"


class CollectionError(SoaPipelineError):
    """Memory or values that do not fit the collection that they are given for."""

    code = "collection"


class BlockError(SoaPipelineError):
    """A block that its layout cannot provide."""

    code = "block"


class SignatureError(SoaPipelineError):
    """A signature that contradicts itself or cannot be read."""

    code = "model-signature"


class OptionError(SoaPipelineError, TypeError):
    """A keyword argument that a public function does not have."""

    code = "option"


def causes(error: BaseException, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an exception, then its cause, the cause of that, and so on.

    `contexts`: an exception without a cause is followed by its context, the exception that was
    being handled when it was raised. No exception is repeated, even if they form a circle.
    """
    yielded: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in yielded:
        yielded.add(id(current))
        yield current
        current = current.__cause__ or (current.__context__ if contexts else None)


@contextmanager
def needs_extra(extra: str, error: type[SoaPipelineError]) -> Iterator[None]:
    """Raise `error` if this `with` block cannot import a library of an optional extra.

    The text says how to install the extra: `pip install 'soa-pipeline[data]'`.
    """
    with needs_library(f"'{DISTRIBUTION}[{extra}]'", error):
        yield


@contextmanager
def needs_library(install: str, error: type[SoaPipelineError]) -> Iterator[None]:
    """Raise `error` if this `with` block cannot import a library.

    `install` is the argument of `pip install` that the text advises. An OSError counts as well: the
    dynamic loader may not find a shared library that a package needs.
    """
    try:
        yield
    except (ImportError, OSError) as problem:
        library = getattr(problem, "name", None) or "a library"
        text = f"{library} cannot be imported ({problem}): pip install {install}"
        raise error(text, code="missing-library") from problem
