"""Triton's dynamic batcher: which waiting requests an idle instance runs now.

After Triton's documentation (user_guide/batcher.md): requests join in the order of arrival. The
largest preferred size that can be formed runs at once; otherwise all requests that fit run when the
delay is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Batching:
    """The settings that `serving.triton.config` writes. `max_rows` 0: each request runs alone."""

    max_rows: int = 0
    preferred: tuple[int, ...] = ()
    delay_s: float = 0.0

    def take(self, waiting: Iterable[int], oldest_s: float) -> int:
        """The number of requests that run now; 0: the instance waits.

        `waiting`: the rows of the waiting requests, in the order of arrival. `oldest_s`: the time
        that the first one has waited.
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
