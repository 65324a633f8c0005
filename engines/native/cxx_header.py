"""Writes a signature as a C++ header: each collection is a struct of typed column pointers.

The pointers are const if the model only reads the collection. Code with a wrong name or type of a
column does not compile. The header's `load` refuses a bundle of another version or with other
columns. See include/soa_model.hpp.
"""

from __future__ import annotations

import ctypes
import errno
import re
import signal
from collections.abc import Iterable, Iterator
from itertools import count

from soa.dtypes import is_opaque, itemsize
from soa.layout import Column
from soa.signature import Signature
from soa.signature_lines import describe

_CXX_TYPES = {"bool": "bool", "float32": "float", "float64": "double"} | dict.fromkeys(
    ("float16", "bfloat16"), "std::uint16_t"  # C++17 has no such types: the bits are given
)  # fmt: skip
_TAKEN_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
    char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
    constinit continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq std soa memory buffer n capacity first at load loading folder digest layouts main
    AIO_PRIO_DELTA_MAX BIG_ENDIAN BUFSIZ BYTE_ORDER CHARCLASS_NAME_MAX CLOCKS_PER_SEC CSIGNAL
    COLL_WEIGHTS_MAX
    DECIMAL_DIG DELAYTIMER_MAX EHWPOISON EOF EXIT_FAILURE EXIT_SUCCESS EXPR_NEST_MAX FILENAME_MAX
    FOPEN_MAX F_LOCK F_TEST F_TLOCK F_ULOCK HOST_NAME_MAX HUGE_VAL INFINITY IOV_MAX LINE_MAX
    LITTLE_ENDIAN LOGIN_NAME_MAX L_INCR L_SET L_XTND L_ctermid L_cuserid L_tmpnam MATH_ERREXCEPT
    MATH_ERRNO MAXFLOAT MAX_CANON MAX_INPUT MB_CUR_MAX MB_LEN_MAX MINSIGSTKSZ MQ_PRIO_MAX NAME_MAX
    NAN NFDBITS NGREG NGROUPS_MAX NULL NZERO PATH_MAX PDP_ENDIAN PIPE_BUF P_tmpdir RAND_MAX
    RE_DUP_MAX RTSIG_MAX SEM_VALUE_MAX SIGSTKSZ SNAN SS_DISABLE SS_ONSTACK STDERR_FILENO
    STDIN_FILENO STDOUT_FILENO TEMP_FAILURE_RETRY TIMER_ABSTIME TIME_UTC TMP_MAX TTY_NAME_MAX
    WCONTINUED WEOF WNOHANG WNOWAIT WORD_BIT WUNTRACED alloca assert assert_perror errno issubnormal
    linux math_errhandling offsetof sa_handler sa_sigaction sched_priority setjmp si_addr
    si_addr_lsb si_arch si_band si_call_addr si_fd si_int si_lower si_overrun si_pid si_pkey si_ptr
    si_status si_stime si_syscall si_timerid si_uid si_upper si_utime si_value
    sigev_notify_attributes sigev_notify_function sigmask sigsetjmp stderr stdin stdout strdupa
    strndupa unix va_arg va_copy va_end va_start
"""
_TAKEN_NAMES = frozenset(_TAKEN_WORDS.split()) | {
    name
    for name in (*dir(errno), *dir(signal))
    if name.isupper()  # macros of the same names
}
"""Keywords, the names that the header uses, and macros of C++'s standard headers.

`_TAKEN_PATTERN` matches the other macros.
"""
_TAKEN_PATTERN = re.compile(
    r"""
    (PTHREAD|CLONE|SCHED|SEGV|ATOMIC|CLOCK|LC|SIGEV|HUGE_VAL|SNAN|CPU|RENAME|ADJ|BC|BUS|CLD|FD|FE
      |CLOSE_RANGE|FPE|FP|ILL|MOD|NL|POLL|REG|SA|SEEK|SI|SIG|STA|TRAP|XATTR|DBL|FLT|LDBL|SOA
    )_[A-Z0-9_]*[A-Z0-9]
    | (HUGE_VAL|SNAN)_?[A-Z0-9]+
    | (PRI|SCN)[dioxuX](FAST|LEAST)?(8|16|32|64|MAX|PTR)
    | (U?(INT|CHAR|SHRT|LONG|LLONG|LONG_LONG)|SCHAR|SIZE|SSIZE|WCHAR|WINT|PTRDIFF|SIG_ATOMIC|BOOL)
      [A-Z0-9_]*_(MAX|MIN|WIDTH|C|BIT)
    | M_([12]_(SQRT)?PI|E|LN2|LN10|LOG2E|LOG10E|PI(_[24])?|SQRT2|SQRT1_2)([lf]|f\d+x?)?
    | W(IF|EXIT|STOP|TERM)[A-Z]+ | [RWXF]_OK | pthread_cleanup_[a-z_]*[a-z]
    | [bl]e(16|32|64)toh | hto[bl]e\d+
    """,
    re.VERBOSE,
)
_RESERVED_PATTERN = re.compile(r"__\w*|_[A-Z]\w*")
"""Matches the names that C++ keeps for compilers. `_changed_names` puts an x in front of them."""

_HEADER_TEMPLATE = """\
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
_BUFFER_TEMPLATE = """
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
_COLUMNS_TEMPLATE = """
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
    """Return the text of the header, with everything in the namespace `namespace_of(model)`.

    `ref` names the version in a comment, as `jets/3`; `digest` is that of its bundle. `cxx_names`
    says which names are changed, and how.
    """
    names = cxx_names(signature.layouts)
    lines = describe(signature).splitlines(keepends=True)
    return _HEADER_TEMPLATE.format(
        ref=ref,
        short=digest[:12],
        space=namespace_of(model),
        digest=digest,
        structs="".join(_struct_text(name, names[name], signature) for name in names),
        layouts="".join(line for line in lines if not line.startswith("argument ")),
    )


