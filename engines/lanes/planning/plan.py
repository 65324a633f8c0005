"""Plans which tensors are stored in memory, which loops write them, and their place in the arena.

A value that is read only once is not stored but computed where it is needed. Operators that follow
a product or a reduction use each sum while it is in a register.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from engines.errors import NotApplicableError
from engines.lanes.functions import LONG
from engines.lanes.index import (
    Atom,
    Index,
    Indices,
    Quotient,
    Remainder,
    Variable,
    constant,
    variable,
)
from engines.lanes.tensors import (
    UNKNOWN,
    Assembly,
    Beside,
    Constant,
    Elements,
    Gathered,
    Joined,
    Leaves,
    Map,
    Product,
    Program,
    Reduction,
    Scan,
    Scattered,
    Sorted,
    View,
)
from engines.lanes.values import Open, Read, Tensor, Value, walk

# A value of at most this cost is not stored but computed again for each reader.
_CHEAP = 2
_LONGEST = 100  # functions in a chain
_MOST_SPLITS = 16  # of the loops of a product
_LOOPS = (Product, Reduction, Sorted, Leaves, Scan, Scattered)
_NOT_INLINE = (*_LOOPS, Assembly)  # all others may be computed in the loops of their readers


@dataclass(frozen=True)
class PartOf:
    """One of the loops that write an assembly, or the outputs."""

    into: Tensor
    number: int


Reader: TypeAlias = "Tensor | PartOf"
"""A reader of a tensor that has its own loops."""


@dataclass(frozen=True)
class Kernel:
    """Loops that write the elements of `source` at `index` into `into`, at `place`.

    `inner`: the product or reduction that is computed inside the loops, whose sums are read from
    registers; None if there is only an expression.
    """

    into: Tensor
    place: Indices
    source: Tensor
    index: Indices
    inner: Product | Reduction | None = None
    inner_at: Indices = ()

    @classmethod
    def of(cls, into: Tensor, place: Indices, source: Tensor) -> Kernel:
        """The kernel for all elements of `source`. A product or reduction that is stored itself is
        computed inside the loops; of another tensor `_fused` finds the one inside, if any."""
        index = source.variables()
        if isinstance(source, Product | Reduction) and source is into:
            return cls(into, place, source, index, source, index)
        return cls(into, place, source, index)

    def value(self, elements: Elements) -> Value:
        """The expression that is written."""
        if self.source is self.into:
            return elements.expression(self.source, self.index)
        return elements.at(self.source, self.index)

    @property
    def loops(self) -> tuple[Variable, ...]:
        """The loops, outermost first, ordered so that addresses are written in ascending order."""
        atoms = {atom for index in self.index for atom in index.atoms()}
        loops = [atom for atom in atoms if isinstance(atom, Variable)]
        address = self.into.address(self.place)
        return tuple(sorted(loops, key=lambda loop: (-(address.factor(loop) or 0), loop.name)))

    def split(self, loop: Variable, by: int) -> Kernel:
        """The kernel with two loops in place of one; the inner one has `by` steps, which divides
        the loop's extent."""
        outer, inner = variable(f"{loop.name}a", loop.extent // by), variable(f"{loop.name}b", by)
        return self.replaced({loop: outer * by + inner})

    def replaced(self, values: Mapping[Atom, Index]) -> Kernel:
        """The kernel with `values` in place of variables."""
        place, index, inner_at = (
            tuple(index.replaced(values) for index in indices)
            for indices in (self.place, self.index, self.inner_at)
        )
        return replace(self, place=place, index=index, inner_at=inner_at)


Step: TypeAlias = "Kernel | Sorted | Leaves | Scan | Scattered"
"""A step of a plan: loops that write elements, or a sort, the leaves of trees, a sum so far, or a
scatter of a row."""

Store: TypeAlias = Literal["registers", "local", "shared"]
"""Where a kernel keeps the intermediate values of a row."""


@dataclass(frozen=True)
class Plan:
    """The steps in order, and the place of each stored tensor in the arena. Places and `size` count
    slots. A slot has 4 bytes for each row of a block."""

    program: Program
    elements: Elements
    steps: tuple[Step, ...]
    places: Mapping[Tensor, int]
    size: int


def planned(program: Program) -> Plan:
    """The plan of a program. NotApplicableError if a chain of functions of items is too long."""
    needed = in_memory(program) | _ends_of_long_chains(program)
    # Which tensors have readers in common depends on which are unfinished, and the other way round:
    # the first pass takes those that read a sum directly.
    readers = _Readers(program, needed, _next_to_sums(program))
    readers = _Readers(program, needed, _unfinished(program, readers))
    stored = _stored(program, readers)
    elements = Elements(stored)
    steps = list(_unrolled(_steps(program, stored), elements))
    apart = _sums_apart(steps, elements)
    elements = Elements(stored | apart)
    steps = [_with_linear_addresses(step, elements) for step in _fused(steps, apart, elements)]
    places, size = _arena(steps, elements)
    return Plan(program, elements, tuple(steps), places, size)


def in_memory(program: Program) -> frozenset[Tensor]:
    """The tensors that a reader needs in memory: operands of products, what is sorted or compared
    by trees, what is picked by an index of the row, and what a loop reads of several columns of
    items. For all but the last, `Builder.in_memory` has seen to it that they can be stored."""
    needed: set[Tensor] = set()
    # Those of several columns: which one an element reads must be known, so no loop can go over
    # the columns.
    of_columns: set[Tensor] = set()
    for tensor in program:
        inline = isinstance(tensor, View | Map | Gathered | Joined)
        if isinstance(tensor, Beside) or (inline and not of_columns.isdisjoint(tensor.sources)):
            of_columns.add(tensor)
        over_columns = isinstance(tensor, Reduction | Scan) and tensor.source in of_columns
        if isinstance(tensor, Product):
            needed |= {tensor.left.root, tensor.right.root}
        elif isinstance(tensor, Sorted | Leaves) or over_columns:
            needed.add(tensor.sources[0].root)
        elif isinstance(tensor, Gathered) and UNKNOWN not in tensor.base.shape:
            needed.add(tensor.base.root)
    return frozenset(tensor for tensor in needed if not isinstance(tensor, Constant))


def _ends_of_long_chains(program: Program) -> frozenset[Tensor]:
    """Tensors to store so that no expression is a chain of more than _LONGEST functions.
    NotApplicableError if one of them is computed for items, which cannot be stored."""
    ends: set[Tensor] = set()
    lengths: dict[Tensor, int] = {}
    for tensor in program:
        if isinstance(tensor, _NOT_INLINE) or is_place(tensor):
            continue
        length = max((lengths.get(source, 0) for source in tensor.sources), default=0)
        lengths[tensor] = length if isinstance(tensor, View) else length + 1
        if lengths[tensor] < _LONGEST or not isinstance(tensor, Map | Gathered):
            continue
        if UNKNOWN in tensor.shape:
            raise NotApplicableError(
                f"{tensor.line} ends a chain of {_LONGEST} functions of items, which are not stored"
            )
        ends.add(tensor)
        lengths[tensor] = 0
    return frozenset(ends)


class _Readers:
    """The loops that read each tensor, directly or through tensors that are not stored.

    `needed`: see `in_memory`. `unfinished`: tensors that are computed from a sum of a product or
    reduction in its loops. `repeated`: tensors of which an element may be read more than once.
    """

    def __init__(
        self, program: Program, needed: frozenset[Tensor], unfinished: frozenset[Tensor]
    ) -> None:
        self.needed, self.unfinished = needed, unfinished
        self.by_tensor: dict[Tensor, set[Reader]] = defaultdict(set)
        self.repeated: set[Tensor] = set()
        for number, (argument, written) in enumerate(program.outputs):
            self.by_tensor[written].add(PartOf(argument, number))
        for tensor in reversed(program.tensors):  # so that its own readers are known
            self._add_to_sources(tensor)

    def _add_to_sources(self, tensor: Tensor) -> None:
        """Adds the loops that compute a tensor's elements to the readers of its sources."""
        if isinstance(tensor, Assembly):
            for number, part in enumerate(tensor.parts):
                self.by_tensor[part.source].add(PartOf(tensor, number))
            return
        inline = not isinstance(tensor, _LOOPS) and not self.is_stored(tensor)
        readers: set[Reader] = self.by_tensor[tensor] if inline else {tensor}
        view_repeats = isinstance(tensor, View) and tensor.repeats
        repeats = view_repeats or (inline and tensor in self.repeated)
        for source in tensor.sources:
            self.by_tensor[source] |= readers
            if repeats:
                self.repeated.add(source)

    def shared(self, tensor: Tensor) -> bool:
        """True if elements of the tensor are read more than once."""
        return len(self.by_tensor[tensor]) > 1 or tensor in self.repeated

    def in_loops(self, tensor: Tensor) -> bool:
        """True if a tensor with loops of its own reads the tensor."""
        return any(isinstance(reader, _LOOPS) for reader in self.by_tensor[tensor])

    def is_stored(self, tensor: Tensor) -> bool:
        """True if the tensor, which could be computed in the loops of its readers, is stored."""
        if not isinstance(tensor, Map | Gathered):
            return False
        if tensor in self.needed or (tensor in self.unfinished and self.in_loops(tensor)):
            return True
        dear = tensor.cost > _CHEAP or tensor in self.unfinished
        return dear and self.shared(tensor)


def _next_to_sums(program: Program) -> frozenset[Tensor]:
    """The tensors that read a product or a reduction, directly or through views."""
    return frozenset(
        tensor
        for tensor in program
        if any(isinstance(source.root, Product | Reduction) for source in tensor.sources)
    )


def _unfinished(program: Program, readers: _Readers) -> frozenset[Tensor]:
    """The products and reductions whose sums are used in registers, and all that is computed there
    from such a sum: see `_Readers`."""
    unfinished: set[Tensor] = set()
    for tensor in program:
        if isinstance(tensor, Product | Reduction):
            in_registers = not readers.shared(tensor)
        elif isinstance(tensor, _NOT_INLINE) or unfinished.isdisjoint(tensor.sources):
            in_registers = False
        else:
            in_registers = not readers.is_stored(tensor)
        if in_registers:
            unfinished.add(tensor)
    return frozenset(unfinished)


def _stored(program: Program, readers: _Readers) -> frozenset[Tensor]:
    """The tensors to store. A product or reduction is stored unless it is the last one that is read
    by the loops of its only reader: these may compute it."""
    stored: set[Tensor] = set()
    last_sum: dict[Reader, Tensor] = {}
    for tensor in program:
        if not isinstance(tensor, Product | Reduction):
            inline = not isinstance(tensor, _NOT_INLINE) and not is_place(tensor)
            if not inline or readers.is_stored(tensor):
                stored.add(tensor)
        elif readers.shared(tensor) or readers.in_loops(tensor) or tensor in readers.needed:
            stored.add(tensor)
        else:
            for reader in readers.by_tensor[tensor]:
                if reader in last_sum:
                    stored.add(last_sum[reader])
                last_sum[reader] = tensor
    return frozenset(stored)


def is_place(tensor: Tensor) -> bool:
    """True if the tensor holds the indices of a sort. The sort writes them with its values."""
    return any(isinstance(source, Sorted) and source.places is tensor for source in tensor.sources)


def _steps(program: Program, stored: frozenset[Tensor]) -> Iterator[Step]:
    """The steps that write the stored tensors, in the order of the program, and then the outputs.
    Several write the same tensor if it has parts, or if it begins as a copy."""
    for tensor in program:
        if isinstance(tensor, Assembly):
            for part in tensor.parts:
                yield Kernel.of(tensor, part.place(part.source.variables()), part.source)
        elif isinstance(tensor, Sorted | Leaves | Scan):
            yield tensor
        elif isinstance(tensor, Scattered):
            yield Kernel.of(tensor, tensor.variables(), tensor.base)
            yield tensor
        elif tensor in stored and not is_place(tensor):
            yield Kernel.of(tensor, tensor.variables(), tensor)
    for argument, tensor in program.outputs:
        yield Kernel.of(argument, tensor.variables(), tensor)


def _unrolled(steps: Iterable[Step], elements: Elements) -> Iterator[Step]:
    """The steps, with one kernel for each value of a variable that has to be a constant."""
    waiting = list(steps)[::-1]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Kernel) or step.inner is not None:
            yield step
            continue
        values = walk(step.value(elements))
        loop = next((value.variable for value in values if isinstance(value, Open)), None)
        if loop is None:
            yield step
        else:  # the last of `waiting` comes next: that of the number 0
            numbers = reversed(range(loop.extent))
            waiting += [step.replaced({loop: constant(number)}) for number in numbers]


