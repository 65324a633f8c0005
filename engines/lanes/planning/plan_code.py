"""The C++ code of a plan: a function that computes one row block, and the constants that it reads.

A row block is a few vectors; each vector has an element of several rows. Loop variables have the
names of the plan: i0, i1 … run over the elements of a result, k0, k1 … over the terms of a sum. `r`
runs over the vectors of a row block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engines.lanes.functions import RANGES, call_text, carrier, in_brackets
from engines.lanes.index import (
    Atom,
    Entry,
    Index,
    Indices,
    OfRow,
    Quotient,
    Remainder,
    Variable,
    loops_of,
)
from engines.lanes.planning.blocking import Blocked, Loops, Operand, Weights
from engines.lanes.planning.plan import Kernel, Plan, Step, Store
from engines.lanes.planning.together import choose_tile, number_of_tiles
from engines.lanes.tensors import (
    Argument,
    Constant,
    Leaves,
    Paths,
    Product,
    Ranks,
    Reduction,
    Scan,
    Scattered,
    Sorted,
    named_in_errors,
)
from engines.lanes.values import Call, Literal, Read, Tensor, Value, parts, walk
from soa.dtypes import itemsize

_LONGEST = 60  # an expression with more characters gets a name
_MANY = 12  # if more operations follow a sum, their code is a loop over the sums of a block
_FEW = 4  # a term with at most this many operations is repeated for each part of a sum
_MOST_PARTS = 8  # a reduction is computed in at most so many parts at the same time
_SCANS = {"sum": "added", "prod": "multiplied"}
_REDUCTIONS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "Any",
               "argmax": "ArgMax", "argmin": "ArgMin"}  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A tensor among the constants. Its `count` numbers begin at byte `at`. `line` is the first
    line of the model that uses it."""

    at: int
    dtype: str
    count: int
    shape: tuple[int, ...]
    line: str


@dataclass
class Constants:
    """Constants that all rows share: weights, one after the other, and tables of indices.

    `data` has the bytes of all weights. `places` maps the bytes of each tensor to the place where
    they begin, so that equal tensors are stored once. `tables` maps the entries of each table to
    its name.
    """

    data: bytearray = field(default_factory=bytearray)
    places: dict[bytes, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)

    def add(self, values: torch.Tensor, line: str, shape: tuple[int, ...] | None = None) -> int:
        """Add a tensor unless there is an equal one. Returns the position of its first element, in
        units of its item size. `line` is the line of the model that uses it, and `shape` its shape
        in the model, if `values` are rearranged (None: that of `values`)."""
        raw = values.contiguous().numpy().tobytes()
        if raw not in self.places:
            self.data += bytes(-len(self.data) % 64)  # zeros up to a multiple of 64 bytes
            self.places[raw] = len(self.data)
            self.data += raw
            dtype = str(values.dtype).removeprefix("torch.")
            shape = tuple(values.shape) if shape is None else shape
            self.segments.append(Segment(self.places[raw], dtype, values.numel(), shape, line))
        return self.places[raw] // values.itemsize

    def add_table(self, entries: tuple[int, ...]) -> str:
        """Add a table of indices unless there is an equal one. Returns its name."""
        return self.tables.setdefault(entries, f"table{len(self.tables)}")


def widen(data: torch.Tensor) -> torch.Tensor:
    """Convert constants to the dtype in which the code reads them, which has 4 or 8 bytes. Bools
    become integers: true is -1, that is, all bits are set."""
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype == "bool":
        return -data.to(torch.int32)
    dtypes = {"F": torch.float32, "D": torch.float64, "I": torch.int32, "Q": torch.int64}
    return data.to(dtypes[carrier(dtype)])


class _Features(NamedTuple):
    """Where the columns lie that trees compare: the address of the first one, and the distance from
    each to the next, in vectors."""

    first: str
    apart: int | None


