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
        if self.count == 1:
            return [self.name]
        return [f"{self.name}[{k}]" for k in range(self.count)]


@dataclass(frozen=True)
class Members:
    """The columns of a signature. `places`: the element behind each column of a network, in order.
    `items`: the collection of each jagged input, with the name of its number of items."""

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
    """The members for the columns of a signature. A column is called as in its collection; if two
    have one name, their collection's name stands before it. NotApplicableError if an output has no
    value for each row, and for bfloat16."""
    blocks = (*signature.inputs, *signature.outputs)
    components = [(b.block.collection, name, k) for b in blocks for name, k in b.plan.components]
    columns = dict.fromkeys((collection, name) for collection, name, _ in components)
    count_of = Counter(name for _, name in columns)
    jagged = [n for dim in signature.dims for n in signature.jagged if signature.rows_of[n] == dim]
    wanted = {(c, name): name if count_of[name] == 1 else f"{c}_{name}" for c, name in columns}
    names = cxx_names([*wanted.values(), *(f"{name}_items" for name in jagged)], _taken())
    members = {key: _member(signature, *key, names[wanted[key]]) for key in columns}
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


def _member(signature: Signature, collection: str, column: str, name: str) -> Member:
    """The member with this name for a column. NotApplicableError for bfloat16."""
    own = next(c for c in signature.layouts[collection].columns if c.name == column)
    written = {(b.block.collection, c) for b in signature.outputs for c in b.block.columns}
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
    output = (collection, column) in written
    return Member(collection, column, name, ctype, kind, own.components, output)


@cache
def _taken() -> frozenset[str]:
    """Names that no member may have: the structs, the function `row`, which takes members as
    arguments, and the macros that are defined where the members are."""
    texts = [(HEADERS / file).read_text() for file in ("embedded.h", "arithmetic.h")]  # ours
    return frozenset({"row", "Input", "Output", "Columns"}.union(*map(macros_of, texts)))


def macros_of(text: str) -> list[str]:
    """The macros that a text defines, in order."""
    return [*dict.fromkeys(re.findall(r"^\s*#\s*define (\w+)", text, re.MULTILINE))]
