"""The base classes of engines. An engine is a class with two methods, `compile` and `open`.

It lies in a file or subpackage of `engines/` and declares its name there, or in another package
that declares it by an entry point (docs/howto/engines.md). The libraries of an engine may be
missing, slow to import or broken. So our engines are found by reading the source files
(`soa/declared.py`), and `engine(name)` imports only the engine of that name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engines.errors import EngineError, first_line
from engines.target import Target
from soa.declared import Declared, find_declared, find_installed

if TYPE_CHECKING:  # reading a config needs only the names of engines, and no torch
    import torch

    from soa.memory import Span
    from soa.signature import Signature

_DECLARED = find_declared("engines", "engine")

ENGINES: tuple[str, ...] = tuple(_DECLARED)


def _engines_with(setting: str) -> tuple[str, ...]:
    """The engines whose declaration does not say `<setting>=False`."""
    return tuple(name for name in ENGINES if _DECLARED[name].settings.get(setting, True))


# The candidates if no engines are named.
DEFAULT_ENGINES = _engines_with("default")

# The candidates of a quick build, for work in progress. `exported` is the fallback and needs no
# compilation.
QUICK_ENGINES = ("lanes", "exported")

# Engines to which a config may give options.
WITH_OPTIONS = _engines_with("options")

# Engines whose artifacts are opened and run without torch.
WITHOUT_TORCH = tuple(name for name in ENGINES if name not in _engines_with("torch"))

# Removed engines, each with the engine that opens its artifacts.
RETIRED = {"aoti-autotune": "aoti", "aoti-folded": "aoti"}

FACTS = "facts.json"
"""An optional file of an artifact: names and plain values that the engine adds to the manifest."""


class Executable(ABC):
    """An opened artifact. Takes the arguments of the signature in order; writes the outputs.

    It checks no argument, because the binding has done so. Any number of threads may call it at
    the same time.
    """

    @abstractmethod
    def __call__(self, arguments: Sequence[torch.Tensor]) -> None: ...

    def prepare(self, arguments: Sequence[Span]) -> Prepared:
        """Ties the arguments, given as memory, to this artifact. The result keeps the memory alive.
        A class that can run without torch overrides this."""
        from engines.tensors import TensorCall

        return TensorCall(self, arguments)

    def recordable(self) -> Executable:
        """The executable to use for runs that are recorded into CUDA graphs."""
        return self

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release all resources, after the running calls have ended."""


class Prepared(Protocol):
    """Arguments tied to an artifact, for many runs.

    Only one thread at a time may use it; `Binding`, or a native call, raises an error for others.
    """

    def run(self, stream: int = 0, /) -> None:
        """Run once. `stream` is a GPU's raw stream handle; nothing is synchronised."""

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments, given by their index. Only n and the address may
        differ. If this fails, all arguments are as before."""

    @property
    def current(self) -> Prepared:
        """The call for the current row count, if several artifacts serve different counts."""
        return self


@dataclass(frozen=True)
class Portable:
    """The captured, portable files of a version, from which engines compile."""

    program: Path
    torchscript: Path | None
    signature: Signature | None = None


class Engine(ABC):
    """One way to compile and execute a program in the calling convention.

    A subclass declares itself by literal keywords: `engine` is its name, `order` its position among
    the candidates. `default=False`: it is a candidate only if it is named. `options=False`: it has
    no options. `torch=False`: its artifacts run without torch.
    """

    name: ClassVar[str] = ""
    anywhere: ClassVar[bool] = False
    """True if the artifact is portable, so that `compile` needs no device of the target."""
    crosses: ClassVar[bool] = False
    """True if `compile` can also build for processors and devices that this host does not have."""
    cuts_rows: ClassVar[bool] = False
    """True if a call itself processes its rows in small blocks, so that tiles gain nothing."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that `compile` needs and that take long to import."""
    in_place_of: ClassVar[str] = ""
    """The name of a preferred engine, or empty. If no engines are named, this engine is built only
    if the preferred engine made no valid artifact: that one is nearly always faster
    (benchmarks/RESULTS.md)."""
    for_heavy_rows: ClassVar[bool] = False
    """True if it is also built when the preferred engine (`in_place_of`) takes more than one
    millisecond for the fewest rows, since it may be faster for such models."""

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

        The first file is the argument of `open`. An empty list means that `open` takes the portable
        file itself. Raises EngineError.
        """

    def portable_file(self, source: Portable) -> Path | None:
        """The portable file that `open` takes if `compile` makes no file."""
        return None

    @abstractmethod
    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Open an artifact for `device`. Raises EngineError.

        `threads`: how many threads one run may use. Engines without such a setting use torch's
        number of threads. `instances`: how many runs there may be at the same moment, for engines
        that keep a pool (None: one for each core). The other engines have no limit.
        """


def known_engines() -> tuple[str, ...]:
    """The names of all engines: ours, then those of other installed packages."""
    return (*ENGINES, *(name for name in find_installed("engines") if name not in _DECLARED))


def engine(name: str) -> Engine:
    """The engine with this name; raises EngineError if the name is unknown or a library missing."""
    name = RETIRED.get(name, name)
    declaration = _DECLARED.get(name) or find_installed("engines").get(name)
    if declaration is None:
        raise EngineError(f"unknown engine {name!r}: use one of {', '.join(known_engines())}")
    return _instance(declaration)


def _instance(declaration: Declared) -> Engine:
    """A new instance of a declared engine.

    Another package may declare anything. Raises EngineError if its class cannot be imported, or is
    no Engine of the declared name.
    """
    if not declaration.package:
        our_engine: Engine = declaration.load()()
        return our_engine
    where = (
        f"{declaration.package} declares the engine {declaration.name!r} "
        f"as {declaration.module}:{declaration.class_name}"
    )
    try:
        loaded = declaration.load()
    except Exception as error:  # the package's own code may raise any type
        raise EngineError(f"{where}: {first_line(error)}") from error
    is_engine = isinstance(loaded, type) and issubclass(loaded, Engine)
    if not is_engine or loaded.name != declaration.name:
        raise EngineError(
            f"{where}, which is no subclass of Engine with engine={declaration.name!r}"
        )
    engine_class: type[Engine] = loaded
    return engine_class()