class Writer:
    """Writes the C++ code of a plan's steps.

    The code is for a processor with so many `registers`; `vectors` and `few` are those of `Width`.
    `store` says where a GPU kernel keeps the stored tensors of a row; it is None for a CPU, where
    they lie in an arena. With "registers", each tensor is an array of its own, which a compiler may
    keep in registers. If `threads` is not 0, so many threads of a GPU divide the elements of each
    step among them and wait for each other after it; `vectors` is then the number of their rows.
    `timed` code counts the ticks of each step. `on_cpu` is for the code of one row in a C++ header:
    it runs on a CPU although it has a `store`.
    """

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        registers: int,
        vectors: int,
        store: Store | None = None,
        few: int = 0,
        timed: bool = False,
        threads: int = 0,
        on_cpu: bool = False,
    ) -> None:
        self.timed = timed
        self.plan, self.constants, self.at = plan, constants, plan.elements.at
        self.marks_loops, self.on_cpu = store is not None, store is None or on_cpu
        self.own_arrays, self.threads = store == "registers", threads
        self.registers, self.vectors, self.few = registers, vectors, few
        self.names = {tensor: f"b{k}" for k, tensor in enumerate(plan.places)}

    def body(self) -> str:
        """Write the body of the function `block`."""
        lines = [self.declare(tensor) for tensor in self.names]
        if self.timed:
            lines.append("int64_t begun = ticks();")
        line_of_model = ""
        for number, step in enumerate(self.plan.steps):
            source = step.source if isinstance(step, Kernel) else step
            if source.line and source.line != line_of_model:
                line_of_model = source.line
                lines.append(f"// {line_of_model}")
            with named_in_errors(source):
                lines += self.write_step(step)
            if self.timed:
                lines.append(f"TOOK({number});")
        return "\n".join(indent(lines)) + "\n"

    def declare(self, tensor: Tensor) -> str:
        """Return the line that declares the memory of a stored tensor, with its shape as a
        comment."""
        kind, name = carrier(tensor.dtype), self.names[tensor]
        shape = " x ".join(map(str, tensor.shape)) or "1"
        if self.own_arrays:
            return f"{kind} {name}[{tensor.count}];  // {shape}"
        place = self.plan.places[tensor]
        return f"{kind} *const {name} = ({kind} *)(arena + {place} * 4 * kRows);  // {shape}"

    def write_step(self, step: Step) -> list[str]:
        """Return the lines that run a step. After them, its results are in memory."""
        if isinstance(step, Sorted):
            return self.write_sort(step)
        if isinstance(step, Leaves):
            return self.write_leaves(step)
        if isinstance(step, Scan):
            return self.write_scan(step)
        if isinstance(step, Scattered):
            return self.write_scatter(step)
        if isinstance(step.inner, Product):
            return self.write_product(step, Loops.of(step, self.plan.elements))
        if isinstance(step.inner, Reduction):
            return self.write_reduction(step)
        return self.loop_over_elements(step.loops, self.write_value(step, Names(self)))

    def loop_over_elements(self, loops: Sequence[Variable], body: Sequence[str]) -> list[str]:
        """Return `body` inside `loops` and a loop over the vectors of a row block. The iterations
        must not depend on each other: with `threads`, these divide the iterations among them."""
        if not self.threads:
            return self.nest(loops, self.loop_over_vectors(body))
        return divide_among_threads(
            loops, "RV", ["const int r = at % RV;", "if (r >= own_rows) continue;", *body]
        )

    # --- values ---

    def write_value(self, kernel: Kernel, names: Names) -> list[str]:
        """Return the lines that compute the kernel's expression for one element and store it."""
        value = names.text(kernel.value(self.plan.elements))
        return [*names.lines, self.store_value(kernel.into, kernel.place, value)]

    def store_value(self, into: Tensor, place: Indices, value: str) -> str:
        """Return the statement that stores a value in an element of a tensor."""
        if isinstance(into, Argument):
            column = self.column(into, place)
            return f"store_{into.dtype}({column}, row + r * LANES, {value});"
        return f"{self.element(into, place)} = {value};"

    def column(self, argument: Argument, index: Indices) -> str:
        """The C++ text of the pointer to the column in which an element of an argument lies."""
        column = index[0] if argument.kind == "m" else Index()
        return f"columns[{formula(column + argument.first, self.constants)}]"

    def element(self, tensor: Tensor, index: Indices) -> str:
        """The C++ text of vector `r` of an element of a stored tensor."""
        place = formula(tensor.address(index), self.constants)
        return f"{self.names[tensor]}[{first_vector(place)} + r]"

    # --- loops ---

    def nest(self, loops: Iterable[Variable], body: Sequence[str]) -> list[str]:
        """Return `body` inside nested loops, of which the first is the outermost."""
        heads = [self.loop_head(loop.name, loop.extent) for loop in loops]
        if not heads:
            return list(body)
        if len(body) == 1:
            return [*heads[:-1], f"{heads[-1]} {body[0]}"]
        return [*heads[:-1], f"{heads[-1]} {{", *indent(body), "}"]

    def loop_over_vectors(self, body: Sequence[str]) -> list[str]:
        """Return `body` inside a loop over the vectors of a row block."""
        return [f"{self.loop_head('r', 'RV')} {{", *indent(body), "}"]

    def loop_head(self, name: str, end: int | str) -> str:
        """Return the head of a loop from 0 to `end` - 1. In a kernel, the macro LOOP stands before
        it, which says whether the compiler unrolls it."""
        mark = "LOOP " if self.marks_loops else ""
        return f"{mark}for (int {name} = 0; {name} < {end}; ++{name})"

    # --- reductions and products ---

    def write_reduction(self, kernel: Kernel) -> list[str]:
        """Return the lines that compute a reduction, and store what the kernel computes from its
        result. `all` is computed as `not any(not x)`."""
        inner = kernel.inner
        assert isinstance(inner, Reduction)
        loops = loops_of(inner.steps())
        part_count = min(loops[-1].extent, _MOST_PARTS) if loops else 1
        result = "~sum.found()" if inner.kind == "all" else "sum.found()"
        body = [
            f"{_REDUCTIONS[inner.kind]}<{carrier(inner.source.dtype)}, {part_count}> sum;",
            *self.write_terms(inner, kernel.inner_at, loops),
            f"const {carrier(inner.dtype)} result = {result};",
            *self.write_value(kernel, Names(self, {inner: "result"})),
        ]
        return self.loop_over_elements(kernel.loops, body)

    def write_terms(self, inner: Reduction, index: Indices, loops: Sequence[Variable]) -> list[str]:
        """Return the lines that give all terms to the reduction `sum`. `loops` are the loops of its
        steps."""
        names, value = Names(self), inner.term(index, self.at)
        term = names.text(value)
        if inner.kind == "all":
            term = f"~{in_brackets(term)}"
        if not loops:
            return in_scope([*names.lines, f"sum.take({term}, 0);"])
        if inner.kind.startswith("arg"):
            number = formula(_number_of_step(loops), self.constants)
            return self.nest(loops, [*names.lines, f"sum.take({term}, {number});"])
        *outer, last = loops
        is_long = bool_text(_number_of_calls(value) > _FEW)
        head = f"in_parts<{is_long}, {last.extent}>([&](int {last.name}, int part) ALWAYS_INLINE {{"
        body = indent([*names.lines, f"sum.take({term}, part);"])
        return self.nest(outer, [head, *body, "});"])

    def write_product(self, kernel: Kernel, loops: Loops) -> list[str]:
        """Return the lines that compute a product in blocks, whose sums are in registers.

        They call a function of kernels.h. Its last argument is a lambda with the lines that use a
        sum.
        """
        own_tile = choose_tile(loops, self.threads, self.vectors) if self.threads else None
        blocked = Blocked.of(loops, self.registers, self.vectors, self.few, own_tile)
        inner = kernel.inner
        assert isinstance(inner, Product)
        kind = carrier(inner.dtype)
        if blocked.weights is not None:
            function = "weighted"
            right = self.add_weights(blocked.weights, loops.right.tensor, kind)
        else:
            assert blocked.right is not None
            function, right = "paired", self.operand(blocked.right)
        leading = ""
        if self.threads:
            function, leading = f"{function}_tile", "at % kTiles, own_rows, "
        elif blocked.few:
            function, leading = f"{function}_few", "own_rows, "
        call = f"{function}<Sums>({leading}{blocked.steps}, {self.operand(blocked.left)}, {right}"
        after_sum = f"[&](int {blocked.m.name}, int {blocked.j.name}, int r, {kind} sum)"
        body = self.write_value(kernel, Names(self, {inner: "sum"}))
        lines = [
            named_sizes("Sums", self.sizes_of_sums(kernel, blocked)),
            f"{call}, {after_sum} ALWAYS_INLINE {{",
            *indent(body),
            "});",
        ]
        if self.threads:
            count = f"constexpr int kTiles = {number_of_tiles(loops, blocked.most, self.vectors)};"
            return in_scope([count, *divide_among_threads(blocked.outer, "kTiles", lines)])
        return self.nest(blocked.outer, lines) if blocked.outer else in_scope(lines)

    def sizes_of_sums(self, kernel: Kernel, blocked: Blocked) -> dict[str, int]:
        """The sizes that describe a product's sums. `weighted` in kernels.h explains the names."""
        sizes = {
            "loop": int(_number_of_calls(kernel.value(self.plan.elements)) > _MANY),
            "m": blocked.m.extent, "most_m": blocked.most.m,
            "j": blocked.j.extent, "most_j": blocked.most.j,
            "left": blocked.left.by_m,
        }  # fmt: skip
        if blocked.right is not None:
            sizes["right"] = blocked.right.by_j
        if self.threads:
            sizes["most_r"] = blocked.most.r
        elif blocked.few:
            sizes["registers"] = self.registers
        return sizes

    def add_weights(self, weights: Weights, tensor: Tensor, kind: str) -> str:
        """Add a product's weights to the constants, in the order in which the loops read them.
        Returns the C++ text of their address."""
        place = self.constants.add(weights.data, tensor.line, tensor.shape)
        address = formula(weights.rest + place, self.constants)
        return f"({_SCALARS[kind]} const *)weights + {address}"

    def operand(self, operand: Operand) -> str:
        """The C++ text of the address of the first element that is read from an operand."""
        return f"{self.names[operand.tensor]} + {self.offset(operand.rest)}"

    def offset(self, index: Index) -> str:
        """The C++ text of an element's distance from its tensor's first one, in vectors."""
        return first_vector(formula(index, self.constants))

    # --- other steps ---

    def write_sort(self, step: Sorted) -> list[str]:
        """Return the lines that sort along one dimension, in loops over the others."""
        dim, source, places = step.dim, step.source, step.places
        first_index = tuple(Index() if d == dim else i for d, i in enumerate(step.variables()))
        read = self.at(source, first_index)
        assert isinstance(read, Read)
        sizes = f"{source.shape[dim]}, {step.shape[dim]}, {bool_text(step.descending)}"
        arguments = (
            f"&{self.element(read.tensor, read.index)}, {self.stride(source, dim)}",
            f"&{self.element(step, first_index)}, {step.strides[dim]}",
            f"&{self.element(places, first_index)}, {places.strides[dim]}",
        )
        call = f"sorted<{sizes}>({', '.join(arguments)});"
        return self.loop_over_elements(loops_of(first_index), [call])

    def stride(self, source: Tensor, dim: int) -> int | None:
        """The distance in memory between neighbours along a dimension, in elements. 0 if there is
        only one element. `source` lies in memory (see `plan.tensors_in_memory`)."""
        index = source.variables()
        read = self.at(source, index)
        assert isinstance(read, Read)
        loops = loops_of((index[dim],))
        return read.tensor.address(read.index).factor(loops[0]) if loops else 0

    def write_leaves(self, step: Leaves) -> list[str]:
        """Return the lines that find the leaf of each tree, in the fastest of three ways that the
        forest allows."""
        paths, ranks = step.forest.paths, step.forest.ranks
        if paths is not None and self.on_cpu and (paths.deep or self.few):
            return self.write_leaves_by_paths(step, paths)
        if ranks is not None and self.few:
            return self.write_leaves_by_ranks(step, ranks)
        return self.write_leaves_by_nodes(step)

    def write_leaves_by_paths(self, step: Leaves, paths: Paths) -> list[str]:
        """Return lines in which each row goes down the trees from the root to a leaf."""
        sizes = {"node": paths.nodes.shape[1], "together": paths.together}
        return self.call_for_all_trees(step, "go_down", sizes, [self.add_table(paths.nodes, step)])

    def write_leaves_by_ranks(self, step: Leaves, ranks: Ranks) -> list[str]:
        """Return lines in which each row, column by column, clears the bits of the leaves that it
        cannot reach. The lowest bit that is left in a tree gives its leaf."""
        forest = step.forest
        data = (ranks.thresholds, ranks.nodes, ranks.columns, ranks.masks, forest.trees)
        tables = [self.add_table(table, step) for table in data]
        word_a_tree = len(forest.words) == len(forest.trees)
        sizes = {"words": ranks.masks.shape[1], "step": ranks.step, "one_word": int(word_a_tree)}
        return self.call_for_all_trees(step, "leaves", sizes, tables)

    def write_leaves_by_nodes(self, step: Leaves) -> list[str]:
        """Return lines in which all rows of a block compare the same node at a time, tree by
        tree."""
        forest, features = step.forest, self.locate_features(step)
        tables = (forest.thresholds, forest.nodes, forest.words, forest.trees)
        row, tree = step.variables()
        leaf = f"{self.names[step]} + {self.offset(step.address((row, tree)))}"
        # A thread of a GPU computes one vector `r`, a CPU all vectors of the block.
        vector, vectors = (" + r", "1") if self.threads else ("", "RV")
        arguments = [
            f"{features.first}{vector}", str(features.apart),
            *(self.add_table(table, step) for table in tables),
            formula(tree, self.constants), f"{leaf}{vector}",
        ]  # fmt: skip
        call = f"leaf<{bool_text(forest.equal)}, {vectors}>({', '.join(arguments)});"
        loops = loops_of((row, tree))
        return self.loop_over_elements(loops, [call]) if self.threads else self.nest(loops, [call])

    def call_for_all_trees(
        self, step: Leaves, function: str, sizes: Mapping[str, int], tables: Sequence[str]
    ) -> list[str]:
        """Return lines that call `function` once for all trees and all rows of a block. `sizes` are
        the function's own, besides those that all such functions need."""
        features = self.locate_features(step)
        common = {
            "columns": step.source.shape[1], "apart": features.apart, "trees": step.shape[1],
            "trees_apart": step.strides[1],
        }  # fmt: skip
        row, _ = step.variables()
        first_leaf = f"{self.names[step]} + {self.offset(step.address((row, Index())))}"
        types = f"{bool_text(step.forest.equal)}, Sizes, {scalar(step.source.dtype)}"
        arguments = ", ".join(["own_rows", features.first, *tables, first_leaf])
        lines = [named_sizes("Sizes", {**common, **sizes}), f"{function}<{types}>({arguments});"]
        loops = loops_of((row,))
        return self.nest(loops, lines) if loops else in_scope(lines)

    def locate_features(self, step: Leaves) -> _Features:
        """Find where the columns that the trees compare lie in memory, for one row of
        `step.source`."""
        row, _ = step.source.variables()
        read = self.at(step.source, (row, Index()))  # of the first column
        assert isinstance(read, Read)
        offset = self.offset(read.tensor.address(read.index))
        return _Features(f"{self.names[read.tensor]} + {offset}", self.stride(step.source, dim=1))

    def add_table(self, data: torch.Tensor, step: Leaves) -> str:
        """Add a table of a forest to the constants. Returns the C++ text of its address."""
        kind = scalar(str(data.dtype).removeprefix("torch."))
        return f"({kind} const *)weights + {self.constants.add(data, step.line)}"

    def write_scan(self, step: Scan) -> list[str]:
        """Return the lines of a cumulative sum or product, in loops over the other dimensions."""
        index = step.variables()
        along = loops_of((index[step.dim],))
        others = loops_of(i for d, i in enumerate(index) if d != step.dim)
        names = Names(self)
        term = names.text(self.at(step.source, index))
        step_number = along[0].name if along else "0"
        next_sum = f"{_SCANS[step.kind]}(sum, {term})"
        if step.kind != "sum":  # a sum begins with 0: that of -0.0 is 0.0, as in eager torch
            next_sum = f"{step_number} == 0 ? {term} : {next_sum}"
        body = [*names.lines, f"sum = {next_sum};", f"{self.element(step, index)} = sum;"]
        declaration = f"{carrier(step.dtype)} sum{{}};"
        return self.loop_over_elements(others, [declaration, *self.nest(along, body)])

    def write_scatter(self, step: Scattered) -> list[str]:
        """Return a loop over the elements that a scatter puts into its tensor.

        It keeps their order, which matters if several are put in the same place. An element whose
        index lies outside of the tensor is left out by a mask.
        """
        index = step.source.variables()
        names = Names(self)
        value = names.text(self.at(step.source, index))
        place = "splat(0)"
        inside: list[str] = []
        for pick, size, stride in zip(step.picks, step.shape, step.strides, strict=True):
            if not isinstance(pick, Tensor):
                place += f" + {formula(pick(index) * stride, self.constants)}"
                continue
            picked = names.name(self.at(pick, index))
            place += f" + to_int32({picked}) * {stride}"
            inside.append(f"ge({picked}, splat((int64_t)0)) & lt({picked}, splat((int64_t){size}))")
        mask = " & ".join(inside) or "splat(-1)"
        adds = bool_text(step.how == "sum")
        call = f"put_row<{adds}>({self.names[step]} + r, {place}, {mask}, {value});"
        loops, body = loops_of(index), [*names.lines, call]
        if self.threads:  # each thread takes all elements of a row
            return self.loop_over_elements((), self.nest(loops, body))
        return self.nest(loops, self.loop_over_vectors(body))


