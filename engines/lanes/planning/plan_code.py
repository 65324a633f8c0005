"""The C++ code of a plan: a function that computes one row block, and the constants that it reads.

Loop variables have the names of the plan: i0, i1 … run over a result, k0, k1 … over a sum. `r` runs
over the vectors of a row block.
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
_SCANS = {"sum": "added", "prod": "multiplied"}
_REDUCTIONS = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "Any",
               "argmax": "ArgMax", "argmin": "ArgMin"}  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A tensor among the constants: `at` which byte its `count` numbers begin, its own shape, and
    the first line of the model that uses it."""

    at: int
    dtype: str
    count: int
    shape: tuple[int, ...]
    line: str


@dataclass
class Constants:
    """Constants shared by all rows: weights, one after the other, and tables of indices.

    `data`: the bytes of the weights. `places`: where those of a tensor begin, so that equal tensors
    are stored once. `tables`: the names of tables, by their entries.
    """

    data: bytearray = field(default_factory=bytearray)
    places: dict[bytes, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)

    def add(self, values: torch.Tensor, line: str, shape: tuple[int, ...] | None = None) -> int:
        """Add a tensor; returns the position of its first element, in units of its item size.
        `line`: the line of the model; `shape`: that of the weights, if `values` are packed."""
        raw = values.contiguous().numpy().tobytes()
        if raw not in self.places:
            self.data += bytes(-len(self.data) % 64)
            self.places[raw] = len(self.data)
            self.data += raw
            dtype = str(values.dtype).removeprefix("torch.")
            own = tuple(values.shape) if shape is None else shape
            self.segments.append(Segment(self.places[raw], dtype, values.numel(), own, line))
        return self.places[raw] // values.itemsize

    def table(self, entries: tuple[int, ...]) -> str:
        """The name of a table, which is added if it is new."""
        return self.tables.setdefault(entries, f"table{len(self.tables)}")


def widened(data: torch.Tensor) -> torch.Tensor:
    """Constants as the code reads them: with 4 or 8 bytes; true is -1."""
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype == "bool":
        return -data.to(torch.int32)
    to = {"F": torch.float32, "D": torch.float64, "I": torch.int32, "Q": torch.int64}
    return data.to(to[carrier(dtype)])


class _Features(NamedTuple):
    """Where the columns lie that trees compare: the address of the first, and the distance of two
    that follow each other, in vectors."""

    first: str
    apart: int | None


