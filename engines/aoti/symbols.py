"""The dynamic symbols of a 64-bit ELF library: what it defines, and what it takes from others."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from engines.errors import EngineError

_DYNSYM, _VERSYM, _VERNEED = 11, 0x6FFFFFFF, 0x6FFFFFFE  # kinds of sections
_WEAK = 2


class Symbols:
    """Read from `file`; EngineError where that is no such library.

    `defined`: the names it has for others. `taken`: each name it needs, and the library that the
    linker found it in, "" where that has no versions. What it can do without is left out.
    """

    def __init__(self, file: Path) -> None:
        self._bytes = file.read_bytes()
        self.defined: set[str] = set()
        self.taken: dict[str, str] = {}
        try:
            self._read()
        except (struct.error, KeyError, IndexError, ValueError) as error:
            raise EngineError(f"{file.name} is not a whole 64-bit ELF library") from error

    def _read(self) -> None:
        (at,) = struct.unpack_from("<Q", self._bytes, 40)
        size, count = struct.unpack_from("<HH", self._bytes, 58)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", self._bytes, at + i * size) for i in range(count)
        ]
        sections = {header[1]: header for header in headers}
        symbols = sections[_DYNSYM]
        names = headers[symbols[6]][4]
        versions = sections[_VERSYM][4] if _VERSYM in sections else None
        libraries = dict(self._versions(sections[_VERNEED], names)) if _VERNEED in sections else {}
        entries = self._bytes[symbols[4] : symbols[4] + symbols[5]]
        for i, (name, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", entries)):
            text = self._text(names + name)
            if section != 0:
                self.defined.add(text)
            elif text and info >> 4 != _WEAK:
                version = 0
                if versions is not None:
                    (version,) = struct.unpack_from("<H", self._bytes, versions + 2 * i)
                self.taken[text] = libraries.get(version & 0x7FFF, "")

    def _versions(self, section: tuple[int, ...], names: int) -> Iterator[tuple[int, str]]:
        """Each number of a version, and the library that it is of."""
        at = section[4]
        for _ in range(section[7]):
            _, count, file, first, following = struct.unpack_from("<HHIII", self._bytes, at)
            entry = at + first
            for _ in range(count):
                _, _, number, _, step = struct.unpack_from("<IHHII", self._bytes, entry)
                yield number, self._text(names + file)
                entry += step
            at += following

    def _text(self, at: int) -> str:
        return self._bytes[at : self._bytes.index(b"\0", at)].decode()
