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

from engines.lanes.functions import RANGES, call, carrier, enclosed
from engines.lanes.index import (
    Entry,
    Index,
    Indices,
    OfRow,
    Quotient,
    Remainder,
    Variable,
    loops_of,
)
from engines.lanes.planning.blocking import Blocked, Loops, Weights
from engines.lanes.planning.plan import Kernel, Plan, Step, Store
from engines.lanes.planning.together import tile, tiles
from engines.lanes.tensors import (
    Argument,
    Constant,
    Leaves,
    Product,
    Reduction,
    Scan,
    Scattered,
    Sorted,
    named,
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
    """Constants shared by all rows: weights, one after the other, and tables of indices."""

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
        return self.tables.setdefault(entries, f"table{len(self.tables)}")


def held(data: torch.Tensor) -> torch.Tensor:
    """Constants as the code reads them: with 4 or 8 bytes; true is -1."""
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype == "bool":
        return -data.to(torch.int32)
    to = {"F": torch.float32, "D": torch.float64, "I": torch.int32, "Q": torch.int64}
    return data.to(to[carrier(dtype)])


class _Features(NamedTuple):
    """Where the columns lie that trees compare: the address of the `first`, and how many vectors
    two are `apart`."""

    first: str
    apart: int | None


class Writer:
    """Writes the steps of a plan for a number of registers.

    `store`: where a kernel keeps the stored tensors of a row; None for a CPU, where they lie in an
    arena. In `registers` each is an array of its own, which a compiler may keep there. With
    `threads`, so many of a GPU divide the elements of a step, and wait for each other after it;
    `vectors` is then the number of their rows. `few`: see `Width`.
    `timed`: the ticks of each step are counted. `on_cpu`: so is the row of a C++ header, which has
    a `store`, too.
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
        lines = []
        for tensor, name in self.names.items():
            kind, place = carrier(tensor.dtype), self.plan.places[tensor]
            shape = " x ".join(map(str, tensor.shape)) or "1"
            own = f"{kind} {name}[{tensor.count}];"
            part = f"{kind} *const {name} = ({kind} *)(arena + {place} * 4 * kRows);"
            lines.append(f"{own if self.own_arrays else part}  // {shape}")
        lines += ["int64_t begun = ticks();"] if self.timed else []
        line = ""
        for number, step in enumerate(self.plan.steps):
            source = step.source if isinstance(step, Kernel) else step
            if source.line and source.line != line:
                line = source.line
                lines.append(f"// {line}")
            with named(source):
                lines += self.step(step)
            lines += [f"TOOK({number});"] if self.timed else []
        return "\n".join(f"  {line}" for line in lines) + "\n"

    def step(self, step: Step) -> list[str]:
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
        body = self.assign(step, Names(self))
        return self.each(step.loops, body)

    def each(self, loops: Sequence[Variable], body: Sequence[str]) -> list[str]:
        """Loops around `body`, whose iterations are independent of each other."""
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
        if isinstance(into, Argument):
            column = self.column(into, place)
            return f"store_{into.dtype}({column}, row + r * LANES, {value});"
        return f"{self.element(into, place)} = {value};"

    def column(self, argument: Argument, index: Indices) -> str:
        """The C++ text for the column in which an element of an argument lies."""
        feature = index[0] if argument.kind == "m" else Index()
        return f"columns[{formula(feature + argument.first, self.constants)}]"

    def element(self, tensor: Tensor, index: Indices) -> str:
        place = formula(tensor.address(index), self.constants)
        return f"{self.names[tensor]}[{scaled(place)} + r]"

    # --- loops ---

    def nest(self, loops: Iterable[Variable], body: Sequence[str]) -> list[str]:
        """The lines inside loops, the first loop outermost."""
        heads = [self.loop(v.name, v.extent) for v in loops]
        if not heads:
            return list(body)
        if len(body) == 1:
            return [*heads[:-1], f"{heads[-1]} {body[0]}"]
        return [*heads[:-1], f"{heads[-1]} {{", *indented(body), "}"]

    def over_vectors(self, body: Sequence[str]) -> list[str]:
        return [f"{self.loop('r', 'RV')} {{", *indented(body), "}"]

    def loop(self, name: str, end: int | str) -> str:
        """The head of a loop. A kernel's loops are marked, so that a compiler can unroll them."""
        return f"{'LOOP ' * self.marks_loops}for (int {name} = 0; {name} < {end}; ++{name})"

    def reduction(self, kernel: Kernel) -> list[str]:
        inner = kernel.inner
        assert isinstance(inner, Reduction)
        names = Names(self)
        value = inner.term(kernel.inner_at, self.at)
        term = names.text(value)
        term = f"~{enclosed(term)}" if inner.kind == "all" else term
        loops = loops_of(inner.steps())
        found = "~sum.found()" if inner.kind == "all" else "sum.found()"
        last = loops[-1].extent if loops else 1
        kind = _REDUCTIONS[inner.kind]
        body = [f"{kind}<{carrier(inner.source.dtype)}, {min(last, 8)}> sum;"]
        if not loops:
            body += scoped([*names.lines, f"sum.take({term}, 0);"])
        elif inner.kind.startswith("arg"):
            count = formula(_counted(loops), self.constants)
            body += self.nest(loops, [*names.lines, f"sum.take({term}, {count});"])
        else:
            long = "true" if _operations(value) > _FEW else "false"
            head = f"in_parts<{long}, {last}>([&](int {loops[-1].name}, int part) ALWAYS_INLINE {{"
            taken = indented([*names.lines, f"sum.take({term}, part);"])
            body += self.nest(loops[:-1], [head, *taken, "});"])
        after = Names(self, {inner: "result"})
        body.append(f"const {carrier(inner.dtype)} result = {found};")
        return self.each(kernel.loops, [*body, *self.assign(kernel, after)])

    def sum_of_products(self, kernel: Kernel) -> list[str]:
        """A product whose addresses are not linear."""
        inner = kernel.inner
        assert isinstance(inner, Product)
        names = Names(self)
        left, right = (names.text(value) for value in inner.operands(kernel.inner_at, self.at))
        taken = [*names.lines, f"sum = fma({right}, {left}, sum);"]
        summed = scoped(self.nest(loops_of(inner.steps()), taken))
        body = [f"{carrier(inner.dtype)} sum{{}};", *summed]
        after = Names(self, {inner: "sum"})
        return self.each(kernel.loops, [*body, *self.assign(kernel, after)])

    def product(self, kernel: Kernel, loops: Loops) -> list[str]:
        """A product whose sums are in registers."""
        own = tile(loops, self.threads, self.vectors) if self.threads else None
        blocked = Blocked.of(loops, self.registers, self.vectors, self.few, own)
        inner = kernel.inner
        assert isinstance(inner, Product)
        kind = carrier(inner.dtype)
        left = f"{self.names[blocked.left.tensor]} + {self.offset(blocked.left.rest)}"
        constants = {
            "loop": int(_operations(kernel.value(self.plan.elements)) > _MANY),
            "m": blocked.m.extent, "most_m": blocked.most.m,
            "j": blocked.j.extent, "most_j": blocked.most.j,
            "left": blocked.left.by_m,
        }  # fmt: skip
        if blocked.weights is not None:
            call, right = "weighted", self.weights_of(blocked.weights, loops.right.tensor, kind)
        else:
            assert blocked.right is not None
            constants["right"] = blocked.right.by_j
            call = "paired"
            right = f"{self.names[blocked.right.tensor]} + {self.offset(blocked.right.rest)}"
        after = Names(self, {inner: "sum"})
        body = self.assign(kernel, after)
        m, j = blocked.m.name, blocked.j.name
        after_sum = f"[&](int {m}, int {j}, int r, {kind} sum) ALWAYS_INLINE"
        first = ""
        if self.threads:
            call, first = f"{call}_tile", "at % kTiles, own_rows, "
            constants["most_r"] = blocked.most.r
        elif blocked.few:
            call, first = f"{call}_few", "own_rows, "
            constants["registers"] = self.registers
        head = f"{call}<Sums>({first}{blocked.steps}, {left}, {right}, {after_sum} {{"
        lines = [named_sizes("Sums", constants), head, *indented(body), "});"]
        if self.threads:
            count = f"constexpr int kTiles = {tiles(loops, blocked.most, self.vectors)};"
            return scoped([count, *divided(blocked.outer, "kTiles", lines)])
        return self.nest(blocked.outer, lines) if blocked.outer else scoped(lines)

    def weights_of(self, weights: Weights, tensor: Tensor, kind: str) -> str:
        """The address of a product's weights, in the order in which the loops read them."""
        scalar = {"F": "float", "D": "double"}[kind]
        place = self.constants.add(weights.data, tensor.line, tensor.shape)
        return f"({scalar} const *)weights + {formula(weights.rest + place, self.constants)}"

    def offset(self, index: Index) -> str:
        return scaled(formula(index, self.constants))

    def sort(self, step: Sorted) -> list[str]:
        dim, source = step.dim, step.source
        along = source.variables()
        read = self.at(source, along)
        assert isinstance(read, Read)
        (variable,) = loops_of(along[dim : dim + 1]) or (None,)
        apart = read.tensor.address(read.index).factor(variable) if variable else 0
        index = tuple(Index() if d == dim else i for d, i in enumerate(step.variables()))
        read = self.at(source, index)
        assert isinstance(read, Read)
        sizes = f"{source.shape[dim]}, {step.shape[dim]}, {'true' if step.descending else 'false'}"
        name, first = self.names[step.places], self.offset(step.places.address(index))
        places = f"&{name}[{first} + r], {step.places.strides[dim]}"
        call = (
            f"sorted<{sizes}>(&{self.element(read.tensor, read.index)}, {apart}, "
            f"&{self.element(step, index)}, {step.strides[dim]}, {places});"
        )
        return self.each(loops_of(index), [call])

    def leaves(self, step: Leaves) -> list[str]:
        """Each row goes down, or has an order of nodes of its own, or all rows of a block compare
        the same node at a time."""
        forest, kind = step.forest, _SCALARS[carrier(step.source.dtype)]
        equal = "true" if forest.equal else "false"
        paths = forest.paths
        if paths is not None and self.on_cpu and (paths.deep or self.few):
            nodes = self.table("int32_t", paths.nodes, step)
            sizes = {"node": paths.nodes.shape[1], "together": paths.together}
            return self.of_all_trees(step, "go_down", sizes, [nodes])
        if forest.ranks is not None and self.few:
            ranks = forest.ranks
            whole = (ranks.nodes, ranks.columns, ranks.masks, forest.trees)
            tables = [self.table(kind, ranks.thresholds, step)]
            tables += [self.table("int32_t", each, step) for each in whole]
            one_word = len(forest.words) == len(forest.trees)  # a word for each tree
            sizes = {"words": ranks.masks.shape[1], "step": ranks.step, "one_word": int(one_word)}
            return self.of_all_trees(step, "leaves", sizes, tables)
        features = self.features(step)
        tables = [self.table(kind, forest.thresholds, step)]
        for each in (forest.nodes, forest.words, forest.trees):
            tables.append(self.table("int32_t", each, step))
        row, tree = step.variables()
        to = f"{self.names[step]} + {self.offset(step.address((row, tree)))}"
        own, vectors = (" + r", "1") if self.threads else ("", "RV")
        at = formula(tree, self.constants)
        given = ", ".join(
            [f"{features.first}{own}", str(features.apart), *tables, at, f"{to}{own}"]
        )
        lines = [f"leaf<{equal}, {vectors}>({given});"]
        loops = loops_of((row, tree))
        return self.each(loops, lines) if self.threads else self.nest(loops, lines)

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
        to = f"{self.names[step]} + {self.offset(step.address((row, Index())))}"
        given = ", ".join(["own_rows", features.first, *tables, to])
        kind = _SCALARS[carrier(step.source.dtype)]
        equal = "true" if step.forest.equal else "false"
        call = f"{function}<{equal}, Sizes, {kind}>({given});"
        lines = [named_sizes("Sizes", {**common, **sizes}), call]
        return self.nest(loops_of((row,)), lines) if loops_of((row,)) else scoped(lines)

    def features(self, step: Leaves) -> _Features:
        row, column = step.source.variables()
        first, each = (self.at(step.source, (row, index)) for index in (Index(), column))
        assert isinstance(first, Read) and isinstance(each, Read)
        (variable,) = loops_of((column,)) or (None,)
        apart = each.tensor.address(each.index).factor(variable) if variable else 0
        name, place = self.names[each.tensor], self.offset(first.tensor.address(first.index))
        return _Features(f"{name} + {place}", apart)

    def table(self, kind: str, data: torch.Tensor, step: Leaves) -> str:
        """The address of numbers among the weights."""
        return f"({kind} const *)weights + {self.constants.add(data, step.line)}"

    def scan(self, step: Scan) -> list[str]:
        index = step.variables()
        along = loops_of((index[step.dim],))
        others = loops_of(i for d, i in enumerate(index) if d != step.dim)
        names = Names(self)
        term = names.text(self.at(step.source, index))
        count = along[0].name if along else "0"
        kind, both = carrier(step.dtype), _SCANS[step.kind]
        next_sum = f"{both}(sum, {term})"  # from 0, so that a sum of -0.0 is 0.0 as in eager torch
        first = next_sum if step.kind == "sum" else f"{count} == 0 ? {term} : {next_sum}"
        taken = [*names.lines, f"sum = {first};"]
        taken.append(f"{self.element(step, index)} = sum;")
        return self.each(others, [f"{kind} sum{{}};", *self.nest(along, taken)])

    def scatter(self, step: Scattered) -> list[str]:
        index = step.source.variables()
        names = Names(self)
        value = names.text(self.at(step.source, index))
        place = "splat(0)"
        inside: list[str] = []
        for pick, size, by in zip(step.picks, step.shape, step.strides, strict=True):
            if not isinstance(pick, Tensor):
                place += f" + {formula(pick(index) * by, self.constants)}"
                continue
            at = names.name(self.at(pick, index))
            narrow = f"to_int32({at})"
            place += f" + {narrow} * {by}"
            inside.append(f"ge({at}, splat((int64_t)0)) & lt({at}, splat((int64_t){size}))")
        mask = " & ".join(inside) or "splat(-1)"
        adds = "true" if step.how == "sum" else "false"
        put = f"put_row<{adds}>({self.names[step]} + r, {place}, {mask}, {value});"
        loops, body = loops_of(index), [*names.lines, put]
        if self.threads:
            return self.each((), self.nest(loops, body))
        return self.nest(loops, self.over_vectors(body))


class Names:
    """The C++ text of values. A value that is used twice, or whose text is long, gets a name."""

    def __init__(self, text: Writer, known: Mapping[Tensor, str] | None = None) -> None:
        self.writer, self.known = text, known or {}
        self.lines: list[str] = []
        self._uses: Counter[Value] = Counter()
        self._names: dict[Value, str] = {}
        self._texts: dict[Value, str] = {}

    def text(self, value: Value) -> str:
        inside = list(walk(value))
        self._uses.update(part for each in inside for part in parts(each))
        self._texts = dict(self._names)
        for each in inside:
            if each not in self._texts:
                made = self._made(each)
                shared = self._uses[each] > 1 and not isinstance(each, Literal)
                named = (shared or len(made) > _LONGEST) and not made.isidentifier()
                self._texts[each] = self._named(each, made) if named else made
        return self._texts[value]

    def name(self, value: Value) -> str:
        """As `text`, but always a name."""
        found = self.text(value)
        return found if found.isidentifier() else self._named(value, found)

    def _named(self, value: Value, found: str) -> str:
        name = f"t{len(self._names)}"
        self.lines.append(f"const {carrier(value.dtype)} {name} = {found};")
        self._names[value] = name
        return name

    def _made(self, value: Value) -> str:
        if isinstance(value, Literal):
            return literal(value)
        if isinstance(value, Call):
            return self._call(value)
        assert isinstance(value, Read)
        return self._read(value)

    def _call(self, value: Call) -> str:
        if value.function == "items":
            return f"splat(items[{self._number(value)}])"
        function, given = value.function, [self._texts[each] for each in value.arguments]
        of_bools = value.arguments[0].dtype == "bool"
        if of_bools and function.startswith("to_"):
            given = [f"({given[0]} & 1)"]  # true is -1
        return call(function, given, of_bools)

    @staticmethod
    def _number(value: Call) -> int:
        (place,) = value.arguments
        assert isinstance(place, Literal)
        return int(place.number)

    def _read(self, value: Read) -> str:
        tensor, index = value.tensor, value.index
        if tensor in self.known:
            return self.known[tensor]
        if any(each.of_row for each in index):
            return self._picked(tensor, index)
        if isinstance(tensor, Argument):
            column = self.writer.column(tensor, index)
            if tensor.kind == "-":
                size = itemsize(tensor.dtype)
                return f"load_{tensor.dtype}(same<{size}>({column}).bytes, 0)"
            return f"load_{tensor.dtype}({column}, row + r * LANES)"
        if isinstance(tensor, Constant):
            kind = _SCALARS[carrier(tensor.dtype)]
            constants = self.writer.constants
            place = tensor.address(index) + constants.add(held(tensor.data), tensor.line)
            at = formula(place, constants)
            return f"splat((({kind} const *)weights)[{at}])"
        return self.writer.element(tensor, index)

    def _picked(self, tensor: Tensor, index: Indices) -> str:
        """The text of an element whose index differs between rows."""
        constants = self.writer.constants
        if isinstance(tensor, Argument):
            column, place = self.writer.column(tensor, index), self._place(index[-1], "Q")
            found = f"items_at<{itemsize(tensor.dtype)}>({column}, {place}, items[{tensor.items}])"
            return f"load_{tensor.dtype}({found}.bytes, 0)"
        address = self._place(tensor.address(index), "I")
        if isinstance(tensor, Constant):
            kind = _SCALARS[carrier(tensor.dtype)]
            first = constants.add(held(tensor.data), tensor.line)
            return f"pick(({kind} const *)weights + {first}, {address})"
        return f"pick_row({self.writer.names[tensor]}, {address}, r)"

    def _place(self, index: Index, kind: str) -> str:
        """The text of an index that differs between rows, as a vector."""
        constants, scalar = self.writer.constants, _SCALARS[kind]
        own = [(atom, factor) for atom, factor in index.terms if isinstance(atom, OfRow)]
        rest = Index(tuple(t for t in index.terms if not isinstance(t[0], OfRow)), index.constant)
        words = []
        for atom, factor in own:
            value = self._texts[atom.value] if kind == "Q" else self._int32(atom.value)
            words.append(value if factor == 1 else f"{enclosed(value)} * splat(({scalar}){factor})")
        if rest.terms or rest.constant or not words:
            words.append(f"splat(({scalar})({formula(rest, constants)}))")
        return " + ".join(words)

    def _int32(self, value: Value) -> str:
        """The text of an int64 as int32. One that was made of an int32 is not converted twice."""
        if isinstance(value, Call) and value.function == "to_int64":
            (given,) = value.arguments
            if given.dtype == "int32":
                return self._texts[given]
        return f"to_int32({self._texts[value]})"


_SCALARS = {"F": "float", "D": "double", "I": "int32_t", "Q": "int64_t"}


def literal(value: Literal) -> str:
    kind, number = carrier(value.dtype), value.number
    if value.dtype == "bool":
        return f"splat({-int(number)})"
    if kind in "IQ":
        low = number == RANGES[value.dtype][0] and number < -1
        text = f"{int(number) + 1} - 1" if low else str(int(number))
        return f"splat((int64_t)({text}))" if kind == "Q" else f"splat({text})"
    return f"splat({floating(float(number), kind)})"


def floating(number: float, kind: str) -> str:
    """A number as C++ text without loss: hexadecimal literals are exact."""
    if kind == "F":
        number = float(torch.tensor(number, dtype=torch.float32))
    if math.isnan(number):
        return "kNaN" if kind == "F" else "(double)kNaN"
    if math.isinf(number):
        text = "-kInfinity" if number < 0 else "kInfinity"
        return text if kind == "F" else f"(double){text}"
    if (
        number == int(number)
        and abs(number) < 1e6
        and not (number == 0 and math.copysign(1, number) < 0)
    ):
        return f"{number}f" if kind == "F" else str(number)
    if kind == "D":
        return float(number).hex()
    return f"{number.hex()}f"


def formula(index: Index, constants: Constants) -> str:
    """The C++ text of an index that is the same for all rows."""
    words = []
    for atom, factor in index.terms:
        text = _atom(atom, constants)
        words.append(text if factor == 1 else f"{text} * {factor}")
    if index.constant or not words:
        words.append(str(index.constant))
    return " + ".join(words).replace("+ -", "- ")


def _atom(atom: object, constants: Constants) -> str:
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
    values = ", ".join(f"{each} = {size}" for each, size in sizes.items())
    return f"struct {name} {{ enum : int {{ {values} }}; }};"


def _counted(loops: Sequence[Variable]) -> Index:
    """The number of a step among all steps of some loops."""
    total, size = Index(), 1
    for loop in reversed(loops):
        total = total + Index(((loop, size),))
        size *= loop.extent
    return total


def divided(loops: Sequence[Variable], each: str, body: Sequence[str]) -> list[str]:
    """Lines that the threads of a GPU's block run together: `each` times, a C++ number, for the
    elements of some loops."""
    places, below = [], 1
    for loop in reversed(loops):
        places.append(f"const int {loop.name} = at / ({each} * {below}) % {loop.extent};")
        below *= loop.extent
    head = f"EACH_OF_BLOCK(at, {below} * {each}) {{"
    return [head, *indented([*places, *body]), "}", "BLOCK_WAITS;"]


def scoped(body: Sequence[str]) -> list[str]:
    """The lines in a scope."""
    return ["{", *indented(body), "}"] if len(body) > 1 else list(body)


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _operations(value: Value) -> int:
    return sum(1 for each in walk(value) if isinstance(each, Call))