class Names:
    """Makes the C++ text of values. A value that is used twice, or whose text is long, gets a name.

    `lines` declare the names given so far; they must stand before the texts. `in_registers` maps
    products and reductions whose result is in a register to the name of that variable.
    """

    def __init__(self, writer: Writer, in_registers: Mapping[Tensor, str] | None = None) -> None:
        self.writer, self.in_registers = writer, in_registers or {}
        self.lines: list[str] = []
        self._uses: Counter[Value] = Counter()
        self._names: dict[Value, str] = {}
        self._texts: dict[Value, str] = {}

    def text(self, value: Value) -> str:
        """Return the C++ text of a value, and add the names that it needs to `lines`. Uses are
        counted over all calls, so that a value in two of them gets a name in the second."""
        inner_values = list(walk(value))
        self._uses.update(part for inner in inner_values for part in parts(inner))
        self._texts = dict(self._names)
        for inner in inner_values:
            if inner not in self._texts:
                text = self._expression(inner)
                is_shared = self._uses[inner] > 1 and not isinstance(inner, Literal)
                is_named = (is_shared or len(text) > _LONGEST) and not text.isidentifier()
                self._texts[inner] = self._give_name(inner, text) if is_named else text
        return self._texts[value]

    def name(self, value: Value) -> str:
        """As `text`, but the text is always a name."""
        text = self.text(value)
        return text if text.isidentifier() else self._give_name(value, text)

    def _give_name(self, value: Value, text: str) -> str:
        """Declare a new name for a value in `lines`, and return it."""
        name = f"t{len(self._names)}"
        self.lines.append(f"const {carrier(value.dtype)} {name} = {text};")
        self._names[value] = name
        return name

    def _expression(self, value: Value) -> str:
        """The text of a value as an expression of the texts of its parts, which are known."""
        if isinstance(value, Literal):
            return literal_text(value)
        if isinstance(value, Call):
            return self._call(value)
        assert isinstance(value, Read)
        return self._read(value)

    def _call(self, value: Call) -> str:
        """The text of a call, from the texts of its arguments."""
        if value.function == "items":
            (collection,) = value.arguments
            assert isinstance(collection, Literal)
            return f"splat(items[{int(collection.number)}])"
        arguments = [self._texts[argument] for argument in value.arguments]
        of_bools = value.arguments[0].dtype == "bool"
        if of_bools and value.function.startswith("to_"):
            arguments = [f"({in_brackets(arguments[0])} & 1)"]  # true is -1
        return call_text(value.function, arguments, of_bools)

    def _read(self, value: Read) -> str:
        """The text that reads an element of a tensor, wherever it lies: in a register, in a column,
        among the weights or in the arena."""
        tensor, index = value.tensor, value.index
        if tensor in self.in_registers:
            return self.in_registers[tensor]
        if any(place.is_of_row for place in index):
            return self._read_at_picked(tensor, index)
        if isinstance(tensor, Argument):
            column = self.writer.column(tensor, index)
            if tensor.kind == "-":
                size = itemsize(tensor.dtype)
                return f"load_{tensor.dtype}(same<{size}>({column}).bytes, 0)"
            return f"load_{tensor.dtype}({column}, row + r * LANES)"
        if isinstance(tensor, Constant):
            constants = self.writer.constants
            place = tensor.address(index) + constants.add(widen(tensor.data), tensor.line)
            at = formula(place, constants)
            return f"splat((({scalar(tensor.dtype)} const *)weights)[{at}])"
        return self.writer.element(tensor, index)

    def _read_at_picked(self, tensor: Tensor, index: Indices) -> str:
        """The text that reads an element whose index differs between rows."""
        constants = self.writer.constants
        if isinstance(tensor, Argument):
            column, place = self.writer.column(tensor, index), self._index_vector(index[-1], "Q")
            items = f"items_at<{itemsize(tensor.dtype)}>({column}, {place}, items[{tensor.items}])"
            return f"load_{tensor.dtype}({items}.bytes, 0)"
        address = self._index_vector(tensor.address(index), "I")
        if isinstance(tensor, Constant):
            begin = constants.add(widen(tensor.data), tensor.line)
            return f"pick(({scalar(tensor.dtype)} const *)weights + {begin}, {address})"
        return f"pick_row({self.writer.names[tensor]}, {address}, r)"

    def _index_vector(self, index: Index, kind: str) -> str:
        """The text of an index that differs between rows, as a vector of int32 (`kind` "I") or
        int64 ("Q")."""
        ctype = _SCALARS[kind]
        same_for_rows: list[tuple[Atom, int]] = []
        summands = []
        for atom, factor in index.terms:
            if not isinstance(atom, OfRow):
                same_for_rows.append((atom, factor))
                continue
            value = self._texts[atom.value] if kind == "Q" else self._int32(atom.value)
            if factor != 1:
                value = f"{in_brackets(value)} * splat(({ctype}){factor})"
            summands.append(value)
        if same_for_rows or index.constant or not summands:
            rest = formula(Index(tuple(same_for_rows), index.constant), self.writer.constants)
            summands.append(f"splat(({ctype})({rest}))")
        return " + ".join(summands)

    def _int32(self, value: Value) -> str:
        """The text of an int64 value as int32. If it was made from an int32, that one is used."""
        if isinstance(value, Call) and value.function == "to_int64":
            (narrow,) = value.arguments
            if narrow.dtype == "int32":
                return self._texts[narrow]
        return f"to_int32({self._texts[value]})"


