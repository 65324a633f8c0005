"""The tensors of the program for one row, described by their elements.

A tensor gives its element at an index as a value: a read of memory, or an expression of elements of
other tensors. plan.py decides which tensors are stored. A view only changes the index, and a
pointwise operation is computed where its result is needed. `Reduction`, `Product`, `Sorted`, `Scan`
and `Scattered`, which have their own loops, and `Assembly`, which has parts, are mostly stored.

Shapes are those at one row. The first size may be UNKNOWN: the number of items of a collection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from engines.errors import EngineError, NotApplicableError, first_line
from engines.lanes.functions import RANGES
from engines.lanes.index import (
    Index,
    Indices,
    OfRow,
    Variable,
    constant,
    entry,
    flat,
    variable,
)
from engines.lanes.values import At, Number, Read, Shape, Tensor, Value, Values
from soa.dtypes import itemsize

UNKNOWN = -1
"""The size of a dimension that only a call tells: the number of items of a collection."""


@contextmanager
def named_in_errors(tensor: Tensor) -> Iterator[None]:
    """Turns an unexpected error inside the `with` block into a NotApplicableError that names the
    operator of `tensor`."""
    try:
        yield
    except (EngineError, MemoryError):
        raise
    except Exception as error:
        raise no_code_error(tensor.operator, tensor.line, error) from error


def no_code_error(operator: str, line: str, error: Exception) -> NotApplicableError:
    """The NotApplicableError to raise for an error of our own code, which did not expect such
    arguments of an operator. `line`: that of the model; empty if it is not known."""
    location = f" ({line})" if line else ""
    refusal = f"it has no code for {operator} with these arguments{location}"
    return NotApplicableError(f"{refusal}: {type(error).__name__}: {first_line(error)}")


class Argument(Tensor):
    """Columns in the caller's memory: one, or all those of a matrix.

    first : the index of the first of them among the columns of all arguments.
    kind : the letter of the argument in `Program.kinds`.
    items : the index of the jagged collection whose items the columns hold; None if they hold rows.
    """

    def __init__(
        self, values: Values, shape: Shape, dtype: str, first: int, kind: str, items: int | None
    ) -> None:
        super().__init__(values, shape, dtype)
        self.cost = 3 if itemsize(dtype) < 4 else 1  # bools and narrow numbers are converted
        self.first, self.kind, self.items = first, kind, items

    def element(self, index: Indices, at: At) -> Value:
        return self.values.read(self, index)


class Constant(Tensor):
    """Weights, and values computed only from weights. They are the same for all rows.

    `uniform` is the number that all elements are; None if they differ.
    """

    def __init__(self, values: Values, data: torch.Tensor) -> None:
        dtype = str(data.dtype).removeprefix("torch.")
        super().__init__(values, tuple(data.shape), dtype)
        self.data = data.detach().contiguous()
        self.uniform: Number | None = _uniform_number(self.data)
        if self.bounds is not None and self.data.numel():
            self.bounds = int(self.data.min()), int(self.data.max())

    def element(self, index: Indices, at: At) -> Value:
        """A literal if all elements are the same number, or if the index is a constant; else a read
        of the weights in memory."""
        if self.uniform is not None:
            return self.values.literal(self.uniform, self.dtype)
        if not any(position.terms for position in index):
            number = self.data[tuple(position.constant for position in index)].item()
            return self.values.literal(number, self.dtype)
        return self.values.read(self, index)


def _uniform_number(data: torch.Tensor) -> Number | None:
    """The number that all elements are, bit for bit (0.0 and -0.0 differ). None if there is no such
    number."""
    if not data.numel():
        return None
    number: Number = data.flatten()[0].item()
    if data.numel() == 1:  # its bytes cannot be viewed: a single element may have any stride
        return number
    raw = data.flatten().view(torch.uint8).view(data.numel(), data.itemsize)
    return number if bool((raw == raw[:1]).all()) else None


class Uniform(Tensor):
    """A tensor whose elements all have the same value: a number, or a collection's number of items,
    which differs between calls."""

    def __init__(self, values: Values, shape: Shape, value: Value) -> None:
        super().__init__(values, shape, value.dtype)
        self.value, self.bounds = value, value.bounds

    def element(self, index: Indices, at: At) -> Value:
        return self.value


class Map(Tensor):
    """The results of a function that is applied element by element to tensors of the same shape.

    `cost` is that of the function alone.
    """

    def __init__(
        self,
        values: Values,
        dtype: str,
        function: Callable[..., Value],
        sources: Sequence[Tensor],
        cost: int,
    ) -> None:
        super().__init__(values, sources[0].shape, dtype, *sources)
        self.function = function
        self.cost = cost + sum(source.cost for source in sources)

    def element(self, index: Indices, at: At) -> Value:
        return self.function(*(at(source, index) for source in self.sources))


class View(Tensor):
    """The elements of `base` in another arrangement: `where` gives the index of an element in the
    base from its index in the view."""

    def __init__(self, base: Tensor, shape: Shape, where: Callable[[Indices], Indices]) -> None:
        super().__init__(base.values, shape, base.dtype, base)
        self.base, self.where, self.bounds = base, where, base.bounds
        self.cost = base.cost
        self._root = base.root

    @property
    def root(self) -> Tensor:
        return self._root

    @property
    def repeats(self) -> bool:
        """True if the view has more elements than its base, so that some are read repeatedly."""
        return UNKNOWN not in self.shape and self.count > max(self.base.count, 1)

    def element(self, index: Indices, at: At) -> Value:
        return at(self.base, self.where(index))


Pick: TypeAlias = "Tensor | Callable[[Indices], Index]"
"""How the index along one dimension of a base is found for an element of the result: a tensor of
indices if they may differ between rows, else a function of the element's index."""


