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
_LONGEST = 100  # the most functions in a chain
_MOST_SPLITS = 16  # the most times that loops of one product are split
_LOOPS = (Product, Reduction, Sorted, Leaves, Scan, Scattered)  # these have loops of their own
_NOT_INLINE = (*_LOOPS, Assembly)  # all others may be computed in the loops of their readers


@dataclass(frozen=True)
class PartOf:
    """The loops that write one part of an assembly, or the output number `number` into the argument
    `into`."""

    into: Tensor
    number: int


Reader: TypeAlias = "Tensor | PartOf"
"""A reader of a tensor that has its own loops."""


@dataclass(frozen=True)
class Kernel:
    """Loops that write elements of one tensor into the memory of another.

    For each step of the loops, the element of `source` at `index` is written into the element of
    `into` at `place`. Both are indices of the loop variables. `inner` is the product or reduction
    that is computed inside the loops, at `inner_at`, and whose sums the written expression reads
    from registers. It is None if the expression needs no such sum.
    """

    into: Tensor
    place: Indices
    source: Tensor
    index: Indices
    inner: Product | Reduction | None = None
    inner_at: Indices = ()

    @classmethod
    def of(cls, into: Tensor, place: Indices, source: Tensor) -> Kernel:
        """Return a kernel for all elements of `source`, with a loop for each of its dimensions.

        If `source` is a product or reduction that is itself stored, it becomes the `inner` of the
        kernel. For other tensors `_fuse_sums` looks later for a product or reduction inside.
        """
        index = source.variables()
        if isinstance(source, Product | Reduction) and source is into:
            return cls(into, place, source, index, inner=source, inner_at=index)
        return cls(into, place, source, index)

    def value(self, elements: Elements) -> Value:
        """The expression that the kernel writes into each element."""
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
        """Return the kernel with two nested loops in place of `loop`. The inner loop has `by`
        steps; the extent of `loop` must be a multiple of `by`."""
        outer, inner = variable(f"{loop.name}a", loop.extent // by), variable(f"{loop.name}b", by)
        return self.replaced({loop: outer * by + inner})

    def replaced(self, values: Mapping[Atom, Index]) -> Kernel:
        """Return the kernel with each variable (or other atom) in `values` replaced by its index,
        in all of the kernel's indices."""
        place, index, inner_at = (
            tuple(index.replaced(values) for index in indices)
            for indices in (self.place, self.index, self.inner_at)
        )
        return replace(self, place=place, index=index, inner_at=inner_at)


Step: TypeAlias = "Kernel | Sorted | Leaves | Scan | Scattered"
"""A step of a plan: a loop nest that writes elements (`Kernel`), a sort, the leaves that trees
reach, a cumulative sum or product (`Scan`), or a scatter."""

Store: TypeAlias = Literal["registers", "local", "shared"]
"""Where a GPU kernel keeps the intermediate values of a row: in registers, in the local memory of a
thread, or in the memory that the threads of a block share."""


@dataclass(frozen=True)
class Plan:
    """The steps in their order, and where each stored tensor lies in the arena.

    The arena is the memory for the intermediate values of a block of rows. `places` and `size` (of
    the whole arena) are counted in slots: a slot has 4 bytes for each row of a block.
    """

    program: Program
    elements: Elements
    steps: tuple[Step, ...]
    places: Mapping[Tensor, int]
    size: int

    @property
    def row_bytes(self) -> int:
        """The number of bytes that the arena has for each row of a block."""
        return 4 * self.size


def make_plan(program: Program) -> Plan:
    """Decide which tensors of a program are stored, which loops write them, and where they lie.

    Raises NotApplicableError if a chain of functions of items is too long, since items cannot be
    stored.
    """
    needed = tensors_in_memory(program) | _ends_of_long_chains(program)
    # Which loops read a tensor depends on which tensors are computed in registers, and the other
    # way round. So the readers are found twice: first with a guess, the tensors that read a sum
    # directly.
    readers = _Readers(program, needed, _readers_of_sums(program))
    readers = _Readers(program, needed, _tensors_in_registers(program, readers))
    stored = _tensors_to_store(program, readers)
    elements = Elements(stored)
    steps = list(_unroll_open_loops(_steps_of(program, stored), elements))
    own_loops = _sums_with_own_loops(steps, elements)
    elements = Elements(stored | own_loops)
    steps = [_split_until_linear(step, elements) for step in _fuse_sums(steps, own_loops, elements)]
    places, size = _place_in_arena(steps, elements)
    return Plan(program, elements, tuple(steps), places, size)


def tensors_in_memory(program: Program) -> frozenset[Tensor]:
    """The tensors that must lie in memory because of how they are read.

    These are operands of products, inputs of sorts and of trees, tensors that are read at an index
    which differs between rows, and columns of items side by side (`Beside`) over which a reduction
    or a scan runs. `Builder.storable` has made all but the last kind storable.
    """
    needed: set[Tensor] = set()
    # Tensors whose elements lie in several columns. The code must know which column an element is
    # read from, so that no loop can go over the columns.
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
    """The tensors to store so that no expression is a chain of more than _LONGEST functions.

    Raises NotApplicableError if one of them is computed for items, which cannot be stored.
    """
    ends: set[Tensor] = set()
    lengths: dict[Tensor, int] = {}
    for tensor in program:
        if isinstance(tensor, _NOT_INLINE) or is_index_of_sort(tensor):
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
    """Which loops read each tensor, directly or through tensors that are not stored.

    `needed` are the tensors that must lie in memory (see `tensors_in_memory`). `in_registers` are
    the products and reductions whose sums stay in registers, and the tensors computed there from
    such a sum. `repeated` are tensors that have an element which their reader may read more than
    once.
    """

    def __init__(
        self, program: Program, needed: frozenset[Tensor], in_registers: frozenset[Tensor]
    ) -> None:
        self.needed, self.in_registers = needed, in_registers
        self.by_tensor: dict[Tensor, set[Reader]] = defaultdict(set)
        self.repeated: set[Tensor] = set()
        for number, (argument, output) in enumerate(program.outputs):
            self.by_tensor[output].add(PartOf(argument, number))
        for tensor in reversed(program.tensors):  # readers first: a source gets those of its reader
            self._add_to_sources(tensor)

    def _add_to_sources(self, tensor: Tensor) -> None:
        """Record that the loops which compute the tensor's elements read its sources."""
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

    def is_shared(self, tensor: Tensor) -> bool:
        """True if several loops read the tensor, or one loop reads an element more than once."""
        return len(self.by_tensor[tensor]) > 1 or tensor in self.repeated

    def feeds_loops(self, tensor: Tensor) -> bool:
        """True if a product, a reduction, a sort or another tensor of `_LOOPS` reads the tensor."""
        return any(isinstance(reader, _LOOPS) for reader in self.by_tensor[tensor])

    def is_stored(self, tensor: Tensor) -> bool:
        """True if the tensor is stored although it could be computed in the loops of its readers:
        because it must lie in memory, or because computing it for each reader would cost more."""
        if not isinstance(tensor, Map | Gathered):
            return False
        if tensor in self.needed or (tensor in self.in_registers and self.feeds_loops(tensor)):
            return True
        is_expensive = tensor.cost > _CHEAP or tensor in self.in_registers
        return is_expensive and self.is_shared(tensor)


def _readers_of_sums(program: Program) -> frozenset[Tensor]:
    """The tensors that read a product or a reduction, directly or through views."""
    return frozenset(
        tensor
        for tensor in program
        if any(isinstance(source.root, Product | Reduction) for source in tensor.sources)
    )


def _tensors_in_registers(program: Program, readers: _Readers) -> frozenset[Tensor]:
    """The products and reductions whose sums are used while they are in registers, and all tensors
    that are computed there from such a sum."""
    in_registers: set[Tensor] = set()
    for tensor in program:
        if isinstance(tensor, Product | Reduction):
            stays = not readers.is_shared(tensor)
        elif isinstance(tensor, _NOT_INLINE) or in_registers.isdisjoint(tensor.sources):
            stays = False
        else:
            stays = not readers.is_stored(tensor)
        if stays:
            in_registers.add(tensor)
    return frozenset(in_registers)


def _tensors_to_store(program: Program, readers: _Readers) -> frozenset[Tensor]:
    """The tensors to store.

    Loops can compute only one product or reduction for their expression. So of all those that the
    same loops read, only the last in the program may stay unstored, and only if nothing else reads
    it.
    """
    stored: set[Tensor] = set()
    last_sum: dict[Reader, Tensor] = {}
    for tensor in program:
        if not isinstance(tensor, Product | Reduction):
            inline = not isinstance(tensor, _NOT_INLINE) and not is_index_of_sort(tensor)
            if not inline or readers.is_stored(tensor):
                stored.add(tensor)
        elif readers.is_shared(tensor) or readers.feeds_loops(tensor) or tensor in readers.needed:
            stored.add(tensor)
        else:
            for reader in readers.by_tensor[tensor]:
                if reader in last_sum:
                    stored.add(last_sum[reader])
                last_sum[reader] = tensor
    return frozenset(stored)


def is_index_of_sort(tensor: Tensor) -> bool:
    """True if the tensor holds the indices of a sort, which writes them together with its
    values."""
    return any(isinstance(source, Sorted) and source.places is tensor for source in tensor.sources)


def _steps_of(program: Program, stored: frozenset[Tensor]) -> Iterator[Step]:
    """The steps that write the stored tensors, in the order of the program, and then the outputs.

    Several steps write the same tensor if it is an assembly of parts, or the target of a scatter,
    which begins as a copy of its base.
    """
    for tensor in program:
        if isinstance(tensor, Assembly):
            for part in tensor.parts:
                yield Kernel.of(tensor, part.place(part.source.variables()), part.source)
        elif isinstance(tensor, Sorted | Leaves | Scan):
            yield tensor
        elif isinstance(tensor, Scattered):
            yield Kernel.of(tensor, tensor.variables(), tensor.base)
            yield tensor
        elif tensor in stored and not is_index_of_sort(tensor):
            yield Kernel.of(tensor, tensor.variables(), tensor)
    for argument, tensor in program.outputs:
        yield Kernel.of(argument, tensor.variables(), tensor)


def _unroll_open_loops(steps: Iterable[Step], elements: Elements) -> Iterator[Step]:
    """Yield the steps, with loops unrolled whose variable must be a constant (`Open` in the
    kernel's expression): there is then one kernel for each value of the variable."""
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
        else:  # reversed, since the last kernel of `waiting` is taken first
            numbers = reversed(range(loop.extent))
            waiting += [step.replaced({loop: constant(number)}) for number in numbers]


def _sums_with_own_loops(steps: Iterable[Step], elements: Elements) -> frozenset[Tensor]:
    """The products and reductions that need loops of their own although `_tensors_to_store` left
    them out: the kernel that reads them has another inner sum already, reads several of their
    elements in one step, or has another number of elements."""
    return frozenset(
        inner
        for step in steps
        if isinstance(step, Kernel)
        for inner, indices in _sums_inside(step, elements).items()
        if len(indices) != 1 or step.inner is not None or step.source.count != inner.count
    )


def _fuse_sums(
    steps: Iterable[Step], own_loops: frozenset[Tensor], elements: Elements
) -> Iterator[Step]:
    """Yield the steps with all products and reductions that are computed for them.

    Each tensor in `own_loops` gets a kernel of its own, right before the first step that reads it.
    Every other one that is not stored becomes the `inner` of the kernel that reads it.
    """
    written: set[Tensor] = set()
    for step in steps:
        if isinstance(step, Kernel):
            for tensor in _tensors_read(step.value(elements)):
                if tensor in own_loops and tensor not in written:
                    written.add(tensor)
                    yield Kernel.of(tensor, tensor.variables(), tensor)
            # At most one with one index, since `_tensors_to_store` stores all others of a reader.
            for inner, (index,) in _sums_inside(step, elements).items():
                step = replace(step, inner=inner, inner_at=index)
        yield step


def _sums_inside(kernel: Kernel, elements: Elements) -> dict[Product | Reduction, list[Indices]]:
    """The products and reductions that a kernel reads and that are not stored, each with the
    indices of the elements that it reads."""
    indices: dict[Product | Reduction, list[Indices]] = {}
    for read in _reads(kernel.value(elements)):
        if isinstance(read.tensor, Product | Reduction) and read.tensor not in elements.stored:
            indices.setdefault(read.tensor, []).append(read.index)
    return indices


def _split_until_linear(step: Step, elements: Elements) -> Step:
    """Split the loops of a product until the addresses of its operands are linear in every loop
    variable, and return the new step. Some addresses never become linear: after _MOST_SPLITS
    splits the step stays as it is. Steps without a product are returned unchanged."""
    for _ in range(_MOST_SPLITS):
        if not isinstance(step, Kernel) or not isinstance(step.inner, Product):
            break
        addresses = _operand_addresses(step.inner, step.inner_at, elements)
        loop_and_size = next(_possible_splits(addresses), None)
        if loop_and_size is None:
            break
        step = step.split(*loop_and_size)
    return step


def _operand_addresses(product: Product, index: Indices, elements: Elements) -> list[Index]:
    """The addresses of the elements that a product reads from its operands. An operand that is a
    number has no address and is left out."""
    operands = product.operands(index, elements.at)
    return [value.tensor.address(value.index) for value in operands if isinstance(value, Read)]


def _possible_splits(indices: Iterable[Index]) -> Iterator[tuple[Variable, int]]:
    """Yield loops to split, each with the number of steps of the inner loop, so that quotients and
    remainders become sums. For example, `i // 4` becomes `ia` by i = 4 * ia + ib with ib < 4."""
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


def _place_in_arena(steps: Sequence[Step], elements: Elements) -> tuple[dict[Tensor, int], int]:
    """Choose the place of each stored tensor in the arena. Returns the places and the arena's size,
    in slots (see `Plan`).

    Tensors that are needed at different times may share memory. The largest are placed first, since
    small ones fit into the gaps.
    """
    lives: dict[Tensor, range] = {}  # the steps from the first to the last that touches a tensor
    for number, step in enumerate(steps):
        for tensor in tensors_touched(step, elements):
            begin = lives[tensor].start if tensor in lives else number
            lives[tensor] = range(begin, number + 1)
    slots: dict[Tensor, range] = {}
    for tensor in sorted(lives, key=lambda tensor: (-slots_of(tensor), lives[tensor].start)):
        taken = [slots[other] for other in slots if _ranges_overlap(lives[other], lives[tensor])]
        slots[tensor] = _first_gap(taken, slots_of(tensor))
    places = {tensor: numbers.start for tensor, numbers in slots.items()}
    return places, max((numbers.stop for numbers in slots.values()), default=0)


def _first_gap(taken: Iterable[range], size: int) -> range:
    """The lowest range of `size` numbers that overlaps none of the ranges in `taken`:
    `([range(0, 4), range(6, 9)], 2) -> range(4, 6)`."""
    gap = range(size)
    for numbers in sorted(taken, key=lambda numbers: (numbers.start, numbers.stop)):
        if _ranges_overlap(numbers, gap):
            gap = range(numbers.stop, numbers.stop + size)
    return gap


def _ranges_overlap(one: range, other: range) -> bool:
    """True if two ranges have a number in common."""
    return one.start < other.stop and other.start < one.stop


def slots_of(tensor: Tensor) -> int:
    """The number of slots that a tensor takes (see `Plan`), rounded up to an even number, so that
    8-byte elements begin at even places."""
    slots = tensor.count * (2 if tensor.dtype in LONG else 1)
    return slots + slots % 2


def tensors_touched(step: Step, elements: Elements) -> list[Tensor]:
    """The stored tensors that a step reads or writes, which lie in the arena. One may occur
    twice."""
    at = elements.at
    if isinstance(step, Kernel):
        tensors = [step.into, *_tensors_read(step.value(elements))]
        if isinstance(step.inner, Reduction):
            tensors += _tensors_read(step.inner.term(step.inner_at, at))
        elif isinstance(step.inner, Product):
            for operand in step.inner.operands(step.inner_at, at):
                tensors += _tensors_read(operand)
    else:
        tensors = [step, *_tensors_read(at(step.source, step.source.variables()))]
        if isinstance(step, Sorted):
            tensors.append(step.places)
        picks = step.picks if isinstance(step, Scattered) else ()
        for pick in picks:
            if isinstance(pick, Tensor):
                tensors += _tensors_read(at(pick, pick.variables()))
    return [tensor for tensor in tensors if tensor in elements.stored]


def _tensors_read(value: Value) -> list[Tensor]:
    """The tensors that an expression reads. A tensor occurs once for each of its elements that is
    read."""
    return [read.tensor for read in _reads(value)]


def _reads(value: Value) -> list[Read]:
    """The different reads of elements in an expression."""
    return [inner for inner in walk(value) if isinstance(inner, Read)]
