"""Finds missing waits in kernels in which a block of threads computes rows together.

    python -m tests.engines.lanes.waits

Each thread of a block runs as a thread of the operating system. Between two waits the threads take
turns, in ascending or in descending order, so that a thread reads what others have not yet written,
or overwrites what others have not yet read, unless a wait stands between. The answers must be those
of the library in both orders. Then each wait is removed in turn: the answers must change, or
ThreadSanitizer must find no race, because each thread reads only what it wrote itself.

What this cannot show: the order of memory on a GPU, and threads of one warp, which run in step.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engines.lanes.planning import HEADERS, columns_of, make_plan, write_kernel
from tests.engines.lanes.harness import compiled_row, program_of
from tests.models.forests import Forest

THREADS = 4  # ThreadSanitizer remembers about four accesses to a word
ROWS, TOGETHER = 5, 4  # so the last block has one row
_RACE = 66  # the status with which ThreadSanitizer ends a program
_TRIES = 5
# It runs soa_rows in each thread of each block, with `waits` where a block waits; argument 1 is the
# step. It reads the columns from the file `columns` and prints those that were written. Status 2: a
# byte behind the last row was written.
_DRIVER = """\
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static std::mutex mutex;
static std::condition_variable changed;
static pthread_barrier_t barrier;
static int turn, step;  // step: 1 or -1, or 0 if all threads run at once
static thread_local int own;
static void wait_for_turn() {{
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [] {{ return turn == own; }});
}}
static void pass_on() {{
  {{
    std::lock_guard<std::mutex> lock(mutex);
    turn = (own + step + {threads}) % {threads};
  }}
  changed.notify_all();
}}
static void waits() {{
  if (step == 0) {{
    pthread_barrier_wait(&barrier);
    return;
  }}
  pass_on();
  wait_for_turn();
}}
#define THREADS_OF_BLOCK waits
#include "network.cu"
int main(int, char **words) {{
  step = atoi(words[1]);
  const int bytes[] = {{{bytes}}}, written[] = {{{written}}};
  Given given{{}};
  FILE *in = fopen("columns", "rb");
  for (int c = 0; c < {columns}; ++c) {{
    given.columns[c] = calloc({rows} + {together}, bytes[c]);
    if (fread(given.columns[c], bytes[c], {rows}, in) != {rows}) return 1;
  }}
  given.rows = {rows};
  pthread_barrier_init(&barrier, nullptr, {threads});
  for (int block = 0; block < {blocks}; ++block) {{
    turn = step < 0 ? {threads} - 1 : 0;
    std::vector<std::thread> all;
    for (int t = 0; t < {threads}; ++t) {{
      all.emplace_back([=] {{
        block_number = block;
        thread_number = own = t;
        if (step != 0) wait_for_turn();
        soa_rows(given);
        if (step != 0) pass_on();
      }});
    }}
    for (auto &each : all) each.join();
  }}
  for (int c = 0; c < {columns}; ++c) {{
    const char *behind = (const char *)given.columns[c] + {rows} * bytes[c];
    for (int b = 0; b < {together} * bytes[c]; ++b) {{
      if (behind[b] != 0) return 2;
    }}
    if (written[c]) fwrite(given.columns[c], bytes[c], {rows}, stdout);
  }}
}}
"""


class Attention(nn.Module):
    """Twelve particles of four features attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(4, 48), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        seen = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return (self.last(seen.mean(1)),)


class Ranked(nn.Module):
    """A sort, a sum so far, and a scatter."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ordered, places = x.sort(-1)
        summed = ordered.cumsum(-1)
        return torch.zeros_like(x).scatter(-1, places, summed), summed[:, -1:]


class Steps(nn.Module):
    """An LSTM of five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.lstm(x)[0][:, -1],)


class Odd(nn.Module):
    """Sizes that no tile divides: 11 positions of 3 features, 5 channels, 13 values, 7 answers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.first = nn.Conv1d(3, 5, 3, padding=1), nn.Linear(55, 13)
        self.last = nn.Linear(13, 7, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        seen = torch.relu(self.positions(x.transpose(1, 2)))
        paired = seen @ seen.transpose(1, 2) @ seen
        found = self.last(torch.tanh(self.first(paired.flatten(1))).double())
        return (found.float(),)


class Network(NamedTuple):
    """A model, the shape of a row, and the number of its outputs."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int = 1


NETWORKS = {
    "attention": Network(Attention, (12, 4)),
    "ranked": Network(Ranked, (24,), outputs=2),
    "lstm": Network(Steps, (5, 3)),
    "odd": Network(Odd, (11, 3)),
    "trees": Network(Forest, (6,)),
}