_SCALARS = {"F": "float", "D": "double", "I": "int32_t", "Q": "int64_t"}


def scalar(dtype: str) -> str:
    """The C++ type of one number in the vectors that hold values of a dtype."""
    return _SCALARS[carrier(dtype)]


def bool_text(value: bool) -> str:
    """A bool as C++ text."""
    return "true" if value else "false"


def literal_text(value: Literal) -> str:
    """The C++ text of a vector in which each row has the same number. For bools, true is -1."""
    kind, number = carrier(value.dtype), value.number
    if value.dtype == "bool":
        return f"splat({-int(number)})"
    if kind in "IQ":
        is_lowest = number == RANGES[value.dtype][0] and number < -1  # C++ has no literal for it
        text = f"{int(number) + 1} - 1" if is_lowest else str(int(number))
        return f"splat((int64_t)({text}))" if kind == "Q" else f"splat({text})"
    return f"splat({float_text(float(number), kind)})"


def float_text(number: float, kind: str) -> str:
    """The C++ text of a float (`kind` "F") or double ("D"). It is exact, by hexadecimal
    literals."""
    if kind == "F":
        number = float(torch.tensor(number, dtype=torch.float32))
    if math.isnan(number):
        return "kNaN" if kind == "F" else "(double)kNaN"
    if math.isinf(number):
        text = "-kInfinity" if number < 0 else "kInfinity"
        return text if kind == "F" else f"(double){text}"
    negative_zero = number == 0 and math.copysign(1, number) < 0
    whole = number == int(number) and abs(number) < 1e6 and not negative_zero
    text = str(number) if whole else number.hex()
    return f"{text}f" if kind == "F" else text


