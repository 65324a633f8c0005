"""Writes a network as one C++ header for a user's own loop or kernel. It includes no file of ours.

`row` computes one row, also in a thread of a GPU; `rows` computes columns on a CPU, with a row in
each lane of a vector; `kernel` computes columns on a GPU, with a row in each thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engines.errors import NotApplicableError
from engines.lanes.planning.header_members import Member, Members, macros_of
from engines.lanes.planning.plan import Plan, Store
from engines.lanes.planning.plan_code import Constants, Writer
from engines.lanes.planning.self_test import NAME, TEST_PLACE, number_lines
from engines.lanes.planning.source_file import (
    ABI,
    HEADERS,
    REGISTERS,
    define_tables,
    dtype_letters,
    vectors_in_l1,
)

Language = Literal["cpp", "cuda", "hip"]
_MOST_BYTES = 4 << 20  # the most bytes of constants; their text has about four times as many
_MOST_ARENA = 32 << 10  # the most bytes on the stack of `rows`; more are thread-local
_LANES, _VECTOR_REGISTERS = 8, 16  # as for x86-64-v3: see compiling/library.py
_MOST_ROWS = 64  # the most rows of a row block: four vectors of 16 lanes


@dataclass(frozen=True)
class Header:
    """The text of a network's header, whose namespace is still `NAME`, and the text of a C++ file
    for a library that runs it."""

    text: str
    library: str


def write_header(plan: Plan, members: Members, language: Language, store: Store) -> Header:
    """Write the header of a plan. `store` says where the function `row` keeps intermediate values.
    Raises NotApplicableError if the text would be too long for a compiler."""
    constants, on_cpu = Constants(), language == "cpp"
    vectors = vectors_in_l1(plan, _LANES)
    registers_and_vectors = (_VECTOR_REGISTERS, vectors) if on_cpu else (REGISTERS, 1)
    one_row = Writer(plan, constants, *registers_and_vectors, store, on_cpu=on_cpu).body()
    row_block = Writer(plan, constants, *registers_and_vectors).body() if on_cpu else ""
    if len(constants.data) > _MOST_BYTES:
        raise NotApplicableError(
            f"its weights take {len(constants.data) >> 20} MB, more than the {_MOST_BYTES >> 20} "
            "MB that a header may hold: use the library (pipeline cxx)"
        )
    functions = _read_header("functions.h") + _read_header("kernels.h")
    arena = "" if store == "registers" else f"  alignas(16) char arena[{plan.row_bytes}];\n"
    of_rows, run_rows = "", _KERNEL
    if on_cpu:
        code = _read_header("lanes.h") + functions + _define_block(row_block, ", char *arena")
        of_rows, run_rows = _vector_code(vectors, code), _rows_function(members, plan.row_bytes)
    sections = [
        f"#ifndef {NAME}_{_DIGEST}\n#define {NAME}_{_DIGEST}",
        "#define UNROLLED" if store == "registers" else "",
        _read_header("embedded.h") + _read_header("arithmetic.h"),
        f"namespace {NAME} {{\n{_VERSION}\ninline namespace v{_DIGEST} {{",
        _define_structs(members),
        _define_weights(constants),
        *define_tables(constants, "IN_MEMORY"),
        "// --- one row ---\nnamespace of_row {",
        _read_header("scalars.h") + functions + _define_block(arena + one_row),
        "}  // namespace of_row\n#undef LANES\n#undef RV",
        of_rows,
        _row_functions(members),
        run_rows,
        TEST_PLACE,
        f"}}  // namespace v{_DIGEST}\n}}  // namespace {NAME}",
    ]
    text = "\n".join(section for section in sections if section)
    text = f"{text}\n{_undefine_macros(text)}{_END}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    run = f"{NAME}::rows(of, begin, end);" if on_cpu else _RUN_EACH_ROW
    return Header(text.replace(_DIGEST, digest), _write_library(plan, members, run))


_DIGEST = "soa_digest"
"""Stands in the text where its digest will be."""
_VERSION = (
    "// Two versions of a network may be in one program, in files of their own: their names differ."
)
_RUN_EACH_ROW = f"for (; begin < end; ++begin) {NAME}::row(of, begin);"


def _read_header(file: str) -> str:
    """Read one of the files in headers/."""
    return (HEADERS / file).read_text()  # trusted


def _undefine_macros(text: str) -> str:
    """The lines that undefine each macro of the text, except those that a user may define."""
    users = ("SOA_FN", "INT32_MIN", "INT32_MAX", "INT64_MIN", "INT64_MAX", f"{NAME}_{_DIGEST}")
    return "".join(f"#undef {name}\n" for name in macros_of(text) if name not in users)


_END = """\
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif
"""


# --- structs ---


def _define_structs(members: Members) -> str:
    """The C++ definitions of the structs for the inputs of a row, its outputs, and columns."""
    values = [line for member in members.inputs for line in _declare_value(member, members)]
    columns = [line for member in members.every for line in _declare_pointer(member, members)]
    outputs = [f"  {member.ctype} {_declared_name(member)};" for member in members.outputs]
    return "\n".join(
        [
            "// The inputs of a row. Of a jagged collection: all its items, and their number.",
            *("struct Input {", *values, "};"),
            "// The outputs of a row.",
            *("struct Output {", *outputs, "};"),
            "// Columns in memory: element i belongs to row i. The caller owns the memory.",
            *("struct Columns {", *columns, "};"),
        ]
    )


def _declared_name(member: Member) -> str:
    """The member's name as it stands in a declaration: `x`, or `x[3]` if it has 3 components."""
    return member.name if member.count == 1 else f"{member.name}[{member.count}]"


