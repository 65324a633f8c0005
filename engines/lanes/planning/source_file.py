"""Writes a network's source file: row blocks in several widths and their calls, or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.lanes.planning.plan import Kernel, Plan, Step, Store, room, touched
from engines.lanes.planning.plan_code import Constants, Writer
from engines.lanes.tensors import Argument, Leaves, Program
from soa.dtypes import DTYPES, itemsize

HEADERS = Path(__file__).parents[1] / "headers"
ABI = 1
_L1 = 24 << 10  # bytes for what a step of a row block reads, out of 32 kB of L1 cache


@dataclass(frozen=True)
class Width:
    """A variant of the code: `lanes` rows in a vector, `vectors` vectors in a row block, and the
    number of vector registers of the processor. `few`: it runs a few rows only, where a
    register holds so many sums of 4 bytes; 0: it runs any rows."""

    name: str
    lanes: int
    vectors: int
    registers: int
    few: int = 0


def vectors_in_l1(plan: Plan, lanes: int) -> int:
    """How many vectors of rows a block has: several, if what each step reads fits into L1. What a
    step writes, and leaves of trees, pass through the caches once, in order."""
    slots = max((_slots_read(plan, step) for step in plan.steps), default=0)
    return next((vectors for vectors in (4, 2) if slots * 4 * lanes * vectors <= _L1), 1)


def _slots_read(plan: Plan, step: Step) -> int:
    """The slots of the tensors that a step reads, without leaves."""
    written = step.into if isinstance(step, Kernel) else step
    read = {tensor for tensor in touched(step, plan.elements) if not isinstance(tensor, Leaves)}
    return sum(room(tensor) for tensor in read - {written})


@dataclass(frozen=True)
class Source:
    """A source file. When it is compiled, `text` includes the file weights.bin."""

    text: str
    weights: bytes


def written(plan: Plan, widths: Sequence[Width], timed: bool = False) -> Source:
    """The C++ code of a plan for the given widths; the widest must come first. `timed`: it counts
    the ticks of each step, and compiles only as a whole.

    The file compiles as a whole, or in parts: PART=0 is the calls, PART=1 the first width, and so
    on.
    """
    constants = Constants()
    blocks = []
    for part, width in enumerate(widths, 1):
        writer = Writer(plan, constants, width.registers, width.vectors, few=width.few, timed=timed)
        blocks.append(_block(part, width, writer.body()))
    head = f"#define STEPS {len(plan.steps)}\n{_HEAD}" if timed else _HEAD
    tables = [array("int", name, entries) for entries, name in constants.tables.items()]
    text = "\n".join([head, *tables, *blocks, _entry(plan, widths)])
    return Source(text, bytes(constants.data) or b"\0")


def written_kernel(plan: Plan, threads: int, store: Store, rows: int = 1) -> Source:
    """The kernel of a plan. The text is valid CUDA C++, HIP C++ and (for tests) plain C++.

    One thread computes one row; with `shared`, a block of threads computes `rows` rows together.
    With `registers`, every loop is unrolled, so that a compiler can keep all stored values in
    registers.
    """
    constants, shared = Constants(), store == "shared"
    body = Writer(plan, constants, REGISTERS, rows, store, threads=threads if shared else 0).body()
    tables = [
        array("int", name, entries, "IN_MEMORY") for entries, name in constants.tables.items()
    ]
    text = _KERNEL.format(
        unrolled="#define UNROLLED\n" if store == "registers" else "",
        arena=_ARENAS[store].format(4 * plan.size * rows),
        rows=rows,
        row=f"BLOCK_NUMBER * {rows}" if shared else f"BLOCK_NUMBER * {threads} + THREAD_NUMBER",
        weights=_weights(bytes(constants.data) or b"\0", shared),
        tables="\n".join(tables),
        body=body,
        # C++ has no arrays of length 0.
        columns=max(1, len(columns_of(plan.program))),
        items=max(1, plan.program.kinds.count("i")),
        threads=threads,
    )
    return Source(text, b"")


def _weights(data: bytes, shared: bool) -> str:
    """The constants of a kernel as an array of words. Constant memory is fast if all threads read
    the same address, as they do unless they divide the elements of a row (`shared`)."""
    in_constant_memory = len(data) <= _CONSTANT_MEMORY and not shared
    memory = "IN_CONSTANT_MEMORY" if in_constant_memory else "IN_MEMORY"
    words = (data[k : k + 4].ljust(4, b"\0") for k in range(0, len(data), 4))
    entries = ", ".join(f"0x{int.from_bytes(word, 'little'):x}u" for word in words)
    return f"alignas(64) {memory} const uint32_t weights[] = {{{entries}}};"


REGISTERS = 48  # of a thread, for the sums of a product
_CONSTANT_MEMORY = 60 << 10  # the most bytes to use, of the 64 kB that a kernel may have
_ARENAS = {
    "registers": "",
    "local": "  alignas(16) char arena[{}];\n",
    "shared": "  alignas(16) BLOCK_MEMORY char arena[{}];\n",
}
_KERNEL = """\
{unrolled}#define BLOCK_SIZE {threads}
#define RV {rows}
#include "device.h"
{weights}
{tables}
namespace one {{
#include "threads.h"
#include "functions.h"
#include "kernels.h"
INLINE void block(void *const *columns, const int64_t *items, int64_t row, int own_rows) {{
  (void)items, (void)own_rows;
{arena}{body}}}
}}  // namespace one
struct Given {{
  void *columns[{columns}];
  int64_t items[{items}], rows;
}};
KERNEL({threads}) soa_rows(GIVEN Given given) {{
  const int64_t row = (int64_t){row};
  const int own_rows = given.rows - row < RV ? (int)(given.rows - row) : RV;
  if (row < given.rows) one::block(given.columns, given.items, row, own_rows);
}}
#include "on_cpu.h"
"""

_HEAD = """\
#include "prelude.h"

