"""Plans which tensors are stored in memory, which loops write them, and their place in the arena.

A value that is read only once is not stored but computed where it is needed. Operators that follow
a product or a reduction use each sum while it is in a register.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from engines.lanes.functions import LONG
from engines.lanes.index import Atom, Index, Indices, Quotient, Remainder, Variable
from engines.lanes.tensors import (
    Argument,
    Assembly,
    Constant,
    Gathered,
    Map,
    Product,
    Program,
    Reduction,
    Scan,
    Scattered,
    Sorted,
    Tensor,
    Unrolled,
    View,
)
from engines.lanes.values import Read, Value, walk

# A value of at most this cost is not stored but computed again for each reader.
_CHEAP = 2
_LOOPS = (Product, Reduction, Sorted, Scan, Scattered)


@dataclass(frozen=True)
class PartOf:
    """One of the loops that write an assembly, or the outputs."""

    into: Tensor
    number: int


Reader: TypeAlias = "Tensor | PartOf"
"""A reader of a tensor that has its own loops."""


@dataclass
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
        kernel = cls(into, place, source, source.variables())
        if isinstance(source, Product | Reduction) and source is into:
            kernel.inner, kernel.inner_at = source, kernel.index
        return kernel

    @property
    def value(self) -> Value:
        """The expression that is written."""
        whole = self.source is self.into
        return self.source.element(self.index) if whole else self.source.at(self.index)

    @property
    def loops(self) -> tuple[Variable, ...]:
        """The loops, outermost first, ordered so that addresses are written in ascending order."""
        found = {a for each in self.index for a in each.atoms() if isinstance(a, Variable)}
        address = self.into.address(self.place)
        return tuple(sorted(found, key=lambda v: (-(address.factor(v) or 0), v.name)))

    def split(self, variable: Variable, by: int) -> None:
        """Replace a loop by two; the inner one has `by` steps."""
        outer, inner = (
            Index(((Variable(f"{variable.name}{letter}", size), 1),)) if size > 1 else Index()
            for letter, size in (("a", variable.extent // by), ("b", by))
        )
        self._put({variable: outer * by + inner})

    def at(self, variable: Variable, value: int) -> Kernel:
        """The same kernel for one value of a variable."""
        made = replace(self)
        made._put({variable: Index((), value)})
        return made

    def _put(self, values: Mapping[Atom, Index]) -> None:
        self.place, self.index, self.inner_at = (
            tuple(each.replaced(values) for each in indices)
            for indices in (self.place, self.index, self.inner_at)
        )


Step: TypeAlias = "Kernel | Sorted | Scan | Scattered"


@dataclass
class Plan:
    """The steps in order, and the place of each stored tensor in the arena. Places and `size` count
    slots. A slot has 4 bytes for each row of a block."""

    program: Program
    steps: list[Step] = field(default_factory=list)
    places: dict[Tensor, int] = field(default_factory=dict)
    size: int = 0


def planned(program: Program) -> Plan:
    readers = _Readers(program, _next_to_sums(program))
    readers = _Readers(program, _unfinished(program, readers))
    _store(program, readers)
    plan = Plan(program)
    for tensor in program:
        plan.steps += _steps(tensor)
    for argument, found in program.outputs:
        plan.steps.append(Kernel.of(argument, found.variables(), found))
    plan.steps = _fused(_unrolled(plan.steps), program)
    plan.places, plan.size = _arena(plan.steps)
    return plan


class _Readers:
    """The loops that read each tensor, directly or through tensors that are not stored.

    `unfinished`: tensors that are computed from a sum of a product or reduction in its loops.
    """

    def __init__(self, program: Program, unfinished: frozenset[Tensor] = frozenset()) -> None:
        self.unfinished = unfinished
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
        """True if a product, reduction, sort, scan or scatter reads the tensor."""
        return any(isinstance(reader, _LOOPS) for reader in self.of[tensor])

    def kept(self, tensor: Tensor) -> bool:
        """True if the tensor, which could be computed in the loops of its readers, is stored."""
        if not isinstance(tensor, Map | Gathered):
            return False
        dear = tensor.cost > _CHEAP or tensor in self.unfinished
        finishes = tensor in self.unfinished and self.in_loops(tensor)
        return tensor.must_be_stored or (dear and self.shared(tensor)) or finishes


def _next_to_sums(program: Program) -> frozenset[Tensor]:
    """The tensors that read a product or a reduction, directly or through views."""
    found: set[Tensor] = set()
    for tensor in program:
        for source in tensor.sources:
            while isinstance(source, View):
                source = source.base
            found |= {tensor} if isinstance(source, Product | Reduction) else set()
    return frozenset(found)


def _unfinished(program: Program, readers: _Readers) -> frozenset[Tensor]:
    found: set[Tensor] = set()
    for tensor in program:
        if isinstance(tensor, Product | Reduction):
            found |= set() if readers.shared(tensor) else {tensor}
        elif not isinstance(tensor, (*_LOOPS, Assembly)) and not found.isdisjoint(tensor.sources):
            found |= set() if readers.kept(tensor) else {tensor}
    return frozenset(found)


def _store(program: Program, readers: _Readers) -> None:
    """Mark the tensors that are stored. A product or reduction is stored unless it can be computed
    in the loops of its reader."""
    last: dict[Reader, Tensor] = {}
    for tensor in program:
        if isinstance(tensor, Product | Reduction):
            alone = not readers.shared(tensor) and not readers.in_loops(tensor)
            tensor.stored = tensor.must_be_stored or not alone
            if not tensor.stored and readers.of[tensor]:
                (reader,) = readers.of[tensor]
                if reader in last:
                    last[reader].stored = True
                last[reader] = tensor
        elif isinstance(tensor, (*_LOOPS, Assembly)) or is_place(tensor):
            tensor.stored = True
        else:
            tensor.stored = readers.kept(tensor)
    program.forget()


def is_place(tensor: Tensor) -> bool:
    """True if the tensor holds the indices of a sort. The sort writes them with its values."""
    return any(isinstance(source, Sorted) and source.places is tensor for source in tensor.sources)


def _steps(tensor: Tensor) -> Iterator[Step]:
    if isinstance(tensor, Assembly):
        for part in tensor.parts:
            yield Kernel.of(tensor, part.place(part.source.variables()), part.source)
    elif isinstance(tensor, Sorted | Scan):
        yield tensor
    elif isinstance(tensor, Scattered):
        yield Kernel.of(tensor, tensor.variables(), tensor.base)
        yield tensor
    elif tensor.stored and not is_place(tensor):
        yield Kernel.of(tensor, tensor.variables(), tensor)


def _unrolled(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps, with one kernel for each value of a variable that has to be a constant."""
    waiting = list(steps)[::-1]
    while waiting:
        step = waiting.pop()
        try:
            if isinstance(step, Kernel) and step.inner is None:
                _ = step.value
            yield step
        except Unrolled as why:
            assert isinstance(step, Kernel)
            waiting += [step.at(why.variable, k) for k in reversed(range(why.variable.extent))]