def namespace_of(model: str) -> str:
    """Return the C++ namespace of a model: its name, with `_` where C++ allows no such character.

    A name that has another meaning in C++ gets a `_` at the end: `signal` becomes `signal_`.
    """
    space = re.sub(r"\W", "_", model if model[0].isalpha() else f"_{model}")
    taken = {space} if _is_in_c_library(space) else set()
    return cxx_names([space], taken)[space]


def _struct_text(collection: str, name: str, signature: Signature) -> str:
    """Return the C++ struct `name` of a collection, with a pointer to each of its columns."""
    layout, rows = signature.layouts[collection], signature.ranges[signature.rows_of[collection]]
    names = cxx_names((column.name for column in layout.columns), {name})
    const = "" if collection in signature.output_collections else "const "
    members, walk, addresses = [], [], []
    for column in layout.columns:
        member = names[column.name]
        element = const + _element_type(column)
        members += [
            _declaration(column, member, element),
            f"  static_assert(sizeof({element}) == {itemsize(column.dtype)});",
        ]
        walk.append(f"    at.{'scalar' if column.kind == 'scalar' else 'column'}({member});")
        addresses.append(f'{{"{column.name}", {{{_pointers(column, member)}}}}}')
    template = _BUFFER_TEMPLATE if layout.storage == "buffer" else _COLUMNS_TEMPLATE
    return template.format(
        name=name,
        collection=collection,
        const=const,
        columns="ConstColumns" if const else "Columns",
        read_only=", read only" if const else "",
        least=rows.min,
        most=rows.limit,
        alignment=layout.alignment,
        members="\n".join(dict.fromkeys(members)),  # each assertion once
        walk="\n".join(walk),
        addresses=", ".join(addresses),
    )


def _declaration(column: Column, member: str, element: str) -> str:
    """Return the declaration of a column's member in a struct.

    It is a pointer to `element`, or for an Eigen column an array with one for each component.
    """
    if column.kind != "eigen":
        return f"  {element} *{member} = nullptr;"
    declared = f"  std::array<{element} *, {column.components}> {member}{{}};"
    if len(column.shape) < 2:
        return declared
    return f"{declared}  // {column.shape[0]} x {column.shape[1]}, column by column"


def _pointers(column: Column, member: str) -> str:
    """Return C++ expressions for the pointers of a member: `pt`, or `p4[0], p4[1]`."""
    if column.kind != "eigen":
        return member
    return ", ".join(f"{member}[{k}]" for k in range(column.components))


def _element_type(column: Column) -> str:
    """Return the C++ type of a column's elements."""
    if is_opaque(column.dtype):
        return f"std::array<std::byte, {itemsize(column.dtype)}>"
    return _CXX_TYPES.get(column.dtype, f"std::{column.dtype}_t")


def cxx_names(scope: Iterable[str], forbidden: Iterable[str] = ()) -> dict[str, str]:
    """Return a C++ name for each of the names in `scope`, a struct or a namespace.

    A name is not changed unless it is a keyword, a macro of a standard header, used by the header
    itself, or `forbidden`. Then it gets a `_` at the end, or `_2_`, `_3_`, ... if that is the name
    of another one. No macro ends in `_`.
    """
    names, forbidden = list(scope), frozenset(forbidden)
    chosen = {name: name for name in names if not _is_taken(name) and name not in forbidden}
    used = {*chosen, *forbidden}
    for name in names:
        if name not in chosen:
            changed = _changed_names(name)
            chosen[name] = next(new for new in changed if new not in used and not _is_taken(new))
            used.add(chosen[name])
    return {name: chosen[name] for name in names}


def _changed_names(name: str) -> Iterator[str]:
    """Yield `name_`, `name_2_`, `name_3_`, … with an x in front if C++ keeps the name."""
    stem = f"x{name}" if _RESERVED_PATTERN.fullmatch(name) else name
    yield f"{stem}_"
    for number in count(2):
        yield f"{stem}_{number}_"


def _is_taken(name: str) -> bool:
    """Return whether a name already has a meaning, in C++ or in the header."""
    patterns = (_TAKEN_PATTERN, _RESERVED_PATTERN)
    return name in _TAKEN_NAMES or any(pattern.fullmatch(name) for pattern in patterns)


def _is_in_c_library(name: str) -> bool:
    """Return whether C has a function of this name, such as `index`. No namespace can have it."""
    try:
        library = ctypes.CDLL("libm.so.6")  # it gives the names of libc too
    except OSError:  # this C library is not glibc
        return False
    return hasattr(library, name)
