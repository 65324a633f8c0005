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
from engines.lanes.index import Atom, Index, Indices, Quotient, Remainder, Variable, constant
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
_LOOPS = (Product, Reduction, Sorted, Leaves, Scan, Scattered)


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
        found = {a for each in self.index for a in each.atoms() if isinstance(a, Variable)}
        address = self.into.address(self.place)
        return tuple(sorted(found, key=lambda v: (-(address.factor(v) or 0), v.name)))

    def split(self, variable: Variable, by: int) -> Kernel:
        """The kernel with two loops in place of one; the inner one has `by` steps."""
        outer, inner = (
            Index(((Variable(f"{variable.name}{letter}", size), 1),)) if size > 1 else Index()
            for letter, size in (("a", variable.extent // by), ("b", by))
        )
        return self.replaced({variable: outer * by + inner})

    def replaced(self, values: Mapping[Atom, Index]) -> Kernel:
        """The kernel with `values` in place of variables."""
        place, index, inner_at = (
            tuple(each.replaced(values) for each in indices)
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
    needed = in_memory(program) | _long(program)
    readers = _Readers(program, needed, _next_to_sums(program))
    readers = _Readers(program, needed, _unfinished(program, readers))
    stored = _stored(program, readers)
    elements = Elements(stored)
    steps = list(_unrolled(_steps(program, stored), elements))
    apart = _apart(steps, elements)
    elements = Elements(stored | apart)
    steps = [_even(step, elements) for step in _fused(steps, apart, elements)]
    places, size = _arena(steps, elements)
    return Plan(program, elements, tuple(steps), places, size)


def in_memory(program: Program) -> frozenset[Tensor]:
    """The tensors that a reader needs in memory: operands of products, what is sorted or compared
    by trees, what is picked by an index of the row, and what a loop reads of several columns of
    items. For all but the last, `Builder.in_memory` has seen to it that they can be stored."""
    found: set[Tensor] = set()
    # Which column they read must be known for each element, so no loop can go over the columns.
    several: set[Tensor] = set()
    for tensor in program:
        inline = isinstance(tensor, View | Map | Gathered | Joined)
        if isinstance(tensor, Beside) or (inline and not several.isdisjoint(tensor.sources)):
            several.add(tensor)
        over_several = isinstance(tensor, Reduction | Scan) and tensor.source in several
        if isinstance(tensor, Product):
            found |= {tensor.left.root, tensor.right.root}
        elif isinstance(tensor, Sorted | Leaves) or over_several:
            found.add(tensor.sources[0].root)
        elif isinstance(tensor, Gathered) and UNKNOWN not in tensor.base.shape:
            found.add(tensor.base.root)
    return frozenset(each for each in found if not isinstance(each, Constant))


def _long(program: Program) -> frozenset[Tensor]:
    """Tensors to store so that no expression is a chain of more than _LONGEST functions."""
    found: set[Tensor] = set()
    lengths: dict[Tensor, int] = {}
    for tensor in program:
        if isinstance(tensor, (*_LOOPS, Assembly)) or is_place(tensor):
            continue
        length = max((lengths.get(source, 0) for source in tensor.sources), default=0)
        lengths[tensor] = length if isinstance(tensor, View) else length + 1
        if lengths[tensor] < _LONGEST or not isinstance(tensor, Map | Gathered):
            continue
        if UNKNOWN in tensor.shape:
            raise NotApplicableError(
                f"{tensor.line} ends a chain of {_LONGEST} functions of items, which are not stored"
            )
        found.add(tensor)
        lengths[tensor] = 0
    return frozenset(found)


class _Readers:
    """The loops that read each tensor, directly or through tensors that are not stored.

    `needed`: see `in_memory`. `unfinished`: tensors that are computed from a sum of a product or
    reduction in its loops.
    """

    def __init__(
        self, program: Program, needed: frozenset[Tensor], unfinished: frozenset[Tensor]
    ) -> None:
        self.needed, self.unfinished = needed, unfinished
        self.of: dict[Tensor, set[Reader]] = defaultdict(set)
        self.often: set[Tensor] = set()
        for number, (argument, found) in enumerate(program.outputs):
            self.of[found].add(PartOf(argument, number))
        for tensor in reversed(program.tensors):
            self._pass_on(tensor)

    def _pass_on(self, tensor: Tensor) -> None:
        if isinstance(tensor, Assembly):
            for number, part in enumerate(tensor.parts):
                self.of[part.source].add(PartOf(tensor, number))
            return
        inline = not isinstance(tensor, _LOOPS) and not self.kept(tensor)
        readers: set[Reader] = self.of[tensor] if inline else {tensor}
        often = inline and tensor in self.often
        often = often or (isinstance(tensor, View) and tensor.repeats)
        for source in tensor.sources:
            self.of[source] |= readers
            if often:
                self.often.add(source)

    def shared(self, tensor: Tensor) -> bool:
        return len(self.of[tensor]) > 1 or tensor in self.often

    def in_loops(self, tensor: Tensor) -> bool:
        """True if a tensor with loops of its own reads the tensor."""
        return any(isinstance(reader, _LOOPS) for reader in self.of[tensor])

    def kept(self, tensor: Tensor) -> bool:
        """True if the tensor, which could be computed in the loops of its readers, is stored."""
        if not isinstance(tensor, Map | Gathered):
            return False
        dear = tensor.cost > _CHEAP or tensor in self.unfinished
        finishes = tensor in self.unfinished and self.in_loops(tensor)
        return tensor in self.needed or (dear and self.shared(tensor)) or finishes


def _next_to_sums(program: Program) -> frozenset[Tensor]:
    """The tensors that read a product or a reduction, directly or through views."""
    found: set[Tensor] = set()
    for tensor in program:
        if any(isinstance(source.root, Product | Reduction) for source in tensor.sources):
            found.add(tensor)
    return frozenset(found)


def _unfinished(program: Program, readers: _Readers) -> frozenset[Tensor]:
    found: set[Tensor] = set()
    for tensor in program:
        if isinstance(tensor, Product | Reduction):
            found |= set() if readers.shared(tensor) else {tensor}
        elif not isinstance(tensor, (*_LOOPS, Assembly)) and not found.isdisjoint(tensor.sources):
            found |= set() if readers.kept(tensor) else {tensor}
    return frozenset(found)


def _stored(program: Program, readers: _Readers) -> frozenset[Tensor]:
    """The tensors to store. A product or reduction is stored unless it is the last one that is read
    by the loops of its only reader: these may compute it."""
    found: set[Tensor] = set()
    last: dict[Reader, Tensor] = {}
    for tensor in program:
        if not isinstance(tensor, Product | Reduction):
            if isinstance(tensor, (*_LOOPS, Assembly)) or is_place(tensor) or readers.kept(tensor):
                found.add(tensor)
        elif readers.shared(tensor) or readers.in_loops(tensor) or tensor in readers.needed:
            found.add(tensor)
        else:
            for reader in readers.of[tensor]:
                if reader in last:
                    found.add(last[reader])
                last[reader] = tensor
    return frozenset(found)


def is_place(tensor: Tensor) -> bool:
    """True if the tensor holds the indices of a sort. The sort writes them with its values."""
    return any(isinstance(source, Sorted) and source.places is tensor for source in tensor.sources)


def _steps(program: Program, stored: frozenset[Tensor]) -> Iterator[Step]:
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
        value = step.value(elements)
        variable = next((each.variable for each in walk(value) if isinstance(each, Open)), None)
        if variable is None:
            yield step
        else:
            last = variable.extent - 1
            waiting += [step.replaced({variable: constant(last - k)}) for k in range(last + 1)]


def _apart(steps: Iterable[Step], elements: Elements) -> frozenset[Tensor]:
    """The products and reductions that are not stored, but cannot be computed in the loops of their
    reader, because these need an element more than once or several elements together."""
    return frozenset(
        inner
        for step in steps
        if isinstance(step, Kernel)
        for inner, places in _inside(step, elements).items()
        if len(places) != 1 or step.inner is not None or step.source.count != inner.count
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
            for inner, (place, *_) in _inside(step, elements).items():
                step = replace(step, inner=inner, inner_at=place)
        yield step


def _inside(kernel: Kernel, elements: Elements) -> dict[Product | Reduction, list[Indices]]:
    """The products and reductions that a kernel reads and that are not stored, with the indices of
    the elements that it reads."""
    found: dict[Product | Reduction, list[Indices]] = {}
    for read in _reads(kernel.value(elements)):
        if isinstance(read.tensor, Product | Reduction) and read.tensor not in elements.stored:
            found.setdefault(read.tensor, []).append(read.index)
    return found


def _even(step: Step, elements: Elements) -> Step:
    """The step, with loops split until addresses are linear in each loop variable, as far as
    possible."""
    for _ in range(16):
        if not isinstance(step, Kernel) or not isinstance(step.inner, Product):
            break
        cut = next(_cuts(addresses(step.inner, step.inner_at, elements)), None)
        if cut is None:
            break
        step = step.split(*cut)
    return step


def addresses(product: Product, index: Indices, elements: Elements) -> list[Index]:
    """The addresses of the operands' elements in their memory."""
    reads = [v for v in product.operands(index, elements.at) if isinstance(v, Read)]
    return [read.tensor.address(read.index) for read in reads]


def _cuts(indices: Iterable[Index]) -> Iterator[tuple[Variable, int]]:
    """Variables to split, each with the size of the inner loop, so that quotients become sums."""
    divided = (
        atom
        for index in indices
        for atom in index.atoms()
        if isinstance(atom, Quotient | Remainder)
    )
    for atom in divided:
        for variable, factor in atom.of.terms:
            if isinstance(variable, Variable) and factor and atom.by % factor == 0:
                size = atom.by // factor
                if 1 < size < variable.extent and variable.extent % size == 0:
                    yield variable, size


def _arena(steps: Sequence[Step], elements: Elements) -> tuple[dict[Tensor, int], int]:
    """The place of each stored tensor in the arena, and the arena's size, in slots (see `Plan`).
    Tensors that are needed at different times may share memory."""
    life: dict[Tensor, list[int]] = {}
    for number, step in enumerate(steps):
        for tensor in touched(step, elements):
            life.setdefault(tensor, [number, number])[1] = number
    placed: list[tuple[int, int, Tensor]] = []
    for tensor in sorted(life, key=lambda t: (-room(t), life[t][0])):
        begin, end = life[tensor]
        at = 0
        for low, high, other in sorted(placed, key=lambda p: p[:2]):
            together = life[other][0] <= end and begin <= life[other][1]
            if together and at < high and low < at + room(tensor):
                at = high
        placed.append((at, at + room(tensor), tensor))
    places = {tensor: low for low, _, tensor in placed}
    return places, max((high for _, high, _ in placed), default=0)


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
            tensors += [t for value in step.inner.operands(step.inner_at, at) for t in _read(value)]
    else:
        tensors = [step, *_read(at(step.source, step.source.variables()))]
        tensors += [step.places] if isinstance(step, Sorted) else []
        for pick in step.picks if isinstance(step, Scattered) else ():
            tensors += _read(at(pick, pick.variables())) if isinstance(pick, Tensor) else []
    return [t for t in tensors if t in elements.stored]


def _read(value: Value) -> list[Tensor]:
    return [each.tensor for each in _reads(value)]


def _reads(value: Value) -> list[Read]:
    return [each for each in walk(value) if isinstance(each, Read)]
