"""Writes a network's source file: row blocks in several widths and their calls, or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.lanes.planning.plan import Kernel, Plan, Step, Store, slots_of, tensors_touched
from engines.lanes.planning.plan_code import Constants, Writer
from engines.lanes.tensors import Argument, Leaves, Program
from soa.dtypes import DTYPES, itemsize

HEADERS = Path(__file__).parents[1] / "headers"
ABI = 1
"""The version of the functions by which the runner calls a network: see headers/entry.h."""
_L1 = 24 << 10  # bytes for what a step of a row block reads, out of 32 kB of L1 cache


@dataclass(frozen=True)
class Width:
    """A variant of the code for row blocks of one size.

    A vector holds `lanes` rows, and a row block `vectors` vectors. The processor has `registers`
    vector registers. `few` is 0 for a variant that runs any number of rows. A variant for a few
    rows only may hold several sums of one row in a register: `few` sums of 4 bytes.
    """

    name: str
    lanes: int
    vectors: int
    registers: int
    few: int = 0


def vectors_in_l1(plan: Plan, lanes: int) -> int:
    """Choose how many vectors a row block has: 4 or 2 if all that a step reads fits into the L1
    cache then, else 1. What a step writes, and the leaves of trees, do not count: they pass through
    the caches once, in order."""
    slots = max((_slots_read_by(plan, step) for step in plan.steps), default=0)
    vector_bytes = 4 * slots * lanes  # a slot has 4 bytes for each row
    return next((vectors for vectors in (4, 2) if vector_bytes * vectors <= _L1), 1)


def _slots_read_by(plan: Plan, step: Step) -> int:
    """The number of slots of the tensors that a step reads, without leaves of trees."""
    written = step.into if isinstance(step, Kernel) else step
    tensors = {*tensors_touched(step, plan.elements)} - {written}
    return sum(slots_of(tensor) for tensor in tensors if not isinstance(tensor, Leaves))


@dataclass(frozen=True)
class Source:
    """A source file. The assembler includes a file weights.bin into it, whose content is `weights`;
    a kernel has its weights in the text."""

    text: str
    weights: bytes


def write_source(plan: Plan, widths: Sequence[Width], timed: bool = False) -> Source:
    """Write the C++ code of a plan for the given widths. The widest must come first.

    A compiler takes the file as a whole, or in parts: with PART=0 it compiles only the calls, with
    PART=1 the first width, and so on. Code that is `timed` counts the ticks of each step, and
    compiles only as a whole.
    """
    constants = Constants()
    blocks = []
    for part, width in enumerate(widths, start=1):
        writer = Writer(plan, constants, width.registers, width.vectors, few=width.few, timed=timed)
        blocks.append(_code_of_width(part, width, writer.body()))
    head = f"#define STEPS {len(plan.steps)}\n{_HEAD}" if timed else _HEAD
    text = "\n".join([head, *define_tables(constants), *blocks, _entry_definitions(plan, widths)])
    return Source(text, bytes(constants.data) or b"\0")


def write_kernel(plan: Plan, threads: int, store: Store, rows: int = 1) -> Source:
    """Write the kernel of a plan. The text is valid CUDA C++, HIP C++ and (for tests) plain C++.

    A thread computes one row. If `store` is "shared", a block of `threads` threads computes `rows`
    rows together. If it is "registers", every loop is unrolled, so that a compiler can keep all
    stored values in registers.
    """
    constants, shared = Constants(), store == "shared"
    body = Writer(plan, constants, REGISTERS, rows, store, threads=threads if shared else 0).body()
    text = _KERNEL.format(
        unrolled="#define UNROLLED\n" if store == "registers" else "",
        arena=_ARENAS[store].format(plan.row_bytes * rows),
        rows=rows,
        row=f"BLOCK_NUMBER * {rows}" if shared else f"BLOCK_NUMBER * {threads} + THREAD_NUMBER",
        weights=_define_weights(bytes(constants.data) or b"\0", shared),
        tables="\n".join(define_tables(constants, "IN_MEMORY")),
        body=body,
        # C++ has no arrays of length 0.
        columns=max(1, len(columns_of(plan.program))),
        items=max(1, plan.program.kinds.count("i")),
        threads=threads,
    )
    return Source(text, b"")


def _define_weights(data: bytes, shared: bool) -> str:
    """The C++ definition of a kernel's weights, as an array of words of 4 bytes.

    It lies in constant memory if there is room. That is fast where all threads read the same
    address. With `shared` they do not, because they divide the elements of a row.
    """
    in_constant_memory = len(data) <= _CONSTANT_MEMORY and not shared
    memory = "IN_CONSTANT_MEMORY" if in_constant_memory else "IN_MEMORY"
    words = (data[k : k + 4].ljust(4, b"\0") for k in range(0, len(data), 4))
    entries = ", ".join(f"0x{int.from_bytes(word, 'little'):x}u" for word in words)
    return f"alignas(64) {memory} const uint32_t weights[] = {{{entries}}};"


REGISTERS = 48  # so many of a thread's registers hold sums of a product
_CONSTANT_MEMORY = 60 << 10  # the most bytes of it to use; a kernel may have 64 kB
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
#include "scalars.h"
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


def _code_of_width(part: int, width: Width, body: str) -> str:
    """The C++ code of a width, which is compiled as part number `part`."""
    return _BLOCK.format(
        part=part, name=width.name, lanes=width.lanes, vectors=width.vectors, body=body,
        header="scalars" if width.lanes == 1 else "lanes",
    )  # fmt: skip


def _entry_definitions(plan: Plan, widths: Sequence[Width]) -> str:
    """The C++ definitions that entry.h needs: sizes, the columns, and which widths run whole row
    blocks and which run the last rows."""
    program, columns, dtypes = plan.program, columns_of(plan.program), dtype_letters(plan.program)
    rows = max(width.lanes * width.vectors for width in widths)
    copies = sum(column.bytes * rows + 64 for column in columns)  # 64: for their alignment
    arena = plan.row_bytes * rows
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
    of_one_vector = (width for width in widths if width.vectors == 1)
    last = [
        f"RUN_ONE({width.name})" if width.lanes == 1 else f"RUN_FEW({width.name})"
        for width in sorted(of_one_vector, key=lambda width: width.lanes)
    ]
    return "\n".join(
        [
            *(f"static const int64_t {name} = {number};" for name, number in numbers.items()),
            f'static const char kKinds[] = "{program.kinds}", kDtypes[] = "{dtypes}";',
            define_array("int", "kBytes", [column.bytes for column in columns]),
            define_array("bool", "kWritten", [int(column.output) for column in columns]),
            "#define WHOLE_BLOCKS " + " ".join(f"RUN_BLOCKS({width.name})" for width in whole),
            "#define LAST_ROWS " + " ".join(last),
            '#if HAS_PART(0)\n#include "entry.h"\n#endif',
            "",
        ]
    )


def dtype_letters(program: Program) -> str:
    """The dtypes of a program's arguments as the runner reads them: a text with one letter for each
    argument, `a` for the first of DTYPES."""
    return "".join(chr(ord("a") + DTYPES.index(dtype)) for dtype in program.dtypes)


def define_tables(constants: Constants, memory: str = "static") -> list[str]:
    """The C++ definitions of the tables of indices among the constants."""
    return [define_array("int", name, table, memory) for table, name in constants.tables.items()]


def define_array(kind: str, name: str, entries: Sequence[int], memory: str = "static") -> str:
    """The C++ definition of a constant array. C++ has no empty arrays, so an array without entries
    gets a single 0."""
    return f"{memory} const {kind} {name}[] = {{{', '.join(map(str, entries)) or '0'}}};"


@dataclass(frozen=True)
class Column:
    """A column of the caller's memory. `bytes` is the size of an element, or 0 if the column does
    not have one element for each row. `output` is true if the program writes it."""

    bytes: int
    output: bool


def columns_of(program: Program) -> list[Column]:
    """The columns of a program, in the order of its arguments. A matrix argument has several."""
    outputs = {argument for argument, _ in program.outputs}
    columns: list[Column] = []
    for tensor in program:
        if isinstance(tensor, Argument):
            count = tensor.shape[0] if tensor.kind == "m" else 1
            of_rows = tensor.kind != "-" and tensor.items is None
            size = itemsize(tensor.dtype) if of_rows else 0
            columns += [Column(size, tensor in outputs)] * count
    return columns
