"""Writes a network as one C++ header for a user's own loop or kernel. It includes no file of ours.

`row` computes one row, also in a thread of a GPU; `rows` computes columns on a CPU, with a row in
each lane of a vector; `kernel` computes columns on a GPU, with a row in each thread.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engines.errors import NotApplicableError
from engines.lanes.planning.plan import Plan, Store
from engines.lanes.planning.plan_code import Constants, Writer
from engines.lanes.planning.source_file import ABI, HEADERS, REGISTERS, array, letters
from engines.native import cxx_names
from soa.signature import Signature

Array = np.ndarray[Any, Any]
Language = Literal["cpp", "cuda", "hip"]
NAME = "soa_network"
"""The namespace of a header before it gets its name, and the beginning of its macros."""
_TYPES = {"bool": "bool", "float32": "float", "float64": "double"} | {
    "float16": "uint16_t"  # C++17 has no such type: the bits are given
}
_TAKEN = ("row", "rows", "kernel", "self_test", "of_row", "of_rows", "Input", "Output", "Columns")
_MOST_BYTES = 4 << 20  # of constants: their text has some 13 MB
_MOST_ARENA = 32 << 10  # bytes on the stack of `rows`; if it needs more, the thread keeps them
_LANES, _VECTOR_REGISTERS, _L1 = 8, 16, 24 << 10  # as for x86-64-v3: see compiling/library.py
_MOST_ROWS = 64  # of a row block: four vectors of 16 lanes
_ON_A_LINE = 8  # numbers


@dataclass(frozen=True)
class Member:
    """A column of a signature as a member of the header's structs.

    `kind`: a value for each row, one that all rows share, or the items of a jagged collection.
    """

    collection: str
    column: str
    name: str
    ctype: str
    kind: Literal["row", "shared", "items"]
    count: int
    output: bool

    @property
    def elements(self) -> list[str]:
        """Its elements: itself, or one for each component of an Eigen column."""
        one = self.count == 1
        return [self.name] if one else [f"{self.name}[{k}]" for k in range(self.count)]


@dataclass(frozen=True)
class Members:
    """The columns of a signature. `places`: the element behind each column of a network, in order.
    `items`: the collection of each jagged input, with the name of its number of items."""

    every: tuple[Member, ...]
    places: tuple[tuple[Member, str], ...]
    items: Mapping[str, str]

    @property
    def inputs(self) -> list[Member]:
        return [each for each in self.every if not each.output]

    @property
    def outputs(self) -> list[Member]:
        return [each for each in self.every if each.output]


def members_of(signature: Signature) -> Members:
    """A column is called as in its collection; if two have one name, their collection's name stands
    before it. NotApplicableError if an output has no value for each row, and for bfloat16."""
    bounds = (*signature.inputs, *signature.outputs)
    places = [(b.block.collection, name, k) for b in bounds for name, k in b.plan.components]
    columns = dict.fromkeys((collection, name) for collection, name, _ in places)
    often = Counter(name for _, name in columns)
    jagged = [n for dim in signature.dims for n in signature.jagged if signature.rows_of[n] == dim]
    plain = {(c, name): name if often[name] == 1 else f"{c}_{name}" for c, name in columns}
    names = cxx_names([*plain.values(), *(f"{name}_items" for name in jagged)], _TAKEN)
    made = {key: _member(signature, *key, names[plain[key]]) for key in columns}
    wrong = [each.name for each in made.values() if each.output and each.kind != "row"]
    if wrong:
        raise NotApplicableError(
            f"the output {wrong[0]} is one value for all rows, which a header cannot compute: make "
            "it a value for each row"
        )
    found = [(made[collection, name], k) for collection, name, k in places]
    return Members(
        tuple(made.values()),
        tuple((member, member.elements[k]) for member, k in found),
        {name: names[f"{name}_items"] for name in jagged},
    )


def _member(signature: Signature, collection: str, column: str, name: str) -> Member:
    found = next(c for c in signature.layouts[collection].columns if c.name == column)
    written = {(b.block.collection, c) for b in signature.outputs for c in b.block.columns}
    kind: Literal["row", "shared", "items"] = "row"
    if collection in signature.jagged:
        kind = "items"
    elif found.kind == "scalar":
        kind = "shared"
    if found.dtype == "bfloat16":
        raise NotApplicableError(
            f"the column {column} is bfloat16, of which a header has no self-test: use float32"
        )
    ctype = _TYPES.get(found.dtype, f"{found.dtype}_t")
    output = (collection, column) in written
    return Member(collection, column, name, ctype, kind, found.components, output)


@dataclass(frozen=True)
class Header:
    """A network's header, whose namespace is `NAME`, and the C++ file of a library that runs it."""

    text: str
    library: str


