"""A version whose artifact of `lanes` writes which thread computed each row."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

from registry.bundle.bundle import Bundle
from tests.models.project import TARGET, resealed

_SOURCE = """
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int begun[2];

static void work(int64_t microseconds) {
  struct timespec at, until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += microseconds * 1000;
  until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
  do clock_gettime(CLOCK_MONOTONIC, &at);
  while (at.tv_sec < until.tv_sec || (at.tv_sec == until.tv_sec && at.tv_nsec < until.tv_nsec));
}

/* With TOGETHER in the environment, later rows wait for a second thread, 10 s at most. */
__attribute__((visibility("default")))
void soa_lanes_run(void *const *columns, const int64_t *items, int64_t begin, int64_t end,
                   char *scratch) {
  const int32_t own = gettid();
  int none = 0;
  if (!atomic_compare_exchange_strong(&begun[0], &none, own) && none != own) begun[1] = own;
  for (int k = 0; begin > 0 && getenv("TOGETHER") && begun[1] == 0 && k < 10000; ++k) work(1000);
  work(5 * (end - begin));
  for (int64_t row = begin; row < end; ++row) memcpy((char *)columns[6] + 4 * row, &own, 4);
}

__attribute__((visibility("default")))
const struct { int64_t version, columns, scratch, rows, arguments; const char *kinds, *dtypes; }
    soa_lanes_facts = {1, 9, 64, 32, 3, "@KINDS@", "@DTYPES@"};
"""


class _Facts(ctypes.Structure):
    """RowFacts of engines/native/common/row_program.h."""

    _fields_ = (
        ("numbers", ctypes.c_int64 * 5),
        ("kinds", ctypes.c_char_p),
        ("dtypes", ctypes.c_char_p),
    )


def watched(bundle: Bundle, folder: Path, threads: int | None = None) -> Bundle:
    """A copy of the version of `bare_jets` that runs this artifact. A row takes 5 µs. The column
    x of its answers has the number of the thread, as the bits of an int32. `threads`: as its config
    says."""

    def edit(copy: Path, manifest: dict[str, Any]) -> None:
        target = manifest["targets"][TARGET]
        target["chosen"], target["below"] = "lanes", []
        manifest["session"]["threads"] = threads or manifest["session"]["threads"]
        library = copy / target["candidates"]["lanes"]["files"][0]
        facts = _Facts.in_dll(ctypes.CDLL(str(library)), "soa_lanes_facts")
        text = _SOURCE.replace("@KINDS@", facts.kinds.decode())
        source = copy.parent / f"{copy.name}.c"
        source.write_text(text.replace("@DTYPES@", facts.dtypes.decode()))
        library.unlink()
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)

    return resealed(bundle, folder, edit)
