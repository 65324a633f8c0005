"""The level of the x86-64 psABI that a library's instructions need, from objdump's listing.

The encoding shows it: in 64-bit code, an instruction that begins with byte C4 or C5 is VEX (AVX,
AVX2, FMA, BMI: v3), one with 62 is EVEX (AVX-512: v4). A few others are known by their names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

BEYOND = 5
# v3 without VEX. tzcnt is not listed: compilers write it as `rep bsf`, which older processors run
# as bsf.
_V3 = re.compile(r"(lzcnt|movbe)[lqw]?")
# Part of no level: AMX, BF16, FP16, VNNI, IFMA, VBMI, VPOPCNTDQ, AES, CLMUL, SHA, GFNI, ADX, SSE4a.
_NO_LEVEL = re.compile(
    r"tile\w+|tdp\w+|ldtilecfg|sttilecfg|v?dpbf16\w*|vcvtne\w*bf16\w*|v\w+[ps]h|vpdp\w+|vpmadd52\w+"
    r"|vperm([it]2)?b|vpmultishiftqb|vpopcnt\w+|vpsh[lr]dv?[wdq]|vp(compress|expand)[bw]"
    r"|vpshufbitqmb|vp2intersect\w+|v?aes\w+|v?pclmul\w+|sha(1|256)\w+|v?gf2p8\w+|ad[co]x[lq]?"
    r"|extrq|insertq|movnts[sd]|rdrand\w?|rdseed\w?"
)
_NOT_HALF = re.compile(r"vpunpck\w+|vcvtps2ph|vcvtph2ps")  # they end in ph or sh, but are v3
_PREFIXES = frozenset(["26", "2e", "36", "3e", "64", "65", "66", "67", "f0", "f2", "f3"])
_LINE = re.compile(
    r"\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(?:(?:rep\w*|lock|bnd|data16|[c-g]s) )*(\S+)(.*)"
)


def level_of(line: str) -> int:
    """The lowest level with the instruction of this line: 2, 3, 4 or BEYOND; 2 for other lines."""
    instruction = _LINE.match(line)
    if instruction is None:
        return 2
    encoding, name, operands = instruction.groups()
    if _NO_LEVEL.fullmatch(name) and not _NOT_HALF.fullmatch(name):
        return BEYOND
    first = next((byte for byte in encoding.split() if byte not in _PREFIXES), "")
    if first == "62" or re.search(r"%k[0-7]\b", operands):
        return 4
    return 3 if first in ("c4", "c5") or _V3.fullmatch(name) else 2


def above(library: Path, level: int) -> Iterator[str]:
    """The lines of a library's listing whose instruction needs a higher level than this."""
    # Wide lines, so that all bytes of an instruction, 15 at most, stand before its name.
    command = ["objdump", "--disassemble", "--insn-width=16", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return (line.strip() for line in listing.stdout.splitlines() if level_of(line) > level)
