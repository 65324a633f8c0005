"""Sets a signal's action for a test: `make test` may have been started with it ignored."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[[int, Any], Any] | signal.Handlers


@contextlib.contextmanager
def disposed(number: signal.Signals, handler: Handler) -> Iterator[None]:
    """The signal has this action within the block, and the former one behind it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