def written_header(plan: Plan, members: Members, language: Language, store: Store) -> Header:
    """The header of a plan. `store`: where `row` keeps intermediate values. NotApplicableError if
    its text would be too long for a compiler."""
    constants, on_cpu = Constants(), language == "cpp"
    vectors = next(v for v in (4, 2, 1) if v == 1 or 4 * plan.size * _LANES * v <= _L1)
    shape = (_VECTOR_REGISTERS, vectors) if on_cpu else (REGISTERS, 1)
    one = Writer(plan, constants, *shape, store).body()
    many = Writer(plan, constants, *shape).body() if on_cpu else ""
    if len(constants.data) > _MOST_BYTES:
        raise NotApplicableError(
            f"its weights take {len(constants.data) >> 20} MB, more than the {_MOST_BYTES >> 20} "
            "MB that a header may hold: use the library (pipeline cxx)"
        )
    functions = _read("functions.h") + _read("kernels.h")
    arena = "" if store == "registers" else f"  alignas(16) char arena[{4 * plan.size}];\n"
    parts = [
        f"#ifndef {NAME}_{_DIGEST}\n#define {NAME}_{_DIGEST}",
        "#define UNROLLED" if store == "registers" else "",
        _read("embedded.h") + _read("arithmetic.h"),
        f"namespace {NAME} {{\n{_VERSION}\ninline namespace v{_DIGEST} {{",
        _structs(members),
        _weights(constants),
        *(array("int", name, each, "IN_MEMORY") for each, name in constants.tables.items()),
        "// --- one row ---\nnamespace of_row {",
        _read("threads.h") + functions + _block(arena + one),
        "}  // namespace of_row\n#undef LANES\n#undef RV",
        _of_rows(vectors, _read("lanes.h") + functions + _block(many, ", char *arena"))
        if on_cpu
        else "",
        _row(members),
        _rows(members, plan.size) if on_cpu else _KERNEL,
        _TEST,
        f"}}  // namespace v{_DIGEST}\n}}  // namespace {NAME}",
    ]
    text = "\n".join(part for part in parts if part)
    text = f"{text}\n{_undefined(text)}{_END}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    run = f"{NAME}::rows(of, begin, end);" if on_cpu else _EACH_ROW
    return Header(text.replace(_DIGEST, digest), _library(plan, members, run))


_DIGEST = "soa_digest"
_VERSION = (
    "// Two versions of a network may be in one program, in files of their own: their names differ."
)
_EACH_ROW = f"for (; begin < end; ++begin) {NAME}::row(of, begin);"


def _read(file: str) -> str:
    return (HEADERS / file).read_text()  # ours


def _undefined(text: str) -> str:
    """`#undef` of each macro that the text defines, except what a user may define."""
    names = dict.fromkeys(re.findall(r"^\s*#\s*define (\w+)", text, re.MULTILINE))
    kept = ("SOA_FN", "INT32_MIN", "INT32_MAX", "INT64_MIN", "INT64_MAX", f"{NAME}_{_DIGEST}")
    return "".join(f"#undef {name}\n" for name in names if name not in kept)