def _sums_apart(steps: Iterable[Step], elements: Elements) -> frozenset[Tensor]:
    """The products and reductions that are not stored, but cannot be computed in the loops of their
    reader, because these need an element more than once or several elements together."""
    return frozenset(
        inner
        for step in steps
        if isinstance(step, Kernel)
        for inner, indices in _sums_inside(step, elements).items()
        if len(indices) != 1 or step.inner is not None or step.source.count != inner.count
    )


def _fused(steps: Iterable[Step], apart: frozenset[Tensor], elements: Elements) -> Iterator[Step]:
    """The steps. Those of `apart` get their own loops, right before they are read; each other
    product or reduction that is not stored is computed in the loops of its reader."""
    written: set[Tensor] = set()
    for step in steps:
        if isinstance(step, Kernel):
            for tensor in _read(step.value(elements)):
                if tensor in apart and tensor not in written:
                    written.add(tensor)
                    yield Kernel.of(tensor, tensor.variables(), tensor)
            # One at most, since `_stored` stores all others of a reader.
            for inner, (index,) in _sums_inside(step, elements).items():
                step = replace(step, inner=inner, inner_at=index)
        yield step


def _sums_inside(kernel: Kernel, elements: Elements) -> dict[Product | Reduction, list[Indices]]:
    """The products and reductions that a kernel reads and that are not stored, with the indices of
    the elements that it reads."""
    indices: dict[Product | Reduction, list[Indices]] = {}
    for read in _reads(kernel.value(elements)):
        if isinstance(read.tensor, Product | Reduction) and read.tensor not in elements.stored:
            indices.setdefault(read.tensor, []).append(read.index)
    return indices


