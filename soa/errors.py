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
        """`code`: a more specific code than that of the class; it begins with the class's code."""
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
    """An exception, its cause, the cause of that, and so on, each once: they can form a circle.
    `contexts`: without a cause, that during whose handling an exception was raised."""
    yielded: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in yielded:
        yielded.add(id(current))
        yield current
        current = current.__cause__ or (current.__context__ if contexts else None)


@contextmanager
def needs_extra(extra: str, error: type[SoaPipelineError]) -> Iterator[None]:
    """Raise `error` if a library of an optional extra cannot be imported in this `with` block."""
    with needs_library(f"'{DISTRIBUTION}[{extra}]'", error):
        yield


@contextmanager
def needs_library(install: str, error: type[SoaPipelineError]) -> Iterator[None]:
    """Raise `error` if a library cannot be imported in this `with` block; `install` is what pip
    takes to get it.

    An OSError counts too: the dynamic loader may not find a library that a package needs.
    """
    try:
        yield
    except (ImportError, OSError) as problem:
        library = getattr(problem, "name", None) or "a library"
        text = f"{library} cannot be imported ({problem}): pip install {install}"
        raise error(text, code="missing-library") from problem
