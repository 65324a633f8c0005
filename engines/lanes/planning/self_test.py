"""Writes the self-test of a network's header.

The text of the header then contains some rows and the bits of their answers. Its function
`self_test` computes the rows again and compares the bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lanes.planning.header_members import Member, Members

Array = np.ndarray[Any, Any]
NAME = "soa_network"
"""The namespace of a header before it gets its own name. The names of its macros begin with it."""
# `named_header` replaces this line by the self-test.
TEST_PLACE = "// self_test stands here in a header that `pipeline source` writes."
_ON_A_LINE = 8  # so many numbers of an array stand on a line


@dataclass(frozen=True)
class Rows:
    """Some rows and their answers.

    `values` maps a collection and a column to the arrays of the column's components. An array has
    shape `(n,)`, or `(1,)` if all rows share the value; for a jagged collection it has all items.
    """

    values: Mapping[tuple[str, str], Sequence[Array]]
    n: int


def named_header(text: str, name: str, members: Members, rows: Rows) -> str:
    """Return the text of a header with its final namespace `name` and with its self-test."""
    return text.replace(TEST_PLACE, _write_self_test(members, rows)).replace(NAME, name)


@dataclass(frozen=True)
class _TestOfColumn:
    """The C++ lines of `self_test` for one column.

    `values` defines an array with its values. `row_input` sets the inputs for a call of `row`, and
    `column` sets its pointer for a call of `rows`. Only an output has the others: `memory` declares
    where `rows` writes it, and `after_row` and `after_rows` compare it after these calls.
    """

    values: str
    row_input: Sequence[str] = ()
    column: Sequence[str] = ()
    memory: Sequence[str] = ()
    after_row: Sequence[str] = ()
    after_rows: Sequence[str] = ()


def _test_of_input(member: Member, components: Sequence[Array]) -> _TestOfColumn:
    """The lines of `self_test` for an input. `components` has an array for each element of the
    member."""
    values = _define_array(member.ctype, member.name, np.concatenate(components))
    row_input, column = [], []
    for k, element in enumerate(member.elements):
        begin = f"test::{member.name} + {k * components[k].size}"
        column.append(f"  of.{element} = {begin};")
        value = {"row": f"({begin})[i]", "shared": f"({begin})[0]", "items": begin}[member.kind]
        row_input.append(f"    in.{element} = {value};")
    return _TestOfColumn(values, row_input, column)


def _test_of_output(member: Member, components: Sequence[Array]) -> _TestOfColumn:
    """The lines of `self_test` for an output. Answers are compared as bits, so that NaN is equal to
    itself. `components` has an array for each element of the member."""
    flat = np.concatenate(components)
    bits, name = f"uint{8 * flat.dtype.itemsize}", member.name
    column, after_row, after_rows = [], [], []
    for k, element in enumerate(member.elements):
        begin = k * components[k].size
        column.append(f"  of.{element} = made.{name} + {begin};")
        expected = f"test::{name}[{begin} + i]"
        after_row.append(f"    wrong += of_row::differs(out.{element}, {expected});")
        after_rows.append(f"    wrong += of_row::differs(made.{name}[{begin} + i], {expected});")
    memory = [f"    {member.ctype} {name}[{flat.size}];"]
    values = _define_array(f"{bits}_t", name, flat.view(bits))
    return _TestOfColumn(values, [], column, memory, after_row, after_rows)


def _write_self_test(members: Members, rows: Rows) -> str:
    """The C++ text of `self_test`, which computes the rows again and returns the number of values
    whose bits differ, and of the arrays that it needs."""
    tests: list[_TestOfColumn] = []
    for member in members.every:
        components = rows.values[member.collection, member.column]
        test_of_column = _test_of_output if member.output else _test_of_input
        tests.append(test_of_column(member, components))
    items = {name: _number_of_items(collection, rows) for collection, name in members.items.items()}
    return "\n".join(
        [
            "namespace test {",
            *(test.values for test in tests),
            "}  // namespace test",
            "namespace of_row {",
            "template <class Number, class Bits>",
            "static SOA_FN inline int differs(Number found, Bits bits) {",
            "  return same_bits<Bits>(found) != bits;",
            "}",
            "}  // namespace of_row",
            f"// Computes {rows.n} rows again. Returns the number of values that have other bits:",
            "// 0, unless a compiler or its flags change the arithmetic.",
            "static SOA_FN inline int self_test() {",
            "  int wrong = 0;",
            f"  for (int i = 0; i < {rows.n}; ++i) {{",
            "    Input in;",
            *(line for test in tests for line in test.row_input),
            *(f"    in.{name} = {count};" for name, count in items.items()),
            "    const Output out = row(in);",
            *(line for test in tests for line in test.after_row),
            "  }",
            "#if defined(SOA_VECTORS)",
            "  struct {  // so that no column's name is that of a variable here",
            *(line for test in tests for line in test.memory),
            "  } made;",
            "  Columns of;",
            *(line for test in tests for line in test.column),
            *(f"  of.{name} = {count};" for name, count in items.items()),
            f"  rows(of, 0, {rows.n});",
            f"  for (int i = 0; i < {rows.n}; ++i) {{",
            *(line for test in tests for line in test.after_rows),
            "  }",
            "#endif",
            "  return wrong;",
            "}",
        ]
    )


def _number_of_items(collection: str, rows: Rows) -> int:
    """The number of items in the test data of a jagged collection, which all its columns have."""
    columns = (components for (owner, _), components in rows.values.items() if owner == collection)
    return next(columns)[0].size


def _define_array(ctype: str, name: str, data: Array) -> str:
    """The C++ definition of an array with these numbers. C++ has no empty arrays, so an array
    without numbers gets a single 0."""
    values = "\n".join(number_lines(data)) or "    0"
    return f"IN_MEMORY const {ctype} {name}[] = {{\n{values}\n}};"


def number_lines(data: Array) -> Iterator[str]:
    """Yield the lines of a C++ initializer with all numbers of an array."""
    texts = [number_text(number) for number in data.reshape(-1)]
    for k in range(0, len(texts), _ON_A_LINE):
        yield f"    {', '.join(texts[k : k + _ON_A_LINE])},"


def number_text(number: Any) -> str:
    """The C++ text of a NumPy number, which a compiler reads back to the same bits."""
    if isinstance(number, np.bool_):
        return str(bool(number)).lower()
    if isinstance(number, np.integer):
        suffix = "ll" if number.itemsize == 8 else ""
        if int(number) in (-(2**31), -(2**63)):  # C++ reads their digits without the sign first
            return f"{int(number) + 1}{suffix} - 1"
        return f"{int(number)}{suffix}"
    single = isinstance(number, np.float32)
    if not np.isfinite(number):  # NVRTC has no builtin function for NaN and infinity
        bits = number.view(np.uint32 if single else np.uint64)
        return f"__builtin_bit_cast({'float' if single else 'double'}, 0x{int(bits):x})"
    return f"{number!s}{'f' if single else ''}"  # the shortest text that gives this number