class Gathered(Tensor):
    """The elements of `base` at `picks`, of which there is one for each dimension of `base`. At
    least one of them is a tensor; its integers have this tensor's shape.

    For an index outside the base, the element is NaN (0 for integers), and nothing outside is read.
    """

    def __init__(self, base: Tensor, shape: Shape, picks: Sequence[Pick]) -> None:
        tensors = [pick for pick in picks if isinstance(pick, Tensor)]
        super().__init__(base.values, shape, base.dtype, base, *tensors)
        self.base, self.picks = base, picks
        # About 6 instructions keep an index inside the base, load the element and select it.
        self.cost = 6 + sum(tensor.cost for tensor in tensors)

    def element(self, index: Indices, at: At) -> Value:
        """The element at the picked index; NaN or 0 if that is outside the base. The read is at the
        nearest index inside, so that it never leaves the base's memory."""
        values, base_index, conditions = self.values, [], []
        for pick, size in zip(self.picks, self.base.shape, strict=True):
            if not isinstance(pick, Tensor):
                base_index.append(pick(index))
                continue
            picked = clamped = at(pick, index)
            if size != UNKNOWN and picked.bounds is not None:
                clamped = self._clamp(picked, size)
            if clamped is not picked:
                conditions.append(values.call("eq", clamped, picked, dtype="bool"))
            base_index.append(as_index(clamped))
        element = at(self.base, tuple(base_index))
        outside = values.literal(float("nan") if self.dtype not in RANGES else 0, self.dtype)
        for is_inside in conditions:
            element = values.call("select", is_inside, element, outside, dtype=self.dtype)
        return element

    def _clamp(self, picked: Value, size: int) -> Value:
        """The nearest index from 0 to `size` - 1; `picked` itself if it is always one of these."""
        low, high = picked.bounds or RANGES["int64"]
        if low >= 0 and high < size:
            return picked
        least, most = (self.values.literal(end, "int64") for end in (0, size - 1))
        bounds = (0, size - 1)
        return self.values.call("clamp", picked, least, most, dtype="int64", bounds=bounds)


def as_index(value: Value) -> Index:
    """A value as an index along a dimension: a constant, an entry of a constant table, or, if it
    may differ between rows, `OfRow`."""
    if value.bounds is not None and value.bounds[0] == value.bounds[1]:
        return constant(value.bounds[0])
    of_row = isinstance(value, Read) and any(position.is_of_row for position in value.index)
    if isinstance(value, Read) and isinstance(value.tensor, Constant) and not of_row:
        table = tuple(int(number) for number in value.tensor.data.flatten().tolist())
        return entry(table, flat(value.index, value.tensor.shape))
    return Index(((OfRow(value, *(value.bounds or RANGES["int64"])), 1),))


