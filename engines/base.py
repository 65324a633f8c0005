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
    """The names of our engines without `<setting>=False` in their declaration."""
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
    """An opened artifact. A call takes the arguments of the signature in order, and writes the
    outputs.

    It does not check the arguments, because the binding has done so. Any number of threads may call
    it at the same time.
    """

    @abstractmethod
    def __call__(self, arguments: Sequence[torch.Tensor]) -> None: ...

    def prepare(self, arguments: Sequence[Span]) -> Prepared:
        """Tie the arguments, given as memory, to this artifact, for many runs. The result keeps the
        memory alive. A class that can run without torch overrides this."""
        from engines.tensors import TensorCall

        return TensorCall(self, arguments)

    def recordable(self) -> Executable:
        """Return the executable to use for runs that are recorded into CUDA graphs: usually
        itself."""
        return self

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release all resources, after the running calls have ended."""


class Prepared(Protocol):
    """Arguments tied to an artifact, for many runs.

    Only one thread at a time may use it; `Binding`, or a native call, raises an error for others.
    """

    def run(self, stream: int = 0, /) -> None:
        """Run once. `stream` is the handle of a GPU stream, for which this call does not wait."""

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments, given by their index. Only the number of rows and
        the address may differ. If this fails, all arguments are as before."""

    @property
    def current(self) -> Prepared:
        """The prepared call that serves the current number of rows: this one, unless different
        artifacts serve different numbers."""
        return self


@dataclass(frozen=True)
class Portable:
    """The captured, portable files of a version, from which engines compile."""

    program: Path
    torchscript: Path | None
    signature: Signature | None = None


class Engine(ABC):
    """One way to compile and execute a program in the calling convention.

    A subclass declares itself by literal keywords: `engine` is its name, and `order` its position
    among the candidates. With `default=False` it is a candidate only if it is named, with
    `options=False` it takes no options, and with `torch=False` its artifacts run without torch.
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
        """Build for `target` into the folder `out`. Returns the names of the files, relative to
        `out`.

        The first file is the one that `open` takes. An empty list means that `open` takes the
        portable file itself (see `portable_file`). Raises EngineError if the build fails, and
        NotApplicableError if the engine is not made for this model or target.
        """

    def portable_file(self, source: Portable) -> Path | None:
        """The portable file that `open` takes if `compile` makes no file. None if there is none."""
        return None

    @abstractmethod
    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Open an artifact for `device`. Raises EngineError if that is not possible.

        A run may use `threads` threads; engines without such a setting use torch's number of
        threads. `instances` is the number of runs that may take place at the same time, for engines
        that keep a pool (None: one for each core). Other engines have no such limit.
        """


def known_engines() -> tuple[str, ...]:
    """The names of all engines: first ours, then those of other installed packages."""
    return (*ENGINES, *(name for name in find_installed("engines") if name not in _DECLARED))


def engine(name: str) -> Engine:
    """Import the engine with this name, and return a new instance. For a retired engine this is its
    successor. Raises EngineError if the name is not known or a library is missing."""
    name = RETIRED.get(name, name)
    declaration = _DECLARED.get(name) or find_installed("engines").get(name)
    if declaration is None:
        raise EngineError(f"unknown engine {name!r}: use one of {', '.join(known_engines())}")
    return _make_engine(declaration)


def _make_engine(declaration: Declared) -> Engine:
    """Import the class of a declared engine, and return a new instance.

    Another package may declare anything: raises EngineError if its class cannot be imported, or is
    not an Engine with the declared name.
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
