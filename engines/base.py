"""What an engine is: two methods.

Engines are listed lazily: one may be missing, heavy to import, or broken though never used, so
`engine(name)` imports only the file of the engine asked for.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.errors import EngineError
from engines.target import Target
from soa.options import known_options

if TYPE_CHECKING:  # reading a config asks for the names alone
    import torch

    from soa.memory import Span

_FILES = {
    "aoti": "engines.aoti.engine",
    "aoti-autotune": "engines.aoti.autotune",
    "aoti-folded": "engines.aoti.folded",
    "torchscript": "engines.torchscript",
    "onnxruntime": "engines.onnx.engine",
    "exported": "engines.exported.engine",
    "tensorrt": "engines.tensorrt",
}

ENGINES: tuple[str, ...] = tuple(_FILES)

# The candidates where nobody names any.
DEFAULT_ENGINES: tuple[str, ...] = tuple(name for name in ENGINES if name != "tensorrt")

FACTS = "facts.json"
"""A file an artifact may hold: what its engine records for the manifest, names and plain values."""


class Executable(Protocol):
    """An opened artifact. Takes the arguments of the signature in order; writes the outputs.

    It checks nothing: the binding has. Any number of threads may call it at once.
    """

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None: ...


class Prepared(Protocol):
    """Arguments tied to an artifact, to run again and again: what an executable may offer.

    One that does has a method `prepare(spans) -> Prepared`, of the same arguments as memory, which
    it keeps alive; so it needs no torch. One
    thread at a time uses it: `Binding` refuses a second one, but leaves that to native calls.
    """

    def run(self, stream: int = 0, /) -> None:
        """Run once. `stream` is a GPU's raw stream handle; nothing is synchronised."""

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Other memory of the same kind, by argument: another n, or address. All or none."""


@dataclass(frozen=True)
class Portable:
    """The captured, portable files of a version that engines start from."""

    program: Path
    torchscript: Path | None


class Engine(ABC):
    """One way to compile and execute a program in the calling convention."""

    name: str
    anywhere: bool = False
    """Whether `compile` needs no device of the target: its artifact is portable."""

    @abstractmethod
    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Build for `target` into the folder `out`; returns the files made, relative to `out`.

        The first file is the one `open` takes. An empty list means that the portable file itself
        is what runs. Raises EngineError.
        """

    @abstractmethod
    def portable_file(self, source: Portable) -> Path | None:
        """The portable file that `open` takes when `compile` makes none."""

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
    try:
        module = importlib.import_module(_FILES[name])
    except KeyError:
        raise EngineError(f"unknown engine {name!r}: use one of {', '.join(ENGINES)}") from None
    made: Engine = module.ENGINE
    return made
