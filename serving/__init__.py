"""Inference as a service: a version behind NVIDIA Triton, and sessions that run there."""

from __future__ import annotations