def _declare_value(member: Member, members: Members) -> Iterator[str]:
    """Yield the lines that declare a member of the struct for one row's inputs: a value, or for
    items a pointer to them."""
    if member.kind == "items":
        yield from _declare_pointer(member, members)
    else:
        shared = "  // the same for all rows" if member.kind == "shared" else ""
        yield f"  {member.ctype} {_declared_name(member)};{shared}"


def _declare_pointer(member: Member, members: Members) -> Iterator[str]:
    """Yield the lines that declare a pointer to a member's values for all rows, or to all items.
    The last member of a jagged collection is followed by the collection's number of items."""
    const = "" if member.output else "const "
    notes = {
        "row": "",
        "shared": "  // one value, the same for all rows",
        "items": f"  // items of {member.collection}",
    }
    yield f"  {const}{member.ctype} *{_declared_name(member)};{notes[member.kind]}"
    of_collection = [other for other in members.every if other.collection == member.collection]
    if member.kind == "items" and member == of_collection[-1]:
        yield f"  int64_t {members.items[member.collection]};"


# --- weights ---


def _define_weights(constants: Constants) -> str:
    """The C++ definition of the constants: a struct with an array for each tensor. As the code
    expects, each array begins at a multiple of 64 bytes."""
    ctypes = {"float32": "float", "float64": "double", "int32": "int32_t", "int64": "int64_t"}
    fields, values = [], []
    segments = [segment for segment in constants.segments if segment.count]
    for number, segment in enumerate(segments):
        count, kind = segment.count, ctypes[segment.dtype]
        data = np.frombuffer(constants.data, segment.dtype, count, segment.at)
        shape = " x ".join(map(str, segment.shape)) or "1"
        fields.append(f"  alignas(64) {kind} w{number}[{count}];  // {shape}: {segment.line}")
        values += [f"  {{  // w{number}: {shape}", *number_lines(data), "  },"]
    fields, values = fields or ["  char none;"], values or ["  0"]
    return "\n".join(
        [
            "// --- constants: weights in the order in which the code reads them ---",
            *("struct Weights {", *fields, "};"),
            *("IN_MEMORY const Weights values = {", *values, "};"),
        ]
    )


# --- functions ---


def _define_block(body: str, more: str = "") -> str:
    """The C++ definition of the function `block` with this body. `more` is the text of further
    parameters."""
    return (
        "#define weights ((const char *)&values)\n"
        f"INLINE void block(void *const *columns, const int64_t *items, int64_t row{more}) {{\n"
        "  constexpr int own_rows = kRows;\n"
        f"  (void)columns, (void)items, (void)row, (void)own_rows;\n{body}}}\n#undef weights"
    )


def _vector_code(vectors: int, code: str) -> str:
    """The code that computes a row in each lane of `vectors` vectors, in a namespace of its own,
    and conditions that leave it out where the compiler's target has no such vectors."""
    return f"""\
#if !SOA_ON_GPU && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
#define SOA_VECTORS 1
#elif !SOA_ON_GPU && defined(__aarch64__)
#define SOA_VECTORS 1
#else
#define SOA_VECTORS 0
#endif
#if SOA_VECTORS
// --- a row in each lane of {vectors} vectors ---
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define RV {vectors}
namespace of_rows {{
{code}
}}  // namespace of_rows
#undef LANES
#undef RV
#endif"""


