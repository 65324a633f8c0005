"""Writes the self-test of a network's header: some rows, and the bits of their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lanes.planning.header_members import Member, Members

Array = np.ndarray[Any, Any]
NAME = "soa_network"
"""The namespace of a header before it gets its name, and the beginning of its macros."""
TEST_PLACE = "// self_test stands here in a header that `pipeline source` writes."
_ON_A_LINE = 8  # numbers


@dataclass(frozen=True)
class Rows:
    """Some rows and their answers. `values`: the components of each column, by collection and
    column. Each is `(n,)`, or `(1,)` if all rows share it; of a jagged collection, all items."""

    values: Mapping[tuple[str, str], Sequence[Array]]
    n: int


def named_header(text: str, name: str, members: Members, rows: Rows) -> str:
    """A header in the namespace `name`, with `self_test`."""
    return text.replace(TEST_PLACE, _self_test(members, rows)).replace(NAME, name)


@dataclass(frozen=True)
class _TestOfColumn:
    """The lines of `self_test` for one column: its values, the input of `row`, and the column of
    `rows`; of an output, also its memory, and the comparisons after `row` and `rows`."""

    values: str
    row_input: Sequence[str] = ()
    column: Sequence[str] = ()
    memory: Sequence[str] = ()
    after_row: Sequence[str] = ()
    after_rows: Sequence[str] = ()


def _test_of_input(member: Member, components: Sequence[Array]) -> _TestOfColumn:
    """`components`: the values of each element of the member."""
    values = _test_array(member.ctype, member.name, np.concatenate(components))
    row_input, column = [], []
    for k, element in enumerate(member.elements):
        first = f"test::{member.name} + {k * components[k].size}"
        column.append(f"  of.{element} = {first};")
        text = {"row": f"({first})[i]", "shared": f"({first})[0]", "items": first}[member.kind]
        row_input.append(f"    in.{element} = {text};")
    return _TestOfColumn(values, row_input, column)


def _test_of_output(member: Member, components: Sequence[Array]) -> _TestOfColumn:
    """The answers are compared as bits, so that NaN is equal to itself."""
    flat = np.concatenate(components)
    bits, name = f"uint{8 * flat.dtype.itemsize}", member.name
    column, after_row, after_rows = [], [], []
    for k, element in enumerate(member.elements):
        first = k * components[k].size
        column.append(f"  of.{element} = made.{name} + {first};")
        expected = f"test::{name}[{first} + i]"
        after_row.append(f"    wrong += of_row::differs(out.{element}, {expected});")
        after_rows.append(f"    wrong += of_row::differs(made.{name}[{first} + i], {expected});")
    memory = [f"    {member.ctype} {name}[{flat.size}];"]
    values = _test_array(f"{bits}_t", name, flat.view(bits))
    return _TestOfColumn(values, [], column, memory, after_row, after_rows)


def _self_test(members: Members, rows: Rows) -> str:
    """A function that computes some rows again, and counts the values with other bits."""
    tests: list[_TestOfColumn] = []
    for member in members.every:
        components = rows.values[member.collection, member.column]
        test_of_column = _test_of_output if member.output else _test_of_input
        tests.append(test_of_column(member, components))
    items = {name: _items_of(collection, rows) for collection, name in members.items.items()}
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


def _items_of(collection: str, rows: Rows) -> int:
    """The number of items of a jagged collection: the length of any of its columns."""
    columns = (components for (own, _), components in rows.values.items() if own == collection)
    return next(columns)[0].size


def _test_array(ctype: str, name: str, data: Array) -> str:
    """The C++ definition of an array; without numbers it has one, since C++ needs one."""
    values = "\n".join(number_lines(data)) or "    0"
    return f"IN_MEMORY const {ctype} {name}[] = {{\n{values}\n}};"


def number_lines(data: Array) -> Iterator[str]:
    """The numbers of an array as lines of C++, each number with a comma behind it."""
    texts = [number_text(number) for number in data.reshape(-1)]
    for k in range(0, len(texts), _ON_A_LINE):
        yield f"    {', '.join(texts[k : k + _ON_A_LINE])},"


def number_text(number: Any) -> str:
    """A number of NumPy as C++ text that gives the same bits."""
    if isinstance(number, np.bool_):
        return str(bool(number)).lower()
    if isinstance(number, np.integer):
        suffix = "ll" if number.itemsize == 8 else ""
        if int(number) in (-(2**31), -(2**63)):  # C++ has no literal for these
            return f"{int(number) + 1}{suffix} - 1"
        return f"{int(number)}{suffix}"
    single = isinstance(number, np.float32)
    if not np.isfinite(number):  # NVRTC knows no builtin function for these
        bits = number.view(np.uint32 if single else np.uint64)
        return f"__builtin_bit_cast({'float' if single else 'double'}, 0x{int(bits):x})"
    return f"{number!s}{'f' if single else ''}"  # the shortest text that gives this number