_END = """\
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif
"""
_TEST = "// self_test stands here in a header that `pipeline source` writes."


@dataclass(frozen=True)
class Rows:
    """Some rows and their answers. `values`: the components of each column, by collection and
    column. Each is `(n,)`, or `(1,)` if all rows share it; of a jagged collection, all items."""

    values: Mapping[tuple[str, str], Sequence[Array]]
    n: int


def named_header(text: str, name: str, members: Members, rows: Rows) -> str:
    """A header in the namespace `name`, with `self_test`."""
    return text.replace(_TEST, _self_test(members, rows)).replace(NAME, name)


@dataclass(frozen=True)
class _Tested:
    """The lines of `self_test` for one column: its values, and what gives them to `row` and to
    `rows`; of an output, also its memory, and the comparison of each."""

    values: str
    given: Sequence[str] = ()
    column: Sequence[str] = ()
    memory: Sequence[str] = ()
    after_row: Sequence[str] = ()
    after_rows: Sequence[str] = ()


def _tested_input(member: Member, components: Sequence[Array]) -> _Tested:
    given, column = [], []
    for k, element in enumerate(member.elements):
        first = f"test::{member.name} + {k * components[k].size}"
        column.append(f"  of.{element} = {first};")
        at = {"row": "[i]", "shared": "[0]"}.get(member.kind, "")
        given.append(f"    in.{element} = {f'({first}){at}' if at else first};")
    values = _test_array(member.ctype, member.name, np.concatenate(components))
    return _Tested(values, given, column)


def _tested_output(member: Member, components: Sequence[Array]) -> _Tested:
    flat = np.concatenate(components)
    bits, name = f"uint{8 * flat.dtype.itemsize}", member.name
    column, after_row, after_rows = [], [], []
    for k, element in enumerate(member.elements):
        first = k * components[k].size
        column.append(f"  of.{element} = made.{name} + {first};")
        wanted = f"test::{name}[{first} + i]"
        after_row.append(f"    wrong += differs(out.{element}, {wanted});")
        after_rows.append(f"    wrong += differs(made.{name}[{first} + i], {wanted});")
    memory = [f"    {member.ctype} {name}[{flat.size}];"]
    values = _test_array(f"{bits}_t", name, flat.view(bits))
    return _Tested(values, [], column, memory, after_row, after_rows)


def _self_test(members: Members, rows: Rows) -> str:
    """A function that computes some rows again, and counts the values with other bits."""
    every: list[_Tested] = []
    for each in members.every:
        components = rows.values[each.collection, each.column]
        every.append((_tested_output if each.output else _tested_input)(each, components))
    counts = {
        name: next(own[0].size for (place, _), own in rows.values.items() if place == collection)
        for collection, name in members.items.items()
    }
    return "\n".join(
        [
            "namespace test {",
            *(each.values for each in every),
            "}  // namespace test",
            f"// Computes {rows.n} rows again. Returns the number of values that have other bits:",
            "// 0, unless a compiler or its flags change the arithmetic.",
            "static SOA_FN inline int self_test() {",
            "  const auto differs = [](auto found, auto bits) {",
            "    return (int)(of_row::same_bits<decltype(bits)>(found) != bits);",
            "  };",
            "  int wrong = 0;",
            f"  for (int i = 0; i < {rows.n}; ++i) {{",
            "    Input in;",
            *(line for each in every for line in each.given),
            *(f"    in.{name} = {count};" for name, count in counts.items()),
            "    const Output out = row(in);",
            *(line for each in every for line in each.after_row),
            "  }",
            "#if defined(SOA_VECTORS)",
            "  struct {  // so that no column's name is that of a variable here",
            *(line for each in every for line in each.memory),
            "  } made;",
            "  Columns of;",
            *(line for each in every for line in each.column),
            *(f"  of.{name} = {count};" for name, count in counts.items()),
            f"  rows(of, 0, {rows.n});",
            f"  for (int i = 0; i < {rows.n}; ++i) {{",
            *(line for each in every for line in each.after_rows),
            "  }",
            "#endif",
            "  return wrong;",
            "}",
        ]
    )


