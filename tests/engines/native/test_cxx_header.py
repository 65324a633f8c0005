"""Generated C++ headers compile with any column names, and their pointers are right."""

from __future__ import annotations

import re
from pathlib import Path

from engines.native import typed_header
from pipeline.config import load_config
from soa import Block, Layout, RowRange, Signature, column, eigen, opaque, scalar
from soa.dtypes import DTYPES, itemsize
from soa.layout import IDENTIFIER, Storage
from tests.models.cplusplus import ROOT, execute

INCLUDE = ROOT / "engines" / "native" / "include"
STRICT = ("-Wall", "-Wextra", "-Werror")
CHECKED = ("-std=gnu++17", "-fsyntax-only", f"-I{INCLUDE}")
# Names that C++ or our header has taken, and one that is free.
ODD = ("class", "float", "n", "first", "buffer", "memory", "hits", "at", "std", "pt_")


def signature() -> Signature:
    """Every kind of column and dtype, in a buffer and separate, with odd names."""
    members = [
        *(column(name, "float32") for name in ODD),
        *(column(f"of_{dtype}", dtype) for dtype in DTYPES),
        eigen("direction", "float64", 3),
        eigen("matrix", "float32", 2, 3),
        opaque("detector", 12),
        column("event", "uint64"),
        scalar("rho", "float32"),
    ]
    separate = [column("digest", "float32"), eigen("load", "float32", 2), scalar("mean", "float64")]
    return Signature.build(
        {"hits": Layout(members), "namespace": Layout(separate, storage="columns")},
        [Block("features", "hits", ODD)],
        [Block("answers", "namespace", ("digest", "load"))],
        {"n": RowRange(0, 1000)},
        {"hits": "n", "namespace": "n"},
    )


# Prints how far from the buffer each pointer of a header is, in bytes, then facts of the types.
PROGRAM = """
#include <cstdio>
#include "model.hpp"
int main() {
  alignas(128) static const char buffer[1 << 16] = {};
  const std::int64_t n = 40, capacity = 50, first = 3;
  const _3d_odd::hits hits(buffer, n, capacity, first);
  const auto at = [](const void *address) {
    std::printf("%td\\n", static_cast<const char *>(address) - buffer);
  };
@SHOWS@
  float values[2][40];
  double mean = 0;
  _3d_odd::namespace_ out;
  out.digest_ = values[0];
  out.load_ = {values[0], values[1]};
  out.mean = &mean;
  const soa::Memory memory = out.memory(40);
  const bool same = memory.columns.at("load")[1] == values[1];
  static_assert(std::is_same_v<decltype(hits.rho), const float *>);
  static_assert(std::is_same_v<decltype(out.mean), double *>);
  std::printf("%zu %d %zu %d %d\\n", memory.columns.size(), same, sizeof(*hits.detector),
              hits.memory.readonly, memory.readonly);
}
"""


def test_every_kind_of_column_and_names_that_cpp_has_taken(tmp_path: Path) -> None:
    """The pointers of a window from row 3 on, with a capacity of 50, as in PROGRAM."""
    odd = signature()
    layout = odd.layouts["hits"]
    (tmp_path / "model.hpp").write_text(typed_header(odd, "3d-odd", "3d-odd/1", "ab" * 32))
    members = {c.name: c.name + "_" if c.name in ODD[:9] else c.name for c in layout.columns}
    shows = [
        f"  at(hits.{members[c.name]}{f'[{k}]' if c.kind == 'eigen' else ''});"
        for c in layout.columns
        for k in range(c.components)
    ]
    (tmp_path / "use.cpp").write_text(PROGRAM.replace("@SHOWS@", "\n".join(shows)))
    flags = ("-std=c++17", *STRICT, f"-I{INCLUDE}", f"-I{tmp_path}")
    # The program refers to the library, but calls nothing of it.
    unused = ("-Wl,--unresolved-symbols=ignore-all",)
    execute("g++", *flags, tmp_path / "use.cpp", "-o", tmp_path / "use", *unused)
    *offsets, last = execute(tmp_path / "use").splitlines()
    assert last == "3 1 12 1 0"
    expected = [
        layout.offsets(50)[c.name]
        + k * layout.pitch(c.name, 50)
        + (0 if c.kind == "scalar" else 3 * itemsize(c.dtype))
        for c in layout.columns
        for k in range(c.components)
    ]
    assert list(map(int, offsets)) == expected