def _fused(steps: Iterable[Step], program: Program) -> list[Step]:
    """The steps. A product or reduction that is not stored is computed in the loops of its reader.
    If that is not possible, it is stored and gets its own loops."""
    found: list[Step] = []
    for step in steps:
        for inner in _inside(step) if isinstance(step, Kernel) else ():
            assert isinstance(step, Kernel)
            if not _fuse(step, inner):
                inner.stored = True
                program.forget()
                found.append(Kernel.of(inner, inner.variables(), inner))
        found.append(step)
    for step in found:
        if isinstance(step, Kernel) and isinstance(step.inner, Product):
            _make_even(step)
    return found


def _inside(kernel: Kernel) -> list[Product | Reduction]:
    """The products and reductions that a kernel reads and that are not stored."""
    tensors = (v.tensor for v in walk(kernel.value) if isinstance(v, Read))
    found = dict.fromkeys(t for t in tensors if isinstance(t, Product | Reduction) and not t.stored)
    return list(found)


def _fuse(kernel: Kernel, inner: Product | Reduction) -> bool:
    """Compute `inner` inside the kernel, if its loops need each element once. True if done."""
    places = {v.index for v in walk(kernel.value) if isinstance(v, Read) and v.tensor is inner}
    if len(places) != 1 or kernel.inner is not None or kernel.source.count != inner.count:
        return False
    kernel.inner = inner
    (kernel.inner_at,) = places
    return True


def _make_even(kernel: Kernel) -> None:
    """Split loops until addresses are linear in each loop variable, as far as possible."""
    assert isinstance(kernel.inner, Product)
    for _ in range(16):
        cut = next(_cuts(addresses(kernel.inner, kernel.inner_at)), None)
        if cut is None:
            return
        kernel.split(*cut)


def addresses(product: Product, index: Indices) -> list[Index]:
    """The addresses of the operands' elements in their memory."""
    reads = [v for v in product.operands(index) if isinstance(v, Read)]
    return [read.tensor.address(read.index) for read in reads]


def _cuts(indices: Iterable[Index]) -> Iterator[tuple[Variable, int]]:
    """Variables to split, each with the size of the inner loop, so that quotients become sums."""
    for atom in (atom for each in indices for atom in each.atoms()):
        if not isinstance(atom, Quotient | Remainder):
            continue
        for inner, factor in atom.of.terms:
            by = atom.by // factor if factor and atom.by % factor == 0 else 0
            if isinstance(inner, Variable) and 1 < by < inner.extent and inner.extent % by == 0:
                yield inner, by


def _arena(steps: Sequence[Step]) -> tuple[dict[Tensor, int], int]:
    """The place of each stored tensor in the arena, and the arena's size, in slots (see `Plan`).
    Tensors that are needed at different times may share memory."""
    life: dict[Tensor, list[int]] = {}
    for number, step in enumerate(steps):
        for tensor in touched(step):
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


def touched(step: Step) -> list[Tensor]:
    """The tensors in the arena that a step reads or writes."""
    if isinstance(step, Kernel):
        tensors = [step.into, *_read(step.value)]
        if isinstance(step.inner, Reduction):
            tensors += _read(step.inner.term(step.inner_at, step.inner.steps()))
        elif isinstance(step.inner, Product):
            tensors += [t for value in step.inner.operands(step.inner_at) for t in _read(value)]
    else:
        tensors = [step, *_read(step.source.at(step.source.variables()))]
        tensors += [step.places] if isinstance(step, Sorted) else []
        for pick in step.picks if isinstance(step, Scattered) else ():
            tensors += _read(pick.at(pick.variables())) if isinstance(pick, Tensor) else []
    return [t for t in tensors if not isinstance(t, Argument | Constant) and t.stored]


def _read(value: Value) -> list[Tensor]:
    return [each.tensor for each in walk(value) if isinstance(each, Read)]
