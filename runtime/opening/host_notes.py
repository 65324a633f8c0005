"""What was found out about an artifact on this host, kept in its cache for later loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from soa.files import read_plain, write_whole
from soa.records import read_record

if TYPE_CHECKING:
    from runtime.opening.request import Opened


def find_out_once(
    kind: str,
    opened: Opened,
    target: str,
    engine: str,
    processor: str,
    find_out: Callable[[], str | None],
) -> str | None:
    """Return this host's note of an earlier result of `find_out`, or call it and note its result.

    A note is for one bundle, artifact and `processor`, which describes the kind of processor.
    `kind`: which fact is noted, such as "bits". An exception of `find_out` is not noted.
    """
    from registry.store import cache_root

    digest = hashlib.sha256(processor.encode()).hexdigest()[:16]
    name = "-".join([opened.bundle.digest, target.replace("/", "."), engine, digest])
    note = cache_root() / f"{kind}-notes" / name  # earlier releases wrote others into `kind`
    with suppress(OSError, ValueError):  # no note yet, or a damaged one: find out
        return read_record(str | None, read_plain(note))  # type: ignore[arg-type]
    result = find_out()
    with suppress(OSError):  # without a cache the next load finds out again
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps(result))
    return result
