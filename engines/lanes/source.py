"""The whole C++ file of a network: its row blocks in several widths, and the function that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.lanes.plan import Plan
from engines.lanes.tensors import Argument, Program
from engines.lanes.text import Constants, Text
from soa.dtypes import DTYPES, itemsize

HERE = Path(__file__).parent
ABI = 1


@dataclass(frozen=True)
class Width:
    """A variant of the code: `lanes` rows a vector, `vectors` a row block, so many registers."""

    name: str
    lanes: int
    vectors: int
    registers: int


@dataclass(frozen=True)
class Source:
    """`text` reads weights.bin when it is compiled."""

    text: str
    weights: bytes


def written(plan: Plan, widths: Sequence[Width]) -> Source:
    """The C++ of a plan for some widths, the widest first."""
    constants = Constants()
    blocks = [
        (width, Text(plan, constants, width.registers, width.vectors).body()) for width in widths
    ]
    parts = [_HEAD, *(_table(name, entries) for entries, name in constants.tables.items())]
    parts += [_block(width, body) for width, body in blocks]
    parts.append(_entry(plan, widths))
    return Source("\n".join(parts), bytes(constants.data) or b"\0")


_HEAD = """\
#include <stdint.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define ALWAYS_INLINE __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

asm(".section .rodata\\n.balign 64\\n.hidden soa_lanes_weights\\n.global soa_lanes_weights\\n"
    "soa_lanes_weights: .incbin \\"weights.bin\\"\\n.text\\n");
extern "C" const char soa_lanes_weights[] __attribute__((visibility("hidden")));
#define weights soa_lanes_weights
"""


def _table(name: str, entries: Sequence[int]) -> str:
    return f"static const int {name}[] = {{{', '.join(map(str, entries))}}};"


def _block(width: Width, body: str) -> str:
    includes = "".join(f'#include "{name}.h"\n' for name in ("lanes", "functions", "kernels"))
    return (
        f"#define LANES {width.lanes}\n#define RV {width.vectors}\n"
        f"namespace {width.name} {{\n{includes}"
        "static __attribute__((noinline)) void block(void *const *columns, const int64_t *items, "
        "int64_t row, char *arena) {\n"
        f"  (void)items;\n{body}}}\n}}  // namespace {width.name}\n#undef LANES\n#undef RV\n"
    )


def _entry(plan: Plan, widths: Sequence[Width]) -> str:
    """What the runner calls, and what it asks before."""
    columns = _columns(plan.program)
    most = max(width.lanes * width.vectors for width in widths)
    arena = plan.size * 4 * most
    sizes = ", ".join(str(column.bytes) for column in columns) or "0"
    written_to = ", ".join(str(int(column.output)) for column in columns) or "0"
    room = sum(column.bytes * most + 64 for column in columns)
    calls = "".join(
        f"  for (; end - row >= {w.name}::kRows; row += {w.name}::kRows) {w.name}::block(columns, items, row, scratch);\n"
        for w in widths
        if w.lanes == widths[0].lanes
    )
    small = [w for w in widths if w.vectors == 1]
    rest = "".join(
        f"  if (row < end && end - row <= {w.name}::kRows) return few({w.name}::block, {w.name}::kRows, columns, items, row, end, scratch);\n"
        for w in sorted(small, key=lambda w: w.lanes)
    )
    return _ENTRY % {
        "abi": ABI,
        "columns": len(columns),
        "sizes": sizes,
        "written": written_to,
        "arena": arena,
        "scratch": arena + room + 64 + 8 * len(columns),
        "rows": most,
        "arguments": len(plan.program.kinds),
        "kinds": plan.program.kinds,
        "dtypes": "".join(chr(ord("a") + DTYPES.index(each)) for each in plan.program.dtypes),
        "calls": calls,
        "rest": rest,
    }


@dataclass(frozen=True)
class Column:
    """`bytes` of an element; 0 where all rows share it."""

    bytes: int
    output: bool


def _columns(program: Program) -> list[Column]:
    outputs = {argument for argument, _ in program.outputs}
    found: list[Column] = []
    for tensor in program:
        if isinstance(tensor, Argument):
            count = tensor.shape[0] if tensor.kind == "m" else 1
            of_rows = tensor.kind != "-" and tensor.items is None
            size = itemsize(tensor.dtype) if of_rows else 0
            found += [Column(size, tensor in outputs)] * count
    return found


_ENTRY = """\
static const int64_t kColumns = %(columns)d, kArena = %(arena)d;
static const int kBytes[] = {%(sizes)s};
static const bool kWritten[] = {%(written)s};

// Fewer rows than a block has: on copies of them, followed by the first of them again, so that nothing is
// read or written behind the end of a column.
typedef void Block(void *const *, const int64_t *, int64_t, char *);
static __attribute__((noinline)) void few(Block *block, int64_t rows, void *const *columns, const int64_t *items,
                                          int64_t row, int64_t end, char *scratch) {
  void **own = (void **)(scratch + kArena);
  char *at = (char *)(((uintptr_t)(own + kColumns) + 63) & ~(uintptr_t)63);
  for (int64_t c = 0; c < kColumns; ++c) {
    const int64_t size = kBytes[c], begin = row * size, length = (end - row) * size;
    own[c] = size == 0 ? columns[c] : at;
    if (size != 0 && !kWritten[c]) {
      const char *from = (const char *)columns[c] + begin;
      __builtin_memcpy(at, from, length);
      for (int64_t more = length; more < rows * size; more += size) __builtin_memcpy(at + more, from, size);
    }
    at += (rows * size + 63) & ~63;
  }
  block(own, items, 0, scratch);
  for (int64_t c = 0; c < kColumns; ++c) {
    const int64_t size = kBytes[c];
    if (kWritten[c]) __builtin_memcpy((char *)columns[c] + row * size, own[c], (end - row) * size);
  }
}

// Rows from `begin` up to `end` of the columns of all arguments. `items`: how many a jagged collection has.
extern "C" __attribute__((visibility("default"))) void soa_lanes_run(void *const *columns, const int64_t *items,
                                                                     int64_t begin, int64_t end, char *scratch) {
  int64_t row = begin;
%(calls)s%(rest)s}
// As engines/native/row_program.h reads it.
extern "C" __attribute__((visibility("default"))) const struct {
  int64_t version, columns, scratch, rows, arguments;
  const char *kinds, *dtypes;
} soa_lanes_facts = {%(abi)d, %(columns)d, %(scratch)d, %(rows)d, %(arguments)d, "%(kinds)s", "%(dtypes)s"};
"""
