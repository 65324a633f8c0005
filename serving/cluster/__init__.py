"""A version behind many Tritons: values for the SuperSONIC chart, and plain manifests."""

from __future__ import annotations