class Reduction(Tensor):
    """A reduction over some dimensions of a tensor.

    kind : sum, max, min, prod, any, all, argmax or argmin.
    dims : the dimensions that are reduced. None of them is negative.
    keep : whether these dimensions stay, with size 1.
    """

    def __init__(
        self, kind: str, source: Tensor, dims: Sequence[int], dtype: str, keep: bool
    ) -> None:
        if keep:
            shape = [1 if d in dims else size for d, size in enumerate(source.shape)]
        else:
            shape = [size for d, size in enumerate(source.shape) if d not in dims]
        super().__init__(source.values, tuple(shape), dtype, source)
        self.kind, self.source, self.dims, self.keep = kind, source, tuple(dims), keep
        if kind in ("argmax", "argmin"):
            self.bounds = 0, math.prod(source.shape[d] for d in dims) - 1

    def element(self, index: Indices, at: At) -> Value:
        return self.values.read(self, index)

    def steps(self) -> Indices:
        """The loop variables of the reduction: one for each dimension that is reduced."""
        return tuple(variable(f"k{d}", self.source.shape[d]) for d in self.dims)

    def term(self, index: Indices, at: At) -> Value:
        """The element of the source that a step of the loops adds to the result at `index`, or
        compares with it."""
        rank = len(self.source.shape)
        kept_dims = range(rank) if self.keep else [d for d in range(rank) if d not in self.dims]
        by_dim = dict(zip(kept_dims, index, strict=True))
        by_dim |= zip(self.dims, self.steps(), strict=True)
        return at(self.source, tuple(by_dim[d] for d in range(rank)))