def test_the_code_on_the_page_about_cpp_compiles(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/cpp.md").read_text()
    page = re.sub(r"^<!-- tried: .+?^```$", "", page, flags=re.S | re.M)
    code = "\n".join(re.findall(r"^```cpp\n(.*?)^```$", page, re.S | re.M))
    demo = load_config(ROOT / "configs" / "demo.yaml")
    (tmp_path / "jet_tagger.hpp").write_text(
        typed_header(demo.signature(), demo.name, "jet-tagger/1", "ab" * 32)
    )
    (tmp_path / "page.cpp").write_text(code)
    execute("g++", *CHECKED, *STRICT, f"-I{tmp_path}", tmp_path / "page.cpp")


HEADERS = """algorithm array atomic bitset cassert cctype cerrno cfenv cfloat chrono cinttypes
climits clocale cmath complex condition_variable csetjmp csignal cstdarg cstddef cstdint cstdio
cstdlib cstring ctime cuchar cwchar cwctype filesystem fstream functional future iostream limits
mutex numeric random regex sstream stdexcept string thread type_traits vector soa_model.hpp"""
KEYWORDS = """alignas and asm auto bool char char8_t class const co_await concept default delete
double float for friend goto if inline int long mutable namespace new operator private requires
short signed static struct template this throw typename union unsigned using virtual void wchar_t
while xor std soa memory buffer n capacity first at load digest layouts main pt odd jets"""


def including(*headers: str) -> str:
    """The lines that include headers."""
    return "".join(f"#include <{name}>\n" for name in headers)


def macros(folder: Path) -> set[str]:
    """Every macro of the standard headers, of the compiler and of our header."""
    (folder / "all.cpp").write_text(including(*HEADERS.split()))
    text = execute("g++", "-std=gnu++17", f"-I{INCLUDE}", "-dM", "-E", folder / "all.cpp")
    names = set(re.findall(r"^#define (\w+)", text, re.M))
    assert {"NULL", "EOF", "errno", "assert", "INT_MAX", "linux", "M_PI"} <= names
    return names


def test_any_name_gives_a_pointer_of_its_own(tmp_path: Path) -> None:
    """Keywords, macros, and these with `_`, as columns and as collections."""
    odd = sorted(macros(tmp_path) | {*KEYWORDS.split()})
    variants = dict.fromkeys(f"{name}{suffix}" for name in odd for suffix in ("", "_", "_2_"))
    columns = [column(name, "float32") for name in variants if IDENTIFIER.fullmatch(name)]
    few = [*KEYWORDS.split(), "NULL", "EOF", "errno", "assert", "INT_MAX", "_Bool", "stdin"]
    stored: dict[str, Storage] = {name: "buffer" for name in few}
    stored |= {f"{name}_": "columns" for name in few}
    layouts = {
        name: Layout([column(name, "float32"), column(f"{name}_", "float32")], storage=storage)
        for name, storage in stored.items()
    }
    odd_names = Signature.build(
        {"wide": Layout(columns), **layouts},
        [Block("features", "wide", (columns[0].name, columns[1].name))],
        [Block(f"of_{name}", name, (layout.columns[0].name,)) for name, layout in layouts.items()],
        {"n": RowRange(0, 1000)},
        dict.fromkeys(("wide", *layouts), "n"),
    )
    text = typed_header(odd_names, "main", "main/1", "ab" * 32)
    members = re.findall(r"^  const float \*(\w+) = nullptr;$", text.partition("\n};")[0], re.M)
    assert len(members) == len(set(members)) == len(columns)
    structs = re.findall(r"^struct (\w+)", text, re.M)
    assert len(structs) == len(set(structs)) == 1 + len(layouts)
    (tmp_path / "main.hpp").write_text(text)
    (tmp_path / "use.cpp").write_text(including(*HEADERS.split(), "main.hpp"))
    execute("g++", *CHECKED, f"-I{tmp_path}", tmp_path / "use.cpp")


def test_the_namespace_is_an_identifier_and_no_function_of_c(tmp_path: Path) -> None:
    names = ("default", "jets", "2-x.y", "signal", "index", "time", "main", "errno")
    for name in names:
        (tmp_path / f"{name}.hpp").write_text(typed_header(signature(), name, name, "ab" * 32))
    ours = [f"{name}.hpp" for name in names]
    (tmp_path / "use.cpp").write_text(including("cerrno", "csignal", "cstring", "ctime", *ours))
    execute("g++", *CHECKED, f"-I{tmp_path}", tmp_path / "use.cpp")