def formula(index: Index, constants: Constants) -> str:
    """The C++ text of an index that is the same for all rows."""
    summands = []
    for atom, factor in index.terms:
        text = _atom(atom, constants)
        summands.append(text if factor == 1 else f"{text} * {factor}")
    if index.constant or not summands:
        summands.append(str(index.constant))
    return " + ".join(summands).replace("+ -", "- ")


def _atom(atom: Atom, constants: Constants) -> str:
    """The C++ text of an atom that is the same for all rows."""
    if isinstance(atom, Variable):
        return atom.name
    if isinstance(atom, Entry):
        return f"{constants.add_table(atom.table)}[{formula(atom.at, constants)}]"
    assert isinstance(atom, Quotient | Remainder)
    sign = "/" if isinstance(atom, Quotient) else "%"
    return f"(({formula(atom.of, constants)}) {sign} {atom.by})"


def first_vector(place: str) -> str:
    """The C++ text of the index of an element's first vector, for element number `place` of an
    array in which each element has RV vectors."""
    if place == "0":
        return "0"
    return f"({place}) * RV" if not place.isalnum() else f"{place} * RV"


def named_sizes(name: str, sizes: Mapping[str, object]) -> str:
    """The C++ text of a type whose constants are these sizes, which is the argument of a
    template."""
    values = ", ".join(f"{constant} = {size}" for constant, size in sizes.items())
    return f"struct {name} {{ enum : int {{ {values} }}; }};"


