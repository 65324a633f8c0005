"""A plugin of pytest: kept results of stages count although a fault has changed the code."""

from __future__ import annotations

import os
from functools import cache

from pipeline.building import provenance


@cache
def digest() -> str:
    return os.environ["DIGEST"]


if "DIGEST" in os.environ:
    provenance.code_digest = digest
