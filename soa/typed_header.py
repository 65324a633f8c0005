"""A signature as a C++ header: each collection a struct of typed column pointers.

A column of another type or name does not compile; another version, or another layout, is refused when the header's own
`load` opens a bundle. See engines/native/soa_model.hpp.
"""

from __future__ import annotations

import re
from itertools import chain

from soa.describe import describe
from soa.dtypes import is_opaque, itemsize
from soa.layout import Column, Layout
from soa.signature import Signature

_TYPES = {
    "bool": "bool",
    "float16": "std::uint16_t",  # C++17 has no such type: the bits
    "bfloat16": "std::uint16_t",
    "float32": "float",
    "float64": "double",
}
_TAKEN = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
    char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
    constinit continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq std soa memory buffer n capacity first at load loading folder digest layouts""".split()
)


def typed_header(signature: Signature, model: str, ref: str, digest: str) -> str:
    """The text of the header; its namespace is the model's name with `_` for what C++ does not take.

    Names that C++ or the header has taken already get a `_` behind them.
    """
    space = _name(re.sub(r"\W", "_", model if model[:1].isalpha() else f"_{model}"))
    lines = [
        f"// {ref}, bundle {digest[:12]}: written by `pipeline cxx`. Do not edit.",
        "#pragma once",
        "",
        "#include <array>",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        '#include "soa_model.hpp"',
        "",
        f"namespace {space} {{",
        "",
        f'inline constexpr char digest[] = "{digest}";',
        "",
    ]
    for name, layout in signature.layouts.items():
        lines += [*_struct(name, layout, signature), ""]
    described = describe(signature).splitlines(keepends=True)
    kept = [line for line in described if not line.startswith("argument")]
    lines += [
        "inline constexpr char layouts[] =",
        *(f'    "{line[:-1]}\\n"' for line in kept[:-1]),
        f'    "{kept[-1][:-1]}\\n";',
        "",
        "// The bundle in a folder: this very one, or with loading.any_version one of the same layouts.",
        "inline soa::Model load(const std::filesystem::path &folder, soa::Loading loading = {}) {",
        "  loading.digest = digest;",
        "  loading.layouts = layouts;",
        "  return soa::Model::load(folder, loading);",
        "}",
        "",
        f"}}  // namespace {space}",
    ]
    return "\n".join(lines) + "\n"


def _struct(name: str, layout: Layout, signature: Signature) -> list[str]:
    rows = signature.ranges[signature.rows_of[name]]
    struct = _name(name)
    types = sorted({(_type(c), itemsize(c.dtype)) for c in layout.columns})
    fields = [_field(c, struct) for c in layout.columns]
    where = "one buffer" if layout.storage == "buffer" else "separate columns"
    head = [
        f"// {rows.min} ... {rows.limit} elements in {where}, aligned to {layout.alignment}.",
        f"struct {struct} {{",
        *(f"  static_assert(sizeof({kind}) == {size});" for kind, size in types),
        *(f"  {declared}" for _, declared, _ in fields),
        "",
    ]
    columns = zip(layout.columns, fields, strict=True)
    if layout.storage == "buffer":
        walk = [
            f"    at.{'scalar' if c.kind == 'scalar' else 'column'}({member});"
            for c, (member, _, _) in columns
        ]
        return [
            *head,
            "  // The rows first ... first + n of a buffer of `capacity` elements (-1: first + n).",
            f"  {struct}(void *buffer, std::int64_t n, std::int64_t capacity = -1, std::int64_t first = 0)",
            f'      : memory("{name}", buffer, n, capacity < 0 ? first + n : capacity, first) {{',
            f"    soa::Cursor at(buffer, memory.capacity, first, {layout.alignment});",
            *walk,
            "  }",
            "",
            "  soa::Memory memory;",
            "};",
        ]
    named = ", ".join(f'{{"{c.name}", {{{given}}}}}' for c, (_, _, given) in columns)
    return [
        *head,
        "  // The rows first ... first + n of columns of `capacity` elements (-1: first + n).",
        "  soa::Memory memory(std::int64_t n, std::int64_t capacity = -1, std::int64_t first = 0) const {",
        f'    return {{"{name}", soa::Columns{{{named}}}, n, capacity, first}};',
        "  }",
        "};",
    ]


def _field(column: Column, struct: str) -> tuple[str, str, str]:
    """A column's member, its declaration, and its addresses."""
    member = _name(column.name, struct)
    if column.components == 1 and column.kind != "eigen":
        return member, f"{_type(column)} *{member} = nullptr;", member
    kind = f"std::array<{_type(column)} *, {column.components}>"
    note = f"  // {' x '.join(map(str, column.shape))}, column by column" if len(column.shape) > 1 else ""
    every = ", ".join(f"{member}[{k}]" for k in range(column.components))
    return member, f"{kind} {member}{{}};{note}", every


def _type(column: Column) -> str:
    if is_opaque(column.dtype):
        return f"std::array<std::byte, {itemsize(column.dtype)}>"
    return _TYPES.get(column.dtype, f"std::{column.dtype}_t")


def _name(name: str, *taken: str) -> str:
    return f"{name}_" if name in chain(_TAKEN, taken) else name
