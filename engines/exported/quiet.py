"""Silence for torch's own deprecation chatter while it exports, compiles and loads.

torch warns its users about its own internals there (pytree classes, TorchScript's future, tracing
of sizes). A user of this package can act on none of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Ignore warnings and torch's log messages below ERROR inside the block. Not thread-safe."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