def _with_linear_addresses(step: Step, elements: Elements) -> Step:
    """The step, with loops split until the addresses of a product's operands are linear in each
    loop variable. Some never are: after so many splits it stays as it is."""
    for _ in range(_MOST_SPLITS):
        if not isinstance(step, Kernel) or not isinstance(step.inner, Product):
            break
        cut = next(_cuts(_addresses(step.inner, step.inner_at, elements)), None)
        if cut is None:
            break
        step = step.split(*cut)
    return step


def _addresses(product: Product, index: Indices, elements: Elements) -> list[Index]:
    """The addresses of the operands' elements in their memory; none of an operand that is a
    number."""
    operands = product.operands(index, elements.at)
    return [value.tensor.address(value.index) for value in operands if isinstance(value, Read)]


def _cuts(indices: Iterable[Index]) -> Iterator[tuple[Variable, int]]:
    """Loops to split, each with the size of the inner loop, so that quotients become sums: with
    i = 4 * ia + ib and ib < 4, i // 4 is ia."""
    divided = (
        atom
        for index in indices
        for atom in index.atoms()
        if isinstance(atom, Quotient | Remainder)
    )
    for atom in divided:
        for loop, factor in atom.of.terms:
            if isinstance(loop, Variable) and factor and atom.by % factor == 0:
                size = atom.by // factor
                if 1 < size < loop.extent and loop.extent % size == 0:
                    yield loop, size