def _number_of_step(loops: Sequence[Variable]) -> Index:
    """The number of a step among all steps of nested loops, as an index of the loop variables."""
    total, size = Index(), 1
    for loop in reversed(loops):
        total = total + Index(((loop, size),))
        size *= loop.extent
    return total


def divide_among_threads(loops: Sequence[Variable], times: str, body: Sequence[str]) -> list[str]:
    """Return lines in which the threads of a GPU's block divide the runs of `body`, and then wait
    for each other.

    `body` runs `times` times (the C++ text of a number) in each step of the loops. It may use the
    loop variables and `at`, the number of the run: `at % times` counts the runs in one step.
    """
    steps, inner_steps = [], 1
    for loop in reversed(loops):
        steps.append(f"const int {loop.name} = at / ({times} * {inner_steps}) % {loop.extent};")
        inner_steps *= loop.extent
    head = f"EACH_OF_BLOCK(at, {inner_steps} * {times}) {{"
    return [head, *indent([*steps, *body]), "}", "BLOCK_WAITS;"]


def in_scope(body: Sequence[str]) -> list[str]:
    """Return the lines in a scope of their own. A single line needs none."""
    return ["{", *indent(body), "}"] if len(body) > 1 else list(body)


def indent(lines: Iterable[str]) -> list[str]:
    """Return the lines, indented by two spaces."""
    return [f"  {line}" for line in lines]


def _number_of_calls(value: Value) -> int:
    """The number of calls in an expression; equal ones count once."""
    return sum(1 for inner in walk(value) if isinstance(inner, Call))
