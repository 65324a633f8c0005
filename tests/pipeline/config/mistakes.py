"""Configs from text, and the errors with which a user's file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError


def load(folder: Path, text: str) -> Config:
    """The config in a file with this text."""
    path = folder / "c.yaml"
    path.write_text(text)
    return load_config(path)


def refused(load: Callable[[Path], object], path: Path, text: str) -> list[str]:
    """The problems of a file with this text, as `line: rest`; each fits on one line."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    start, problems = f"{path}:", caught.value.problems
    assert all(problem.startswith(start) and "\n" not in problem for problem in problems)
    assert str(caught.value) == "\n".join(problems)
    return [problem.removeprefix(start) for problem in problems]
