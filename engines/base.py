"""What an engine is: two methods, in a file or subpackage of `engines/` that declares its name.

An engine's libraries may be missing, heavy to import, or broken though never used. So engines are
found by reading the files (`soa/declared.py`), and `engine(name)` imports only the one asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engines.errors import EngineError
from engines.target import Target
from soa.declared import declared
from soa.options import known_options

if TYPE_CHECKING:  # reading a config asks for the names alone
    import torch

    from soa.memory import Span

_FOUND = declared("engines", "engine")

ENGINES: tuple[str, ...] = tuple(_FOUND)

# The candidates where nobody names any.
DEFAULT_ENGINES = tuple(n for n, found in _FOUND.items() if found.settings.get("default", True))

# The candidates of a version for work in progress: one is built in seconds, or its stand-in is.
QUICK_ENGINES = ("lanes", "exported")

# Those that a config may give options to.
WITH_OPTIONS = tuple(n for n, found in _FOUND.items() if found.settings.get("options", True))

# Those whose artifacts are opened and run without torch.
WITHOUT_TORCH = tuple(n for n, f in _FOUND.items() if not f.settings.get("torch", True))

# Engines that are gone: what opens the artifacts that they made.
RETIRED = {"aoti-autotune": "aoti", "aoti-folded": "aoti"}

FACTS = "facts.json"
"""A file an artifact may hold: what its engine records for the manifest, names and plain values."""


class Executable(ABC):
    """An opened artifact. Takes the arguments of the signature in order; writes the outputs.

    It checks nothing: the binding has. Any number of threads may call it at once.
    """

    @abstractmethod
    def __call__(self, arguments: Sequence[torch.Tensor]) -> None: ...

    def prepare(self, arguments: Sequence[Span]) -> Prepared:
        """The same arguments as memory, which is kept alive. One that can run without torch
        overrides this."""
        from engines.tensors import TensorCall

        return TensorCall(self, arguments)

    def recordable(self) -> Executable:
        """The same artifact, for runs that are recorded into CUDA graphs."""
        return self

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what it holds; running calls end first."""


class Prepared(Protocol):
    """Arguments tied to an artifact, to run again and again.

    One thread at a time may use it. `Binding` refuses a second one; a native call refuses it
    itself.
    """

    def run(self, stream: int = 0, /) -> None:
        """Run once. `stream` is a GPU's raw stream handle; nothing is synchronised."""

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Other memory of the same kind, by argument: another n, or address. All or none."""

    @property
    def current(self) -> Prepared:
        """The call for the rows in use, where several artifacts share the row counts."""
        return self


@dataclass(frozen=True)
class Portable:
    """The captured, portable files of a version that engines start from."""

    program: Path
    torchscript: Path | None


class Engine(ABC):
    """One way to compile and execute a program in the calling convention.

    A subclass declares itself by literal keywords: `engine` is its name, `order` its place among
    the candidates; `default=False` keeps it out of those that nobody names, `options=False` says
    that a config has nothing to set, `torch=False` that its artifacts run without torch.
    """

    name: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    """Whether `compile` needs no device of the target: its artifact is portable."""
    crosses: ClassVar[bool] = False
    """Whether `compile` builds for processors and devices that this host lacks."""
    cuts_rows: ClassVar[bool] = False
    """Whether a call goes through its rows in small blocks by itself: tiles gain nothing."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that `compile` needs and that take long to import."""
    in_place_of: ClassVar[str] = ""
    """Where nobody names engines, it is built only where the engine of that name gave nothing: that
    one was faster at every size of every network that benchmarks/RESULTS.md tells of."""
    for_heavy_rows: ClassVar[bool] = False
    """Whether it is built as well where the one that it stands in for takes more than a millisecond
    for the fewest rows: there it may be faster."""

    def __init_subclass__(
        cls,
        engine: str = "",
        order: int = 0,
        default: bool = True,
        options: bool = True,
        torch: bool = True,
    ) -> None:
        cls.name = engine or cls.name

    @abstractmethod
    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Build for `target` into the folder `out`; returns the files made, relative to `out`.

        The first file is the one `open` takes. An empty list means that the portable file itself
        is what runs. Raises EngineError.
        """

    def portable_file(self, source: Portable) -> Path | None:
        """The portable file that `open` takes when `compile` makes none."""
        return None

    @abstractmethod
    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Open an artifact for `device`. Raises EngineError.

        `threads` is how many threads one run may use, for engines that hold a setting of their own;
        the others follow torch's. `instances` is how many runs there may be at the same moment, for
        engines that keep a pool (None: one a core); with the others there is no limit.
        """


@known_options()
def engine(name: str) -> Engine:
    """The engine of that name; raises EngineError if it is unknown or its library is missing."""
    name = RETIRED.get(name, name)
    if name not in _FOUND:
        raise EngineError(f"unknown engine {name!r}: use one of {', '.join(ENGINES)}")
    made: Engine = _FOUND[name].load()()
    return made