#if HAS_PART(0)
asm(".section .rodata\\n.balign 64\\n.hidden soa_lanes_weights\\n.global soa_lanes_weights\\n"
    "soa_lanes_weights: .incbin \\"weights.bin\\"\\n.text\\n");
#endif
extern "C" HIDDEN const char soa_lanes_weights[];
#define weights soa_lanes_weights
"""


_BLOCK = """\
#define LANES {lanes}
#define RV {vectors}
namespace {name} {{
#if HAS_PART({part})
#include "{header}.h"
#include "functions.h"
#include "kernels.h"
OF_PART void block(void *const *columns, const int64_t *items, int64_t row, char *arena,
                   int own_rows) {{
  (void)items, (void)own_rows;
{body}}}
#else
constexpr int kRows = LANES * RV;
HIDDEN void block(void *const *columns, const int64_t *items, int64_t row, char *arena,
                  int own_rows);
#endif
}}  // namespace {name}
#undef LANES
#undef RV
"""


def _block(part: int, width: Width, body: str) -> str:
    """The code of a width, which is compiled if `part` is."""
    return _BLOCK.format(
        part=part, name=width.name, lanes=width.lanes, vectors=width.vectors, body=body,
        header="threads" if width.lanes == 1 else "lanes",
    )  # fmt: skip


def _entry(plan: Plan, widths: Sequence[Width]) -> str:
    """The definitions that entry.h needs: sizes, and the blocks for whole and for last rows."""
    program, columns = plan.program, columns_of(plan.program)
    rows = max(width.lanes * width.vectors for width in widths)
    copies = sum(column.bytes * rows + 64 for column in columns)
    arena = plan.size * 4 * rows
    numbers = {
        "kAbi": ABI,
        "kColumns": len(columns),
        "kArena": arena,
        "kScratch": arena + copies + 64 + 8 * len(columns),
        "kMostRows": rows,
        "kArguments": len(program.kinds),
    }
    # Whole blocks by the widest vectors; the last rows by the narrowest that hold them.
    whole = [width for width in widths if width.lanes == widths[0].lanes]
    narrowest_first = sorted((w for w in widths if w.vectors == 1), key=lambda w: w.lanes)
    last = (f"{'RUN_ONE' if w.lanes == 1 else 'RUN_FEW'}({w.name})" for w in narrowest_first)
    return "\n".join(
        [
            *(f"static const int64_t {name} = {number};" for name, number in numbers.items()),
            f'static const char kKinds[] = "{program.kinds}", kDtypes[] = "{letters(program)}";',
            array("int", "kBytes", [column.bytes for column in columns]),
            array("bool", "kWritten", [int(column.output) for column in columns]),
            "#define WHOLE_BLOCKS " + " ".join(f"RUN_BLOCKS({width.name})" for width in whole),
            "#define LAST_ROWS " + " ".join(last),
            '#if HAS_PART(0)\n#include "entry.h"\n#endif',
            "",
        ]
    )


def letters(program: Program) -> str:
    """The dtype of each argument, as one letter each, for the runner."""
    return "".join(chr(ord("a") + DTYPES.index(dtype)) for dtype in program.dtypes)


def array(kind: str, name: str, entries: Sequence[int], memory: str = "static") -> str:
    """The C++ definition of a constant array; without entries it has one, since C++ needs one."""
    return f"{memory} const {kind} {name}[] = {{{', '.join(map(str, entries)) or '0'}}};"


@dataclass(frozen=True)
class Column:
    """A column. `bytes`: the size of an element; 0 if it has no element for each row."""

    bytes: int
    output: bool


def columns_of(program: Program) -> list[Column]:
    """The columns of a program, in the order of its arguments. A matrix has several."""
    outputs = {argument for argument, _ in program.outputs}
    columns: list[Column] = []
    for tensor in program:
        if isinstance(tensor, Argument):
            count = tensor.shape[0] if tensor.kind == "m" else 1
            of_rows = tensor.kind != "-" and tensor.items is None
            size = itemsize(tensor.dtype) if of_rows else 0
            columns += [Column(size, tensor in outputs)] * count
    return columns
