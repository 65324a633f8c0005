"""Which artifacts give the same bits: `python -m benchmarks.speed.bits BUNDLE ...`.

A BUNDLE is a folder of `pipeline run`. Each candidate of each level runs its reference in all ways
of `gates: {reproducible: true}`, and once with libraries that are told that the processor has no
AVX-512 (`AVX2`). Within a network and engine, equal letters mean equal bits. Capital letters stand
for all cases of the reference, small letters for up to 33 rows. `-`: not measured; the reason is
below the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from registry.promotion import Bits
from runtime.opening import Opened, Opening, held_files, open_version
from stages.judging import PROCESSORS, THREADS, reproduce

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F",
}
LESS = "libraries without AVX-512"
WAYS = {"where it was built": "built", "here": "here", LESS: "AVX2"}
WAYS |= {f"on qemu's {name}": name for name in PROCESSORS}
WAYS |= {f"with {n} threads": f"{n} thr." for n in THREADS}
WAYS |= {f"in tiles with {n} threads": f"tiles, {n} thr." for n in THREADS}


def main(folders: list[str]) -> None:
    print("| network | engine | level |", " | ".join(WAYS.values()), "|")
    print("| --- " * (3 + len(WAYS)) + "|")
    reasons: dict[str, None] = {}
    for folder in folders:
        opened = open_version(Opening(Path(folder), mode="test"))
        letters: dict[tuple[str, bool, str], str] = {}
        for target, record in opened.bundle.manifest.targets.items():
            for engine in sorted(n for n, c in record.candidates.items() if c.status == "valid"):
                cells = {}
                for bits in measured(opened, target, engine):
                    if bits.digest is None:
                        reasons[bits.why] = None
                        continue
                    nth = sum((engine, bits.every) == key[:2] for key in letters)
                    new = chr(ord("A" if bits.every else "a") + nth)
                    letter = letters.setdefault((engine, bits.every, bits.digest), new)
                    cells[re.sub(r"of \d+ rows ", "", bits.how)] = letter
                row = (opened.bundle.manifest.name, engine, target[-2:])
                print("|", " | ".join([*row, *(cells.get(w, "-") for w in WAYS)]), "|", flush=True)
    print("\n".join(reasons))


def measured(opened: Opened, target: str, engine: str) -> list[Bits]:
    with tempfile.TemporaryDirectory() as scratch:
        found = list(reproduce(opened, target, engine, Path(scratch)))
    manifest = opened.bundle.manifest
    with held_files(opened, target, engine) as held:
        job = {
            "engine": engine,
            "file": str(held.file(manifest.targets[target].candidates[engine].files[0])),
            "signature": manifest.signature,
            "reference": str(held.file(manifest.reference)),
        }
        command = (sys.executable, "-m", "runtime.opening.same_bits")
        done = subprocess.run(
            command, input=json.dumps(job), env=os.environ | AVX2, stdout=-1, text=True, check=True
        )
    return [*found, Bits(target, engine, LESS, done.stdout.strip())]


if __name__ == "__main__":
    main(sys.argv[1:])
