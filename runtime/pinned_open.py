"""Opening an artifact of a bundle: the engine gets the files that were hashed, and no others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from engines.base import Executable, engine
from engines.errors import EngineError
from registry.bundle import Bundle
from registry.pinned import Pinned


def open_pinned(
    bundle: Bundle,
    engine_name: str,
    files: Sequence[str],
    device: torch.device,
    threads: int = 1,
    instances: int | None = None,
) -> Executable:
    """What the engine makes of `files`, the first of which it opens.

    BundleError if one was replaced or written to since its digest was checked, or while it was
    opened. Files in the cache stay there as long as the executable does.
    """
    made = engine(engine_name)
    pinned = Pinned(bundle, files)
    try:
        executable = made.open(pinned.file(files[0]), device, threads, instances)
        pinned.check()
    except EngineError as error:
        pinned.close()
        said = str(error).replace(str(pinned.folder), str(bundle.path))
        raise type(error)(said) from error
    except BaseException:
        pinned.close()
        raise
    if device.type == "cpu":
        pinned.close()
    else:  # a GPU's artifact is opened again when its runs are first recorded
        weakref.finalize(executable, pinned.close)
    if bundle.holds:
        weakref.finalize(executable, _let_go, bundle.holds)
    return executable


def _let_go(holds: tuple[object, ...]) -> None:
    """That these existed until now is what kept the files."""