def _arena(steps: Sequence[Step], elements: Elements) -> tuple[dict[Tensor, int], int]:
    """The place of each stored tensor in the arena, and the arena's size, in slots (see `Plan`).
    Tensors that are needed at different times may share memory. The largest are placed first, since
    small ones fit into the gaps."""
    lives: dict[Tensor, range] = {}  # the steps from the first to the last that touches a tensor
    for number, step in enumerate(steps):
        for tensor in touched(step, elements):
            first = lives[tensor].start if tensor in lives else number
            lives[tensor] = range(first, number + 1)
    slots: dict[Tensor, range] = {}
    for tensor in sorted(lives, key=lambda tensor: (-room(tensor), lives[tensor].start)):
        taken = [slots[other] for other in slots if _overlap(lives[other], lives[tensor])]
        slots[tensor] = _first_gap(taken, room(tensor))
    places = {tensor: own.start for tensor, own in slots.items()}
    return places, max((own.stop for own in slots.values()), default=0)


def _first_gap(taken: Iterable[range], size: int) -> range:
    """The first `size` numbers in a row that none of the ranges has."""
    gap = range(size)
    for numbers in sorted(taken, key=lambda numbers: (numbers.start, numbers.stop)):
        if _overlap(numbers, gap):
            gap = range(numbers.stop, numbers.stop + size)
    return gap


def _overlap(one: range, other: range) -> bool:
    """True if two ranges have a number in common."""
    return one.start < other.stop and other.start < one.stop


def room(tensor: Tensor) -> int:
    """The number of slots of a tensor (see `Plan`). It is even, so that 8-byte elements begin at
    even places."""
    count = tensor.count * (2 if tensor.dtype in LONG else 1)
    return count + count % 2


def touched(step: Step, elements: Elements) -> list[Tensor]:
    """The tensors in the arena that a step reads or writes."""
    at = elements.at
    if isinstance(step, Kernel):
        tensors = [step.into, *_read(step.value(elements))]
        if isinstance(step.inner, Reduction):
            tensors += _read(step.inner.term(step.inner_at, at))
        elif isinstance(step.inner, Product):
            for operand in step.inner.operands(step.inner_at, at):
                tensors += _read(operand)
    else:
        tensors = [step, *_read(at(step.source, step.source.variables()))]
        if isinstance(step, Sorted):
            tensors.append(step.places)
        picks = step.picks if isinstance(step, Scattered) else ()
        for pick in picks:
            if isinstance(pick, Tensor):
                tensors += _read(at(pick, pick.variables()))
    return [tensor for tensor in tensors if tensor in elements.stored]


def _read(value: Value) -> list[Tensor]:
    """The tensors that an expression reads, once for each read."""
    return [read.tensor for read in _reads(value)]


def _reads(value: Value) -> list[Read]:
    """The reads in an expression, each once."""
    return [inner for inner in walk(value) if isinstance(inner, Read)]