def _test_array(ctype: str, name: str, data: Array) -> str:
    values = "\n".join(_numbers(data)) or "    0"
    return f"IN_MEMORY const {ctype} {name}[] = {{\n{values}\n}};"


# --- structs ---


def _structs(members: Members) -> str:
    values = [line for each in members.inputs for line in _value(each, members)]
    columns = [line for each in members.every for line in _pointer(each, members)]
    outputs = [f"  {each.ctype} {_sized(each)};" for each in members.outputs]
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


def _sized(member: Member) -> str:
    return member.name if member.count == 1 else f"{member.name}[{member.count}]"


def _value(member: Member, members: Members) -> Iterator[str]:
    if member.kind == "items":
        yield from _pointer(member, members)
    else:
        shared = "  // the same for all rows" if member.kind == "shared" else ""
        yield f"  {member.ctype} {_sized(member)};{shared}"


def _pointer(member: Member, members: Members) -> Iterator[str]:
    const = "" if member.output else "const "
    said = {"row": "", "items": f"  // items of {member.collection}"}
    note = said.get(member.kind, "  // one value, the same for all rows")
    yield f"  {const}{member.ctype} *{_sized(member)};{note}"
    of_items = [each for each in members.every if each.collection == member.collection]
    if member.kind == "items" and member == of_items[-1]:
        yield f"  int64_t {members.items[member.collection]};"


# --- weights ---


def _weights(constants: Constants) -> str:
    """The constants as a struct of arrays, which lie as the code expects: each at a multiple of 64
    bytes."""
    kinds = {"float32": "float", "float64": "double", "int32": "int32_t", "int64": "int64_t"}
    fields, values = [], []
    segments = [each for each in constants.segments if math.prod(each.shape)]
    for number, segment in enumerate(segments):
        count, kind = math.prod(segment.shape), kinds[segment.dtype]
        data = np.frombuffer(constants.data, segment.dtype, count, segment.at)
        shape = " x ".join(map(str, segment.shape)) or "1"
        fields.append(f"  alignas(64) {kind} w{number}[{count}];  // {shape}: {segment.line}")
        values += [f"  {{  // w{number}: {shape}", *_numbers(data), "  },"]
    fields, values = fields or ["  char none;"], values or ["  0"]
    return "\n".join(
        [
            "// --- constants: weights in the order in which the code reads them ---",
            *("struct Weights {", *fields, "};"),
            *("IN_MEMORY const Weights values = {", *values, "};"),
        ]
    )


def _numbers(data: Array) -> Iterator[str]:
    texts = [number_text(each) for each in data.reshape(-1)]
    for k in range(0, len(texts), _ON_A_LINE):
        yield f"    {', '.join(texts[k : k + _ON_A_LINE])},"


def number_text(number: Any) -> str:
    """A number of NumPy as C++ text that gives the same bits (of a NaN: some NaN)."""
    if isinstance(number, np.bool_):
        return str(bool(number)).lower()
    if isinstance(number, np.integer):
        suffix = "ll" if number.itemsize == 8 else ""
        if int(number) in (-(2**31), -(2**63)):  # C++ has no literal for these
            return f"{int(number) + 1}{suffix} - 1"
        return f"{int(number)}{suffix}"
    single = isinstance(number, np.float32)
    if np.isnan(number):
        return '__builtin_nanf("")' if single else '__builtin_nan("")'
    if np.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{'f' if single else ''}()"
    return f"{number!s}{'f' if single else ''}"  # the shortest text that gives this number


# --- functions ---