def _row_functions(members: Members) -> str:
    """The C++ functions named `row`, which compute one row."""
    lines = [
        "// The outputs of one row.",
        "static SOA_FN inline Output row(const Input &in) {",
        "  Output out;",
        f"  const void *const columns[] = {{{', '.join(_addresses_of_values(members))}}};",
        f"  const int64_t items[] = {{{_numbers_of_items('in', members)}}};",
        "  of_row::block((void *const *)columns, items, 0);",
        "  return out;",
        "}",
        "// Computes row i of columns.",
        "static SOA_FN inline void row(const Columns &of, int64_t i) {",
        f"  const void *const columns[] = {{{', '.join(_addresses_of_columns(members))}}};",
        f"  const int64_t items[] = {{{_numbers_of_items('of', members)}}};",
        "  of_row::block((void *const *)columns, items, i);",
        "}",
    ]
    return "\n".join([*lines, *_row_by_arguments(members)])


def _addresses_of_values(members: Members) -> Iterator[str]:
    """Yield the addresses of one row's values in the structs `in` and `out`, in the order of the
    network's columns."""
    for member, element in members.places:
        if member.kind == "items":
            yield f"in.{element}"
        else:
            yield f"&{'out' if member.output else 'in'}.{element}"


def _addresses_of_columns(members: Members) -> Iterator[str]:
    """The pointers in the struct `of`, in the order of the network's columns."""
    return (f"of.{element}" for _, element in members.places)


def _numbers_of_items(struct: str, members: Members) -> str:
    """The entries of a C++ array with the numbers of items of a struct. C++ has no empty arrays, so
    without jagged collections it is a single 0."""
    return ", ".join(f"{struct}.{name}" for name in members.items.values()) or "0"


def _row_by_arguments(members: Members) -> list[str]:
    """The lines of a `row` with an argument for each input. There are none unless each input is one
    number."""
    if any(member.kind == "items" or member.count > 1 for member in members.inputs):
        return []
    parameters = ", ".join(f"{member.ctype} {member.name}" for member in members.inputs)
    names = ", ".join(member.name for member in members.inputs)
    result, only = "Output", ""
    if len(members.outputs) == 1 and members.outputs[0].count == 1:
        result, only = members.outputs[0].ctype, f".{members.outputs[0].name}"
    return [
        "// As above, with the inputs as arguments. A single output is returned as a number.",
        f"static SOA_FN inline {result} row({parameters}) "
        f"{{ return row(Input{{{names}}}){only}; }}",
    ]


def _rows_function(members: Members, row_bytes: int) -> str:
    """The C++ function `rows`, which computes columns on a CPU. `row_bytes` is that
    of the plan."""
    storage = "static thread_local " if row_bytes * _MOST_ROWS > _MOST_ARENA else ""
    return f"""\
// Computes the rows from `begin` to `end` - 1, on a CPU. Any threads may compute different rows.
static inline void rows(const Columns &of, int64_t begin, int64_t end) {{
#if SOA_VECTORS
  const void *const columns[] = {{{", ".join(_addresses_of_columns(members))}}};
  const int64_t items[] = {{{_numbers_of_items("of", members)}}};
  alignas(64) {storage}char arena[{row_bytes} * of_rows::kRows + 64];
  for (; end - begin >= of_rows::kRows; begin += of_rows::kRows) {{
    of_rows::block((void *const *)columns, items, begin, arena);
  }}
#endif
  for (; begin < end; ++begin) row(of, begin);
}}"""


_KERNEL = """\
#if SOA_ON_GPU
// Computes n rows of columns with all threads of a kernel, of which there may be any number.
static SOA_FN inline void thread_rows(const Columns &of, int64_t n) {
  for (int64_t i = THREAD; i < n; i += THREADS) row(of, i);
}
// Such a kernel: NAME::kernel<<<blocks, threads>>>(columns, n).
static __attribute__((global)) void kernel(Columns of, int64_t n) { thread_rows(of, n); }
#endif"""


def _write_library(plan: Plan, members: Members, run: str) -> str:
    """Write a C++ file that includes the header and has the functions of `headers/entry.h`, so that
    the runner can call it. `run` is the statement that computes the rows from `begin` to `end` - 1
    of the columns `of`."""
    program, assignments = plan.program, []
    for column, (member, element) in enumerate(members.places):
        const = "" if member.output else "const "
        assignments.append(f"  of.{element} = ({const}{member.ctype} *)columns[{column}];")
    assignments += [f"  of.{name} = items[{k}];" for k, name in enumerate(members.items.values())]
    facts = f'{ABI}, {len(members.places)}, 64, 1, {len(program.kinds)}, "{program.kinds}"'
    return f"""\
#include "network.h"
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void soa_lanes_run(void *const *columns, const int64_t *items, int64_t begin, int64_t end,
                            char *) {{
  {NAME}::Columns of;
  (void)items;
{chr(10).join(assignments)}
  {run}
}}
EXPORTED const struct {{
  int64_t version, columns, scratch, rows, arguments;
  const char *kinds, *dtypes;
}} soa_lanes_facts = {{{facts}, "{dtype_letters(program)}"}};
"""
