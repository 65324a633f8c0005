"""Writes a signature as a C++ header: each collection is a struct of typed column pointers.

The pointers are const if the model only reads the collection. Code with a wrong name or type of a
column does not compile. The header's `load` refuses a bundle of another version or with other
columns. See include/soa_model.hpp.
"""

from __future__ import annotations

import re

from soa.dtypes import is_opaque, itemsize
from soa.layout import Column, Layout
from soa.signature import Signature
from soa.signature_lines import describe

_TYPES = {"bool": "bool", "float32": "float", "float64": "double"} | dict.fromkeys(
    ("float16", "bfloat16"), "std::uint16_t"  # C++17 has no such types: the bits are given
)  # fmt: skip
_TAKEN = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
    char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
    constinit continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq std soa memory buffer n capacity first at load loading folder digest layouts
"""

_HEADER = """\
// {ref}, bundle {short}: written by `pipeline cxx`. Do not edit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "soa_model.hpp"

namespace {space} {{

inline constexpr char digest[] = "{digest}";
{structs}
inline constexpr char layouts[] = R"({layouts})";

// Loads the bundle in a folder. It must be this bundle. With loading.any_version, it may be any one
// with the same columns.
inline soa::Model load(const std::filesystem::path &folder, soa::Loading loading = {{}}) {{
  loading.digest = digest;
  loading.layouts = layouts;
  return soa::Model::load(folder, loading);
}}

}}  // namespace {space}
"""
_BUFFER = """
// {least} ... {most} elements in one buffer, aligned to {alignment}{read_only}.
struct {name} {{
{members}

  // A buffer of `capacity` elements (-1: just enough), of which n are in use; with `first`, the n
  // rows from row `first` on.
  {name}({const}void *buffer, std::int64_t n, std::int64_t capacity = -1, std::int64_t first = -1)
      : memory("{collection}", buffer, n, capacity, first) {{
    soa::Cursor at(memory.data, memory.capacity, memory.first, {alignment});
{walk}
  }}

  soa::Memory memory;
}};
"""
_COLUMNS = """
// {least} ... {most} elements in separate columns, each aligned to {alignment} and to its
// element{read_only}.
struct {name} {{
{members}

  // Columns of `capacity` elements (-1: just enough), of which n are in use; with `first`, the n
  // rows from row `first` on.
  soa::Memory memory(std::int64_t n, std::int64_t capacity = -1, std::int64_t first = -1) const {{
    return {{"{collection}", soa::{columns}{{{addresses}}}, n, capacity, first}};
  }}
}};
"""


def typed_header(signature: Signature, model: str, ref: str, digest: str) -> str:
    """The text of the header. Its namespace is the model's name, with `_` for characters that C++
    does not allow. Names that C++ or the header uses already get a `_` at the end.
    """
    lines = describe(signature).splitlines(keepends=True)
    return _HEADER.format(
        ref=ref,
        short=digest[:12],
        space=_name(re.sub(r"\W", "_", model if model[0].isalpha() else f"_{model}")),
        digest=digest,
        structs="".join(_struct(name, each, signature) for name, each in signature.layouts.items()),
        layouts="".join(line for line in lines if not line.startswith("argument ")),
    )


def _struct(collection: str, layout: Layout, signature: Signature) -> str:
    name, rows = _name(collection), signature.ranges[signature.rows_of[collection]]
    const = "" if collection in signature.output_collections else "const "
    members, walk, addresses = [], [], []
    for column in layout.columns:
        member, kind = _name(column.name, name), const + _type(column)
        members.append(f"  {kind} *{member} = nullptr;")
        every = member
        if column.kind == "eigen":
            members[-1] = f"  std::array<{kind} *, {column.components}> {member}{{}};"
            if len(column.shape) > 1:
                members[-1] += f"  // {column.shape[0]} x {column.shape[1]}, column by column"
            every = ", ".join(f"{member}[{k}]" for k in range(column.components))
        members.append(f"  static_assert(sizeof({kind}) == {itemsize(column.dtype)});")
        walk.append(f"    at.{'scalar' if column.kind == 'scalar' else 'column'}({member});")
        addresses.append(f'{{"{column.name}", {{{every}}}}}')
    return (_BUFFER if layout.storage == "buffer" else _COLUMNS).format(
        name=name,
        collection=collection,
        const=const,
        columns="ConstColumns" if const else "Columns",
        read_only=", read only" if const else "",
        least=rows.min,
        most=rows.limit,
        alignment=layout.alignment,
        members="\n".join(dict.fromkeys(members)),
        walk="\n".join(walk),
        addresses=", ".join(addresses),
    )


def _type(column: Column) -> str:
    if is_opaque(column.dtype):
        return f"std::array<std::byte, {itemsize(column.dtype)}>"
    return _TYPES.get(column.dtype, f"std::{column.dtype}_t")


def _name(name: str, struct: str = "") -> str:
    return f"{name}_" if name in _TAKEN.split() or name == struct else name
