"""Triton's dynamic batcher: which waiting requests an idle instance runs now.

After Triton's documentation (user_guide/batcher.md): requests join in their order; the largest
preferred size that can be formed is run at once; else all that fit, if the delay is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Batching:
    """As `serving.triton.config` writes it. `max_rows` 0: each request is a run of its own."""

    max_rows: int = 0
    preferred: tuple[int, ...] = ()
    delay_s: float = 0.0

    def take(self, waiting: Iterable[int], oldest_s: float) -> int:
        """How many of the requests, given by their rows in the order of arrival, run now.

        0: wait for more, or nothing waits. `oldest_s`: how long the first one has waited.
        """
        if self.max_rows == 0:
            return 1 if any(True for _ in waiting) else 0
        rows = count = preferred = 0
        full = False
        for each in waiting:
            if rows + each > self.max_rows and count:
                full = True
                break
            rows += each
            count += 1
            if rows in self.preferred:
                preferred = count
        late = oldest_s >= self.delay_s
        if preferred and not (late and self.delay_s):
            return preferred
        if late or full or rows >= max(self.preferred, default=self.max_rows):
            return count
        return 0


ALONE = Batching()
