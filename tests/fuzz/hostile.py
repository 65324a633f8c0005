"""Strategies for hypothesis: input that an attacker may write, or a failing disk may leave."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pipeline.errors import ConfigError
from soa.errors import SoaPipelineError


def put(path: Path, content: bytes) -> Path:
    """Writes a file, and its folders, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


TEXTS = (
    "", "x", "[/foo]", "ok [only for staging], never", "\x1b[31mred\x1b]0;title\x07", "a\nb\r\nc",
    "\u202eevil\u2066", "\x9b2J\x85", "a\u2028b", "\x00", "<script>x</script>", "|`*_[a](b)|",
    "../../etc", "/etc", "..", "1", "n=5", "0" * 64, "cpu/x86-64-v3", "é\u00a0ü", "A" * 10_000,
)  # fmt: skip


def nested(depth: int, within: Callable[[Any], Any]) -> Any:
    """The number 1, `depth` times within something else."""
    value: Any = 1
    for _ in range(depth):
        value = within(value)
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 5, 10**12, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1, "a"], "\ud800",
    nested(150, lambda x: [x]), nested(400, lambda x: {"a": x}),
)  # fmt: skip

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=30))
values = st.one_of(st.sampled_from(VALUES), texts, st.integers(), st.floats())


@st.composite
def altered(draw: st.DrawFn, data: Any) -> Any:
    """JSON data in which up to three values, at any depth, are replaced, moved or removed."""
    changed = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        changed = _altered(draw, changed)
    return changed


def _altered(draw: st.DrawFn, data: Any) -> Any:
    """Alters one value within `data`, in place, or returns another value instead of it."""
    keys: list[Any] = list(data) if isinstance(data, dict) else []
    if isinstance(data, list):
        keys = list(range(len(data)))
    if not keys or draw(st.integers(0, 4)) == 0:
        return copy.deepcopy(draw(values))
    key = draw(st.sampled_from(keys))
    match draw(st.integers(0, 7)):
        case 0:
            del data[key]
        case 1 if isinstance(data, dict):
            data[draw(texts)] = data[key]
        case 1:
            data.append(data[key])
        case _:
            data[key] = _altered(draw, data[key])
    return data


@st.composite
def altered_json(draw: st.DrawFn, data: Any) -> bytes:
    """`altered` as bytes; one in four is damaged, too."""
    text = json.dumps(draw(altered(data))).encode()
    return draw(st.one_of(st.just(text), st.just(text), st.just(text), damaged(text)))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of a file of which one piece, of up to 64 bytes, is replaced by up to eight bytes."""
    begin = draw(st.integers(0, len(content)))
    end = begin + draw(st.integers(0, 64))
    return content[:begin] + draw(st.binary(max_size=8)) + content[end:]


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """If the block fails, it raises an error of ours, with a message of one line."""
    try:
        yield
    except SoaPipelineError as error:
        lines = len(error.problems) if isinstance(error, ConfigError) else 1  # one a problem
        assert len(str(error).split("\n")) == lines
        require_plain(str(error))


def require_plain(printed: str) -> None:
    """Requires that no printed character controls a terminal or changes the writing direction."""
    odd = [c for c in printed if c != "\n" and unicodedata.category(c) in _ODD]
    assert not odd, (odd, printed)


_ODD = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """Requires that the block prints only plain text on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield
    require_plain(out.getvalue())