class Product(Tensor):
    """Sums of products of two tensors' elements: matrix products and convolutions.

    sizes : the number of steps of each loop of the sum.
    left_at, right_at : give the indices of the two elements that are multiplied, from the index of
        the result and the loop variables of the sum.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        shape: Shape,
        sizes: Sequence[int],
        left_at: Callable[[Indices, Indices], Indices],
        right_at: Callable[[Indices, Indices], Indices],
    ) -> None:
        super().__init__(left.values, shape, left.dtype, left, right)
        self.left, self.right = left, right
        self.sizes, self.left_at, self.right_at = tuple(sizes), left_at, right_at

    def element(self, index: Indices, at: At) -> Value:
        return self.values.read(self, index)

    def steps(self) -> Indices:
        """The loop variables of the sum."""
        return tuple(variable(f"k{d}", size) for d, size in enumerate(self.sizes))

    def operands(self, index: Indices, at: At) -> tuple[Value, Value]:
        """The two elements that a step of the loops multiplies for the result at `index`."""
        steps = self.steps()
        left, right = self.left_at(index, steps), self.right_at(index, steps)
        return self._read(self.left, left, at), self._read(self.right, right, at)

    def _read(self, operand: Tensor, index: Indices, at: At) -> Value:
        """The element of an operand. Weights are read from memory even if they are all the same
        number, which `at` would give as a literal."""
        is_weights = isinstance(operand, Constant)
        return self.values.read(operand, index) if is_weights else at(operand, index)


@dataclass(frozen=True)
class Part:
    """A part of an assembly: the elements of `source`. `place` gives the index at which an element
    is written from its index in the source."""

    source: Tensor
    place: Callable[[Indices], Indices]


class Assembly(Tensor):
    """A tensor that is written part by part. Where two parts overlap, the later one counts."""

    def __init__(self, values: Values, shape: Shape, dtype: str, parts: Sequence[Part]) -> None:
        super().__init__(values, shape, dtype, *(part.source for part in parts))
        self.parts = tuple(parts)


class Beside(Tensor):
    """A concatenation of items' columns: along a dimension `dim` other than the first, which is the
    items of a collection. It is never stored, because the number of items is not known."""

    def __init__(self, values: Values, shape: Shape, sources: Sequence[Tensor], dim: int) -> None:
        super().__init__(values, shape, sources[0].dtype, *sources)
        self.dim = dim

    def element(self, index: Indices, at: At) -> Value:
        """The element of the source into which the index along `dim` falls. As long as that depends
        on a loop variable, it is an `Open` value."""
        for atom in index[self.dim].atoms():
            if isinstance(atom, Variable):
                return self.values.open(atom, self.dtype)
        position = index[self.dim].constant  # first along all sources, then along one
        for source in self.sources:
            if position < source.shape[self.dim]:
                return at(source, (*index[: self.dim], constant(position), *index[self.dim + 1 :]))
            position -= source.shape[self.dim]
        raise IndexError(index)


class Joined(Tensor):
    """A concatenation along the first dimension. The first of the `sources` holds the items of a
    collection, whose number `items` each call gives; the others have known sizes.

    It is never stored: each row reads only its own few items.
    """

    def __init__(
        self, values: Values, shape: Shape, sources: Sequence[Tensor], items: Value
    ) -> None:
        super().__init__(values, shape, sources[0].dtype, *sources)
        self.items = items

    def element(self, index: Indices, at: At) -> Value:
        """The element of the source into which the first index falls. It is chosen among elements
        of all sources, each of which is read at the nearest index inside its source."""
        values, position = self.values, self._as_value(index[0])
        element = at(self.sources[0], (as_index(position), *index[1:]))
        begin = self.items  # of the next source, in the concatenation
        for source in self.sources[1:]:
            bounds = (0, source.shape[0] - 1)
            least, most = (values.literal(end, "int64") for end in bounds)
            in_source = values.call("sub", position, begin, dtype="int64")
            clamped = values.call("clamp", in_source, least, most, dtype="int64", bounds=bounds)
            own_element = at(source, (as_index(clamped), *index[1:]))
            is_before = values.call("lt", position, begin, dtype="bool")
            element = values.call("select", is_before, element, own_element, dtype=self.dtype)
            size = values.literal(source.shape[0], "int64")
            begin = values.call("add", begin, size, dtype="int64")
        return element

    def _as_value(self, index: Index) -> Value:
        """An index as a value. Raises NotImplementedError unless it is a sum of a constant and of
        values that differ between rows (`OfRow`)."""
        total = self.values.literal(index.constant, "int64")
        for atom, factor in index.terms:
            if not isinstance(atom, OfRow) or factor != 1:
                raise NotImplementedError(f"items at {atom}")
            if total.bounds == (0, 0):
                total = atom.value
            else:
                total = self.values.call("add", total, atom.value, dtype="int64")
        return total


class Sorted(Tensor):
    """The first `count` elements along a dimension in descending or ascending order.

    NaN is the largest; equal elements keep their order. `places` is a tensor of its own: the index
    in `source` of each element.
    """

    def __init__(self, source: Tensor, dim: int, count: int, descending: bool) -> None:
        shape = (*source.shape[:dim], count, *source.shape[dim + 1 :])
        super().__init__(source.values, shape, source.dtype, source)
        self.source, self.dim, self.descending = source, dim, descending
        self.places = Tensor(source.values, shape, "int64", self)
        self.places.bounds = 0, source.shape[dim] - 1


@dataclass(frozen=True)
class Ranks:
    """The nodes of a forest, sorted by column and then by threshold. A row goes right at the first
    nodes of a column, up to its own value, and left at all others. For words see `Forest`.

    thresholds : (E,), float32 or float64
        The threshold of each node.
    nodes : (E, 2), int32
        The word of each node, and the bits of the word that it keeps if a row goes right.
    columns : (F + 1, 2), int32
        For each column, the number of its first node and of its first mask; then where all end.
    masks : (M, W), int32
        For each column, what is left of all words if a row goes right at none of its nodes, at the
        first `step` nodes, at the first 2 `step`, ... W is a multiple of 16.
    step : int
        The number of a column's nodes from one mask to the next.
    """

    thresholds: torch.Tensor
    nodes: torch.Tensor
    columns: torch.Tensor
    masks: torch.Tensor
    step: int


@dataclass(frozen=True)
class Paths:
    """The nodes of a forest in the order in which rows go down: the roots of all trees first. The
    two children of a node are beside each other. A leaf is its own child.

    nodes : (N, 3 or 4), int32
        For an inner node: the column that it compares, its left child, and the bits of its
        threshold, in one number for float32, in two for float64. For a leaf: the number of columns,
        the leaf itself, and the leaf's number among the leaves.
    together : int
        The number of trees in which a row goes down at the same time.
    deep : bool
        Whether these nodes are used for any number of rows; otherwise for a few rows only.
    """

    nodes: torch.Tensor
    together: int
    deep: bool


@dataclass(frozen=True)
class Forest:
    """Decision trees as tables, in which the leaf that a row reaches is found by clearing bits.

    A word is 32 bits, one for each of up to 32 leaves of a tree, from left to right; a tree has as
    many words as it needs. At first all bits are set. At each node where a row goes right, the bits
    of the leaves below its left child are cleared. The first bit that is left is the row's leaf.

    thresholds : (E,), float32 or float64
        The thresholds of the nodes, in the order in which they are compared: word after word. A
        node that clears bits in several words is there several times.
    nodes : (E, 2), int32
        The column that a node compares, and the bits of the word that it keeps if a row goes right.
    words : (W + 1,), int32
        For each word, the number of its first node; then where all end.
    trees : (T + 1, 2), int32
        For each tree, its first word and the number of its first leaf; then where all end.
    equal : bool
        Whether a row goes left if its column equals the threshold.
    ranks : Ranks or None
        The same nodes in an order that is faster for a few rows on a CPU.
    paths : Paths or None
        The same nodes for rows that go down from the roots, if that is faster on a CPU; `ranks` is
        None then.
    """

    thresholds: torch.Tensor
    nodes: torch.Tensor
    words: torch.Tensor
    trees: torch.Tensor
    equal: bool
    ranks: Ranks | None
    paths: Paths | None


class Leaves(Tensor):
    """The number of the leaf that is reached in each tree of a forest: (K, T), int32, for `source`,
    (K, F). K is 1, or the number of particles of an event that the trees score."""

    def __init__(self, source: Tensor, forest: Forest) -> None:
        shape = (source.shape[0], len(forest.trees) - 1)
        super().__init__(source.values, shape, "int32", source)
        self.source, self.forest = source, forest
        self.bounds = 0, int(forest.trees[-1, 1]) - 1


class Scan(Tensor):
    """Cumulative sums (`kind` "sum") or products ("prod") along a dimension."""

    def __init__(self, kind: str, source: Tensor, dim: int) -> None:
        super().__init__(source.values, source.shape, source.dtype, source)
        self.kind, self.source, self.dim = kind, source, dim


class Scattered(Tensor):
    """`base` after the elements of `source` are written over elements of it (`how` is "put") or
    added to them ("sum"), at indices that may differ between rows.

    `picks` are as in `Gathered`; those that are tensors have the shape of `source`. Elements whose
    index is outside the base are ignored.
    """

    def __init__(self, base: Tensor, source: Tensor, picks: Sequence[Pick], how: str) -> None:
        tensors = [pick for pick in picks if isinstance(pick, Tensor)]
        super().__init__(base.values, base.shape, base.dtype, base, source, *tensors)
        self.base, self.source, self.picks, self.how = base, source, picks, how


@dataclass
class Program:
    """The program for one row.

    kinds : a letter for each argument: n carries the number of rows, i the number of items of a
        jagged collection; m is a matrix, c a column, - is shared by all rows.
    dtypes : the dtype of each argument.
    tensors : all tensors, each after its sources.
    outputs : pairs of an argument and the tensor that is written into it.
    """

    values: Values
    kinds: str = ""
    dtypes: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[Argument, Tensor]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)


class Elements:
    """Gives the values of elements: reads for the tensors that are `stored`, and expressions for
    all others."""

    def __init__(self, stored: frozenset[Tensor]) -> None:
        self.stored = stored
        self._expressions: dict[tuple[Tensor, Indices], Value] = {}

    def at(self, tensor: Tensor, index: Indices) -> Value:
        """The value of an element for a reader of the tensor: a read if it is stored."""
        while isinstance(tensor, View):
            with named_in_errors(tensor):
                index, tensor = tensor.where(index), tensor.base
        if tensor in self.stored:
            return tensor.values.read(tensor, index)
        return self.expression(tensor, index)

    def expression(self, tensor: Tensor, index: Indices) -> Value:
        """The expression that computes an element, even if the tensor is stored."""
        if (tensor, index) not in self._expressions:
            with named_in_errors(tensor):
                self._expressions[tensor, index] = tensor.element(index, self.at)
        return self._expressions[tensor, index]