class Writer:
    """Writes the steps of a plan for a number of registers.

    `vectors`, `few`: see `Width`. `store`: where a kernel keeps the stored tensors of a row; None
    for a CPU, where they lie in an arena. In `registers` each is an array of its own, which a
    compiler may keep there. `threads`: if not 0, so many threads of a GPU divide the elements of a
    step, and wait for each other after it; `vectors` is then the number of their rows. `timed`:
    the ticks of each step are counted. `on_cpu`: the code for one row of a C++ header runs on a CPU
    although it has a `store`.
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
        """The body of the function `block`."""
        lines = [self.declaration(tensor) for tensor in self.names]
        if self.timed:
            lines.append("int64_t begun = ticks();")
        line_of_model = ""
        for number, step in enumerate(self.plan.steps):
            source = step.source if isinstance(step, Kernel) else step
            if source.line and source.line != line_of_model:
                line_of_model = source.line
                lines.append(f"// {line_of_model}")
            with named_in_errors(source):
                lines += self.step(step)
            if self.timed:
                lines.append(f"TOOK({number});")
        return "\n".join(indented(lines)) + "\n"

    def declaration(self, tensor: Tensor) -> str:
        """The line that declares the memory of a stored tensor, with its shape as a comment."""
        kind, name = carrier(tensor.dtype), self.names[tensor]
        shape = " x ".join(map(str, tensor.shape)) or "1"
        if self.own_arrays:
            return f"{kind} {name}[{tensor.count}];  // {shape}"
        place = self.plan.places[tensor]
        return f"{kind} *const {name} = ({kind} *)(arena + {place} * 4 * kRows);  // {shape}"

    def step(self, step: Step) -> list[str]:
        """The lines of a step, after which its results are in memory."""
        if isinstance(step, Sorted):
            return self.sort(step)
        if isinstance(step, Leaves):
            return self.leaves(step)
        if isinstance(step, Scan):
            return self.scan(step)
        if isinstance(step, Scattered):
            return self.scatter(step)
        if isinstance(step.inner, Product):
            loops = Loops.of(step, self.plan.elements)
            return self.sum_of_products(step) if loops is None else self.product(step, loops)
        if isinstance(step.inner, Reduction):
            return self.reduction(step)
        return self.over_elements(step.loops, self.assign(step, Names(self)))

    def over_elements(self, loops: Sequence[Variable], body: Sequence[str]) -> list[str]:
        """Loops around `body`, whose iterations are independent of each other, and over the vectors
        of a row block. With `threads`, these divide the iterations."""
        if not self.threads:
            return self.nest(loops, self.over_vectors(body))
        return divided(
            loops, "RV", ["const int r = at % RV;", "if (r >= own_rows) continue;", *body]
        )

    # --- values ---

    def assign(self, kernel: Kernel, names: Names) -> list[str]:
        """The lines that write an element."""
        value = names.text(kernel.value(self.plan.elements))
        return [*names.lines, self.write(kernel.into, kernel.place, value)]

    def write(self, into: Tensor, place: Indices, value: str) -> str:
        """The statement that writes a value into an element."""
        if isinstance(into, Argument):
            column = self.column(into, place)
            return f"store_{into.dtype}({column}, row + r * LANES, {value});"
        return f"{self.element(into, place)} = {value};"

    def column(self, argument: Argument, index: Indices) -> str:
        """The C++ text for the column in which an element of an argument lies."""
        column = index[0] if argument.kind == "m" else Index()
        return f"columns[{formula(column + argument.first, self.constants)}]"

    def element(self, tensor: Tensor, index: Indices) -> str:
        """The C++ text for the vector `r` of an element of a stored tensor."""
        place = formula(tensor.address(index), self.constants)
        return f"{self.names[tensor]}[{scaled(place)} + r]"

    # --- loops ---

    def nest(self, loops: Iterable[Variable], body: Sequence[str]) -> list[str]:
        """The lines inside loops, the first loop outermost."""
        heads = [self.loop(loop.name, loop.extent) for loop in loops]
        if not heads:
            return list(body)
        if len(body) == 1:
            return [*heads[:-1], f"{heads[-1]} {body[0]}"]
        return [*heads[:-1], f"{heads[-1]} {{", *indented(body), "}"]

    def over_vectors(self, body: Sequence[str]) -> list[str]:
        """A loop over the vectors of a row block."""
        return [f"{self.loop('r', 'RV')} {{", *indented(body), "}"]

    def loop(self, name: str, end: int | str) -> str:
        """The head of a loop. A kernel's loops are marked, so that a compiler can unroll them."""
        mark = "LOOP " if self.marks_loops else ""
        return f"{mark}for (int {name} = 0; {name} < {end}; ++{name})"

    # --- reductions and products ---

    def reduction(self, kernel: Kernel) -> list[str]:
        """A reduction, and what is computed from its result. `all` is that not any is false."""
        inner = kernel.inner
        assert isinstance(inner, Reduction)
        loops = loops_of(inner.steps())
        partial_sums = min(loops[-1].extent, 8) if loops else 1  # independent of each other
        result = "~sum.found()" if inner.kind == "all" else "sum.found()"
        body = [
            f"{_REDUCTIONS[inner.kind]}<{carrier(inner.source.dtype)}, {partial_sums}> sum;",
            *self.terms(inner, kernel.inner_at, loops),
            f"const {carrier(inner.dtype)} result = {result};",
            *self.assign(kernel, Names(self, {inner: "result"})),
        ]
        return self.over_elements(kernel.loops, body)

    def terms(self, inner: Reduction, index: Indices, loops: Sequence[Variable]) -> list[str]:
        """The lines in which a reduction takes its terms. `loops`: those of its steps."""
        names, value = Names(self), inner.term(index, self.at)
        term = names.text(value)
        if inner.kind == "all":
            term = f"~{in_brackets(term)}"
        if not loops:
            return scoped([*names.lines, f"sum.take({term}, 0);"])
        if inner.kind.startswith("arg"):
            number = formula(_number_of_step(loops), self.constants)
            return self.nest(loops, [*names.lines, f"sum.take({term}, {number});"])
        *outer, last = loops
        is_long = truth(_operations(value) > _FEW)
        head = f"in_parts<{is_long}, {last.extent}>([&](int {last.name}, int part) ALWAYS_INLINE {{"
        body = indented([*names.lines, f"sum.take({term}, part);"])
        return self.nest(outer, [head, *body, "});"])

    def sum_of_products(self, kernel: Kernel) -> list[str]:
        """A product whose addresses are not linear."""
        inner = kernel.inner
        assert isinstance(inner, Product)
        names = Names(self)
        left, right = (names.text(value) for value in inner.operands(kernel.inner_at, self.at))
        term = [*names.lines, f"sum = fma({right}, {left}, sum);"]
        summed = scoped(self.nest(loops_of(inner.steps()), term))
        body = [f"{carrier(inner.dtype)} sum{{}};", *summed]
        after = Names(self, {inner: "sum"})
        return self.over_elements(kernel.loops, [*body, *self.assign(kernel, after)])

    def product(self, kernel: Kernel, loops: Loops) -> list[str]:
        """A product whose sums are in registers: a call of a function of kernels.h, which gets the
        lines that use a sum as its last argument."""
        own_tile = choose_tile(loops, self.threads, self.vectors) if self.threads else None
        blocked = Blocked.of(loops, self.registers, self.vectors, self.few, own_tile)
        inner = kernel.inner
        assert isinstance(inner, Product)
        kind = carrier(inner.dtype)
        if blocked.weights is not None:
            function, right = "weighted", self.weights_of(blocked.weights, loops.right.tensor, kind)
        else:
            assert blocked.right is not None
            function, right = "paired", self.operand(blocked.right)
        first = ""
        if self.threads:
            function, first = f"{function}_tile", "at % kTiles, own_rows, "
        elif blocked.few:
            function, first = f"{function}_few", "own_rows, "
        call = f"{function}<Sums>({first}{blocked.steps}, {self.operand(blocked.left)}, {right}"
        after_sum = f"[&](int {blocked.m.name}, int {blocked.j.name}, int r, {kind} sum)"
        body = self.assign(kernel, Names(self, {inner: "sum"}))
        lines = [
            named_sizes("Sums", self.sizes_of_sums(kernel, blocked)),
            f"{call}, {after_sum} ALWAYS_INLINE {{",
            *indented(body),
            "});",
        ]
        if self.threads:
            count = f"constexpr int kTiles = {number_of_tiles(loops, blocked.most, self.vectors)};"
            return scoped([count, *divided(blocked.outer, "kTiles", lines)])
        return self.nest(blocked.outer, lines) if blocked.outer else scoped(lines)

    def sizes_of_sums(self, kernel: Kernel, blocked: Blocked) -> dict[str, int]:
        """The sizes of a product's sums by the names that `weighted` in kernels.h explains."""
        sizes = {
            "loop": int(_operations(kernel.value(self.plan.elements)) > _MANY),
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

    def weights_of(self, weights: Weights, tensor: Tensor, kind: str) -> str:
        """The address of a product's weights, in the order in which the loops read them."""
        place = self.constants.add(weights.data, tensor.line, tensor.shape)
        address = formula(weights.rest + place, self.constants)
        return f"({_SCALARS[kind]} const *)weights + {address}"

    def operand(self, operand: Operand) -> str:
        """The address of an operand's first element."""
        return f"{self.names[operand.tensor]} + {self.offset(operand.rest)}"

    def offset(self, index: Index) -> str:
        """The C++ text of the distance from a tensor's memory to an element, in vectors."""
        return scaled(formula(index, self.constants))

    # --- other steps ---

    def sort(self, step: Sorted) -> list[str]:
        """A call that sorts along one dimension, in loops over the others."""
        dim, source, places = step.dim, step.source, step.places
        first = tuple(Index() if d == dim else i for d, i in enumerate(step.variables()))
        read = self.at(source, first)
        assert isinstance(read, Read)
        sizes = f"{source.shape[dim]}, {step.shape[dim]}, {truth(step.descending)}"
        arguments = (
            f"&{self.element(read.tensor, read.index)}, {self.stride(source, dim)}",
            f"&{self.element(step, first)}, {step.strides[dim]}",
            f"&{self.element(places, first)}, {places.strides[dim]}",
        )
        return self.over_elements(loops_of(first), [f"sorted<{sizes}>({', '.join(arguments)});"])

    def stride(self, source: Tensor, dim: int) -> int | None:
        """The distance in memory of elements that follow each other along a dimension, in elements;
        0 if there is only one. `source` is in memory: see `plan.in_memory`."""
        index = source.variables()
        read = self.at(source, index)
        assert isinstance(read, Read)
        loops = loops_of((index[dim],))
        return read.tensor.address(read.index).factor(loops[0]) if loops else 0

    def leaves(self, step: Leaves) -> list[str]:
        """The leaves of trees, in one of three ways."""
        paths, ranks = step.forest.paths, step.forest.ranks
        if paths is not None and self.on_cpu and (paths.deep or self.few):
            return self.leaves_by_paths(step, paths)
        if ranks is not None and self.few:
            return self.leaves_by_ranks(step, ranks)
        return self.leaves_by_nodes(step)

    def leaves_by_paths(self, step: Leaves, paths: Paths) -> list[str]:
        """Each row goes down the trees."""
        sizes = {"node": paths.nodes.shape[1], "together": paths.together}
        return self.of_all_trees(step, "go_down", sizes, [self.table(paths.nodes, step)])

    def leaves_by_ranks(self, step: Leaves, ranks: Ranks) -> list[str]:
        """Each row clears bits in words of its own, column by column."""
        forest = step.forest
        data = (ranks.thresholds, ranks.nodes, ranks.columns, ranks.masks, forest.trees)
        tables = [self.table(each, step) for each in data]
        word_a_tree = len(forest.words) == len(forest.trees)
        sizes = {"words": ranks.masks.shape[1], "step": ranks.step, "one_word": int(word_a_tree)}
        return self.of_all_trees(step, "leaves", sizes, tables)

    def leaves_by_nodes(self, step: Leaves) -> list[str]:
        """All rows of a block compare the same node at a time, tree by tree."""
        forest, features = step.forest, self.features(step)
        tables = (forest.thresholds, forest.nodes, forest.words, forest.trees)
        row, tree = step.variables()
        leaf = f"{self.names[step]} + {self.offset(step.address((row, tree)))}"
        # A thread of a GPU computes one vector `r`, a CPU all vectors of the block.
        vector, vectors = (" + r", "1") if self.threads else ("", "RV")
        arguments = [
            f"{features.first}{vector}", str(features.apart),
            *(self.table(table, step) for table in tables),
            formula(tree, self.constants), f"{leaf}{vector}",
        ]  # fmt: skip
        call = f"leaf<{truth(forest.equal)}, {vectors}>({', '.join(arguments)});"
        loops = loops_of((row, tree))
        return self.over_elements(loops, [call]) if self.threads else self.nest(loops, [call])

    def of_all_trees(
        self, step: Leaves, function: str, sizes: Mapping[str, int], tables: Sequence[str]
    ) -> list[str]:
        """A call for all trees and the rows of a block."""
        features = self.features(step)
        common = {
            "columns": step.source.shape[1], "apart": features.apart, "trees": step.shape[1],
            "trees_apart": step.strides[1],
        }  # fmt: skip
        row, _ = step.variables()
        first_leaf = f"{self.names[step]} + {self.offset(step.address((row, Index())))}"
        types = f"{truth(step.forest.equal)}, Sizes, {scalar(step.source.dtype)}"
        arguments = ", ".join(["own_rows", features.first, *tables, first_leaf])
        lines = [named_sizes("Sizes", {**common, **sizes}), f"{function}<{types}>({arguments});"]
        loops = loops_of((row,))
        return self.nest(loops, lines) if loops else scoped(lines)

    def features(self, step: Leaves) -> _Features:
        """Where the columns of `step.source` lie, for one of its rows."""
        row, _ = step.source.variables()
        first = self.at(step.source, (row, Index()))
        assert isinstance(first, Read)
        place = self.offset(first.tensor.address(first.index))
        return _Features(f"{self.names[first.tensor]} + {place}", self.stride(step.source, 1))

    def table(self, data: torch.Tensor, step: Leaves) -> str:
        """The address of a forest's table among the weights."""
        kind = scalar(str(data.dtype).removeprefix("torch."))
        return f"({kind} const *)weights + {self.constants.add(data, step.line)}"

    def scan(self, step: Scan) -> list[str]:
        """Sums or products so far, in loops over the other dimensions."""
        index = step.variables()
        along = loops_of((index[step.dim],))
        others = loops_of(i for d, i in enumerate(index) if d != step.dim)
        names = Names(self)
        term = names.text(self.at(step.source, index))
        number = along[0].name if along else "0"
        next_sum = f"{_SCANS[step.kind]}(sum, {term})"
        if step.kind != "sum":  # a sum begins with 0: that of -0.0 is 0.0, as in eager torch
            next_sum = f"{number} == 0 ? {term} : {next_sum}"
        body = [*names.lines, f"sum = {next_sum};", f"{self.element(step, index)} = sum;"]
        begin = f"{carrier(step.dtype)} sum{{}};"
        return self.over_elements(others, [begin, *self.nest(along, body)])

    def scatter(self, step: Scattered) -> list[str]:
        """A loop over the elements that are put. It keeps their order, which counts if several are
        put in one place. An index outside of the tensor masks its element out."""
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
        adds = truth(step.how == "sum")
        put = f"put_row<{adds}>({self.names[step]} + r, {place}, {mask}, {value});"
        loops, body = loops_of(index), [*names.lines, put]
        if self.threads:  # each thread takes all elements of a row
            return self.over_elements((), self.nest(loops, body))
        return self.nest(loops, self.over_vectors(body))


class Names:
    """The C++ text of values. A value that is used twice, or whose text is long, gets a name.

    `lines` declare the names. `in_registers`: the names of products and reductions there.
    """

    def __init__(self, writer: Writer, in_registers: Mapping[Tensor, str] | None = None) -> None:
        self.writer, self.in_registers = writer, in_registers or {}
        self.lines: list[str] = []
        self._uses: Counter[Value] = Counter()
        self._names: dict[Value, str] = {}
        self._texts: dict[Value, str] = {}

    def text(self, value: Value) -> str:
        """The text of a value, which stands behind `lines`. Uses are counted over all calls, so
        that a value in two of them gets a name in the second."""
        inner_values = list(walk(value))
        self._uses.update(part for inner in inner_values for part in parts(inner))
        self._texts = dict(self._names)
        for inner in inner_values:
            if inner not in self._texts:
                text = self._unnamed(inner)
                shared = self._uses[inner] > 1 and not isinstance(inner, Literal)
                is_named = (shared or len(text) > _LONGEST) and not text.isidentifier()
                self._texts[inner] = self._named(inner, text) if is_named else text
        return self._texts[value]

    def name(self, value: Value) -> str:
        """As `text`, but always a name."""
        text = self.text(value)
        return text if text.isidentifier() else self._named(value, text)

    def _named(self, value: Value, text: str) -> str:
        """A new name for a value."""
        name = f"t{len(self._names)}"
        self.lines.append(f"const {carrier(value.dtype)} {name} = {text};")
        self._names[value] = name
        return name

    def _unnamed(self, value: Value) -> str:
        """The text of a value whose parts have texts."""
        if isinstance(value, Literal):
            return literal(value)
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
            arguments = [f"({arguments[0]} & 1)"]  # true is -1
        return call_text(value.function, arguments, of_bools)

    def _read(self, value: Read) -> str:
        """The text of an element: in a register, a column, among the weights or in the arena."""
        tensor, index = value.tensor, value.index
        if tensor in self.in_registers:
            return self.in_registers[tensor]
        if any(place.of_row for place in index):
            return self._picked(tensor, index)
        if isinstance(tensor, Argument):
            column = self.writer.column(tensor, index)
            if tensor.kind == "-":
                size = itemsize(tensor.dtype)
                return f"load_{tensor.dtype}(same<{size}>({column}).bytes, 0)"
            return f"load_{tensor.dtype}({column}, row + r * LANES)"
        if isinstance(tensor, Constant):
            constants = self.writer.constants
            place = tensor.address(index) + constants.add(widened(tensor.data), tensor.line)
            at = formula(place, constants)
            return f"splat((({scalar(tensor.dtype)} const *)weights)[{at}])"
        return self.writer.element(tensor, index)

    def _picked(self, tensor: Tensor, index: Indices) -> str:
        """The text of an element whose index differs between rows."""
        constants = self.writer.constants
        if isinstance(tensor, Argument):
            column, place = self.writer.column(tensor, index), self._place(index[-1], "Q")
            items = f"items_at<{itemsize(tensor.dtype)}>({column}, {place}, items[{tensor.items}])"
            return f"load_{tensor.dtype}({items}.bytes, 0)"
        address = self._place(tensor.address(index), "I")
        if isinstance(tensor, Constant):
            first = constants.add(widened(tensor.data), tensor.line)
            return f"pick(({scalar(tensor.dtype)} const *)weights + {first}, {address})"
        return f"pick_row({self.writer.names[tensor]}, {address}, r)"

    def _place(self, index: Index, kind: str) -> str:
        """The text of an index that differs between rows, as a vector of `kind` I or Q."""
        number = _SCALARS[kind]
        same_for_rows: list[tuple[Atom, int]] = []
        summands = []
        for atom, factor in index.terms:
            if not isinstance(atom, OfRow):
                same_for_rows.append((atom, factor))
                continue
            value = self._texts[atom.value] if kind == "Q" else self._int32(atom.value)
            if factor != 1:
                value = f"{in_brackets(value)} * splat(({number}){factor})"
            summands.append(value)
        if same_for_rows or index.constant or not summands:
            rest = formula(Index(tuple(same_for_rows), index.constant), self.writer.constants)
            summands.append(f"splat(({number})({rest}))")
        return " + ".join(summands)

    def _int32(self, value: Value) -> str:
        """The text of an int64 as int32. One that was made of an int32 is not converted twice."""
        if isinstance(value, Call) and value.function == "to_int64":
            (narrow,) = value.arguments
            if narrow.dtype == "int32":
                return self._texts[narrow]
        return f"to_int32({self._texts[value]})"


_SCALARS = {"F": "float", "D": "double", "I": "int32_t", "Q": "int64_t"}


def scalar(dtype: str) -> str:
    """The C++ type of one number in a vector of a dtype."""
    return _SCALARS[carrier(dtype)]


def truth(value: bool) -> str:
    """A bool as C++ text."""
    return "true" if value else "false"


def literal(value: Literal) -> str:
    """The C++ text of a vector of the same number; of bools, true is -1."""
    kind, number = carrier(value.dtype), value.number
    if value.dtype == "bool":
        return f"splat({-int(number)})"
    if kind in "IQ":
        least = number == RANGES[value.dtype][0] and number < -1  # C++ has no literal for it
        text = f"{int(number) + 1} - 1" if least else str(int(number))
        return f"splat((int64_t)({text}))" if kind == "Q" else f"splat({text})"
    return f"splat({floating(float(number), kind)})"


def floating(number: float, kind: str) -> str:
    """A number of `kind` F or D as C++ text without loss: hexadecimal literals are exact."""
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
    """The C++ text of an atom, which is no `OfRow`."""
    if isinstance(atom, Variable):
        return atom.name
    if isinstance(atom, Entry):
        return f"{constants.table(atom.table)}[{formula(atom.at, constants)}]"
    assert isinstance(atom, Quotient | Remainder)
    sign = "/" if isinstance(atom, Quotient) else "%"
    return f"(({formula(atom.of, constants)}) {sign} {atom.by})"


def scaled(place: str) -> str:
    """The index of the first of an element's RV vectors, in an array of vectors."""
    if place == "0":
        return "0"
    return f"({place}) * RV" if not place.isalnum() else f"{place} * RV"


def named_sizes(name: str, sizes: Mapping[str, object]) -> str:
    """The C++ text of a type with named constants, for the parameter of a template."""
    values = ", ".join(f"{constant} = {size}" for constant, size in sizes.items())
    return f"struct {name} {{ enum : int {{ {values} }}; }};"


def _number_of_step(loops: Sequence[Variable]) -> Index:
    """The number of a step among all steps of some loops."""
    total, size = Index(), 1
    for loop in reversed(loops):
        total = total + Index(((loop, size),))
        size *= loop.extent
    return total


def divided(loops: Sequence[Variable], times: str, body: Sequence[str]) -> list[str]:
    """Lines that the threads of a GPU's block run together, and then wait for each other: `times`,
    a C++ number, for each step of some loops. `at` counts all; its remainder is the time."""
    steps, inner_steps = [], 1
    for loop in reversed(loops):
        steps.append(f"const int {loop.name} = at / ({times} * {inner_steps}) % {loop.extent};")
        inner_steps *= loop.extent
    head = f"EACH_OF_BLOCK(at, {inner_steps} * {times}) {{"
    return [head, *indented([*steps, *body]), "}", "BLOCK_WAITS;"]


def scoped(body: Sequence[str]) -> list[str]:
    """The lines in a scope; a single line needs none."""
    return ["{", *indented(body), "}"] if len(body) > 1 else list(body)


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _operations(value: Value) -> int:
    """The number of calls in an expression; equal ones count once."""
    return sum(1 for inner in walk(value) if isinstance(inner, Call))
