"""The columns of a signature as members of the structs of a network's header."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from engines.errors import NotApplicableError
from engines.lanes.planning.source_file import HEADERS
from engines.native import cxx_names
from soa.signature import Signature

_TYPES = {"bool": "bool", "float32": "float", "float64": "double"} | {
    "float16": "uint16_t"  # C++17 has no such type: the bits are given
}


@dataclass(frozen=True)
class Member:
    """A column of a signature as a member of the header's structs.

    It is called `name` there, and has `count` components of the C++ type `ctype`. `kind` says
    whether it has a value for each row, one that all rows share, or the items of a jagged
    collection. `output` is true if the network writes it.
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
        """The C++ text of each component: `["x"]`, or `["p[0]", "p[1]"]` for a column of 2
        components."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}[{k}]" for k in range(self.count)]


@dataclass(frozen=True)
class Members:
    """All columns of a signature as members.

    `places` has, for each column of the network in order, its member and the C++ text of the
    component. `items` maps each jagged collection to the name of its number of items.
    """

    every: tuple[Member, ...]
    places: tuple[tuple[Member, str], ...]
    items: Mapping[str, str]

    @property
    def inputs(self) -> list[Member]:
        return [member for member in self.every if not member.output]

    @property
    def outputs(self) -> list[Member]:
        return [member for member in self.every if member.output]


def members_of(signature: Signature) -> Members:
    """Make the members for the columns of a signature.

    A member has the name of its column. If several columns have the same name, the collection's
    name comes first: `jets_pt`. Raises NotApplicableError for a column of bfloat16, and for an
    output that does not have a value for each row.
    """
    blocks = (*signature.inputs, *signature.outputs)
    components = [(b.block.collection, name, k) for b in blocks for name, k in b.plan.components]
    columns = dict.fromkeys((collection, name) for collection, name, _ in components)
    count_of = Counter(name for _, name in columns)
    # In the order of their row dimensions.
    jagged = [n for dim in signature.dims for n in signature.jagged if signature.rows_of[n] == dim]
    wanted = {(c, name): name if count_of[name] == 1 else f"{c}_{name}" for c, name in columns}
    names = cxx_names([*wanted.values(), *(f"{name}_items" for name in jagged)], _reserved_names())
    members = {key: _make_member(signature, *key, names[wanted[key]]) for key in columns}
    for member in members.values():
        if member.output and member.kind != "row":
            raise NotApplicableError(
                f"the output {member.name} is one value for all rows, which a header cannot "
                "compute: make it a value for each row"
            )
    return Members(
        tuple(members.values()),
        tuple((members[c, name], members[c, name].elements[k]) for c, name, k in components),
        {name: names[f"{name}_items"] for name in jagged},
    )


def _make_member(signature: Signature, collection: str, column: str, name: str) -> Member:
    """Make the member for a column, called `name`. Raises NotApplicableError for bfloat16."""
    own = next(other for other in signature.layouts[collection].columns if other.name == column)
    outputs = [bound.block for bound in signature.outputs]
    is_output = any(block.collection == collection and column in block.columns for block in outputs)
    kind: Literal["row", "shared", "items"] = "row"
    if collection in signature.jagged:
        kind = "items"
    elif own.kind == "scalar":
        kind = "shared"
    if own.dtype == "bfloat16":
        raise NotApplicableError(
            f"the column {column} is bfloat16, of which a header has no self-test: use float32"
        )
    ctype = _TYPES.get(own.dtype, f"{own.dtype}_t")
    return Member(collection, column, name, ctype, kind, own.components, is_output)


@cache
def _reserved_names() -> frozenset[str]:
    """The names that no member may have: those of the structs, of the function `row`, whose
    arguments have the names of members, and of the macros that the header has defined at that
    point."""
    texts = [(HEADERS / file).read_text() for file in ("embedded.h", "arithmetic.h")]  # trusted
    return frozenset({"row", "Input", "Output", "Columns"}.union(*map(macros_of, texts)))


def macros_of(text: str) -> list[str]:
    """The names of the macros that a C++ text defines, in order, each once."""
    return [*dict.fromkeys(re.findall(r"^\s*#\s*define (\w+)", text, re.MULTILINE))]