@dataclass(frozen=True)
class Shared:
    """A kernel whose rows a block computes together, the program that runs it, its columns as
    bytes, and the library's answers."""

    text: str
    driver: str
    columns: bytes
    answers: bytes

    @property
    def waits(self) -> list[int]:
        """Where each wait of the network's own code stands in the text."""
        return [wait.start() for wait in re.finditer("BLOCK_WAITS;", self.text)]

    def without(self, place: int) -> Shared:
        """The kernel without the wait at this place."""
        end = place + len("BLOCK_WAITS")
        return replace(self, text=f"{self.text[:place]}{self.text[end:]}")

    def right(self) -> bool:
        """Whether the answers are the library's, in both orders of the threads."""
        with self._program("-O1") as program:
            return all(_run(program, step).stdout == self.answers for step in ("1", "-1"))

    def races(self) -> bool:
        """Whether ThreadSanitizer reports a race in one of some runs."""
        with self._program("-O1", "-fsanitize=thread") as program:
            return any(_run(program, "0").returncode == _RACE for _ in range(_TRIES))

    @contextmanager
    def _program(self, *flags: str) -> Iterator[Path]:
        """The driver, compiled with these flags; its folder is removed afterwards."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "network.cu").write_text(self.text)
            (folder / "main.cpp").write_text(self.driver)
            (folder / "columns").write_bytes(self.columns)
            command = ["g++", "-std=c++20", *flags, "-ffp-contract=off", "-w", "-pthread",
                       "-I", str(HEADERS), "-I", ".", "-o", "main", "main.cpp"]  # fmt: skip
            subprocess.run(command, cwd=folder, check=True)
            yield folder / "main"


def _run(program: Path, step: str) -> subprocess.CompletedProcess[bytes]:
    """Runs the driver. `step`: from one thread to the next, "1" or "-1"; "0": all at once."""
    # Without random addresses, which the sanitizer does not take on newer systems.
    command = ["setarch", "-R", str(program), step]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, timeout=60, check=False)
    if done.returncode == 2:
        raise RuntimeError("it wrote behind the last row")
    if done.returncode not in (0, _RACE):
        raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
    return done


def shared(name: str) -> Shared:
    """The kernel of one of `NETWORKS`, for a block of THREADS that computes TOGETHER rows."""
    network = NETWORKS[name]
    torch.manual_seed(1)
    rows = torch.randn(ROWS, *network.shape)
    model = network.model()
    plan = make_plan(program_of(model, [rows]))
    columns = columns_of(plan.program)
    answers = compiled_row(model, [rows], [f"y{k}" for k in range(network.outputs)])(rows)
    written = b"".join(_column_bytes(values) for values in answers.values())
    driver = _DRIVER.format(
        bytes=", ".join(str(column.bytes) for column in columns),
        written=", ".join(str(int(column.output)) for column in columns),
        columns=len(columns),
        rows=ROWS,
        blocks=-(-ROWS // TOGETHER),
        together=TOGETHER,
        threads=THREADS,
    )
    text = write_kernel(plan, THREADS, "shared", TOGETHER).text
    return Shared(text, driver, _column_bytes(rows) + bytes(len(written)), written)


def _column_bytes(values: Tensor) -> bytes:
    """The columns of a tensor of rows, one after the other."""
    return values.reshape(ROWS, -1).T.contiguous().numpy().tobytes()


@dataclass(frozen=True)
class WaitCounts:
    """What became of a kernel's waits when each was removed: `seen` changes an answer, `idle` is
    not needed, `missed` is neither."""

    seen: int
    idle: int
    missed: int


def counts_without_each_wait(kernel: Shared) -> WaitCounts:
    """Removes each wait of a kernel in turn."""
    seen = idle = 0
    for place in kernel.waits:
        without = kernel.without(place)
        if not without.right():
            seen += 1
        elif not without.races():
            idle += 1
    return WaitCounts(seen, idle, len(kernel.waits) - seen - idle)


def main() -> None:
    """Prints a line for each network; the status is 1 if one is wrong or a wait is missed."""
    bad = False
    for name in NETWORKS:
        kernel = shared(name)
        right = kernel.right() and not kernel.races()
        waits = counts_without_each_wait(kernel)
        print(
            f"{name}: {'right in both orders, no race' if right else 'WRONG'}; of "
            f"{len(kernel.waits)} waits {waits.seen} change an answer when they are removed, "
            f"{waits.idle} are not needed, {waits.missed} missed",
            flush=True,
        )
        bad |= waits.missed > 0 or not right
    sys.exit(bad)


if __name__ == "__main__":
    main()