def _block(body: str, more: str = "") -> str:
    return (
        "#define weights ((const char *)&values)\n"
        f"INLINE void block(void *const *columns, const int64_t *items, int64_t row{more}) {{\n"
        f"  (void)columns, (void)items, (void)row;\n{body}}}\n#undef weights"
    )


def _of_rows(vectors: int, code: str) -> str:
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


def _row(members: Members) -> str:
    """The functions for one row."""
    lines = [
        "// The outputs of one row.",
        "static SOA_FN inline Output row(const Input &in) {",
        "  Output out;",
        f"  const void *const columns[] = {{{', '.join(_in_registers(members))}}};",
        f"  const int64_t items[] = {{{_items('in', members)}}};",
        "  of_row::block((void *const *)columns, items, 0);",
        "  return out;",
        "}",
        "// Computes row i of columns.",
        "static SOA_FN inline void row(const Columns &of, int64_t i) {",
        f"  const void *const columns[] = {{{', '.join(_in_columns(members))}}};",
        f"  const int64_t items[] = {{{_items('of', members)}}};",
        "  of_row::block((void *const *)columns, items, i);",
        "}",
    ]
    return "\n".join([*lines, *_by_values(members)])


def _in_registers(members: Members) -> Iterator[str]:
    for member, element in members.places:
        if member.kind == "items":
            yield f"in.{element}"
        else:
            yield f"&{'out' if member.output else 'in'}.{element}"


def _in_columns(members: Members) -> Iterator[str]:
    return (f"of.{element}" for _, element in members.places)


def _items(of: str, members: Members) -> str:
    return ", ".join(f"{of}.{name}" for name in members.items.values()) or "0"


def _by_values(members: Members) -> list[str]:
    """`row` with an argument for each input, if each is one number."""
    if any(each.kind == "items" or each.count > 1 for each in members.inputs):
        return []
    given = ", ".join(f"{each.ctype} {each.name}" for each in members.inputs)
    made = ", ".join(each.name for each in members.inputs)
    (result, found) = ("Output", "")
    if len(members.outputs) == 1 and members.outputs[0].count == 1:
        result, found = members.outputs[0].ctype, f".{members.outputs[0].name}"
    return [
        "// As above, with the inputs as arguments. A single output is returned as a number.",
        f"static SOA_FN inline {result} row({given}) {{ return row(Input{{{made}}}){found}; }}",
    ]


def _rows(members: Members, size: int) -> str:
    keeps = "static thread_local " if 4 * size * _MOST_ROWS > _MOST_ARENA else ""
    return f"""\
// Computes the rows from `begin` to `end` - 1, on a CPU. Any threads may compute different rows.
static inline void rows(const Columns &of, int64_t begin, int64_t end) {{
#if SOA_VECTORS
  const void *const columns[] = {{{", ".join(_in_columns(members))}}};
  const int64_t items[] = {{{_items("of", members)}}};
  alignas(64) {keeps}char arena[{4 * size} * of_rows::kRows + 64];
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


def _library(plan: Plan, members: Members, run: str) -> str:
    """A C++ file that gives the header's function the form of `headers/entry.h`."""
    program, lines = plan.program, []
    for column, (member, element) in enumerate(members.places):
        const = "" if member.output else "const "
        lines.append(f"  of.{element} = ({const}{member.ctype} *)columns[{column}];")
    lines += [f"  of.{name} = items[{k}];" for k, name in enumerate(members.items.values())]
    facts = f'{ABI}, {len(members.places)}, 64, 1, {len(program.kinds)}, "{program.kinds}"'
    return f"""\
#include "network.h"
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void soa_lanes_run(void *const *columns, const int64_t *items, int64_t begin, int64_t end,
                            char *) {{
  {NAME}::Columns of;
  (void)items;
{chr(10).join(lines)}
  {run}
}}
EXPORTED const struct {{
  int64_t version, columns, scratch, rows, arguments;
  const char *kinds, *dtypes;
}} soa_lanes_facts = {{{facts}, "{letters(program)}"}};
"""
