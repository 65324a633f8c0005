"""Random programs of the operators, compiled by `lanes` and compared with eager torch.

    python -m tests.engines.lanes.programs --programs 3000

A program starts from numbers that float32 holds exactly (quarters), with some NaN and infinities.
Discontinuous operators (comparisons, floor, sorting) are applied only to numbers that are still
exact, so rounding alone never makes two right answers differ. `--integers` makes programs of
integers of any size and of bools instead, whose answers must be equal. `--seed` repeats a run; a
program that fails is printed with its seed and its steps.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.engines.lanes.harness import MOST, Function, compiled

F = torch.nn.functional
_LARGEST = 240  # elements of a row, at most, after a step
_RELATIVE = 1e-4  # allowed error, relative to the largest number of an output


@dataclass(frozen=True)
class Example:
    """The example value of one tensor of the program, and whether its numbers are exact."""

    value: Tensor
    exact: bool


def _gelu(x: Tensor) -> Tensor:
    """Without oneDNN, whose gelu of infinity is NaN on processors with AVX-512."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of TF32 on GPUs of Intel
        with torch.backends.mkldnn.flags(enabled=False):
            return F.gelu(x)


Apply = Callable[..., Tensor]


@dataclass
class Program:
    """A model of steps, each a function of earlier tensors, by their places: 0 is the first input,
    1 the second, 2 the result of the first step. `titles`: of the steps. `dtype`: of the answer."""

    seed: int
    steps: list[tuple[Apply, tuple[int, ...]]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32

    def __call__(self, *inputs: Tensor) -> Tensor:
        tensors = [*inputs]
        for step, places in self.steps:
            tensors.append(step(*(tensors[place] for place in places)))
        last = tensors[-1].to(self.dtype)
        return last.flatten(1) if last.dim() > 1 else last


UNARY_EXACT: dict[str, Apply] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "half": lambda a: a * 0.5,
    "plus": lambda a: 1 - a,
    "floor": torch.floor,
    "round": torch.round,
    "clamp": lambda a: a.clamp(-2, 3),
    "positive": lambda a: (a > 0).float(),
    "missing": lambda a: torch.where(a.isnan(), 1.0, a),
}
UNARY: dict[str, Apply] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda a: torch.exp(a.clamp(-4, 4)),
    "log1p": lambda a: torch.log1p(a.abs()),
    "sqrt": lambda a: torch.sqrt(a.abs() + 1),
    "atan": torch.atan,
    "erf": torch.erf,
    "silu": F.silu,
    "gelu": _gelu,
    "softplus": F.softplus,
}
BINARY_EXACT: dict[str, Apply] = {
    "add": torch.add,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a * 2, b),
    "equal": lambda a, b: (a == b).float(),
}
BINARY: dict[str, Apply] = {
    "mul": lambda a, b: a * b.clamp(-3, 3),
    "div": lambda a, b: a / (1 + b.abs()),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 1),
}


class _Writer:
    """Draws the steps of one program."""

    def __init__(self, seed: int, examples: Sequence[Tensor]) -> None:
        self.draw = random.Random(seed)
        self.program = Program(seed)
        self.tensors = [Example(value, True) for value in examples]

    def write(self, steps: int) -> Program:
        """A program of this many steps."""
        kinds = (self.unary, self.binary, self.view, self.reduce, self.select, self.product)
        while len(self.program.steps) < steps:
            self.draw.choices(kinds, (4, 4, 5, 3, 3, 2))[0]()
        return self.program

    def add(self, title: str, step: Apply, places: tuple[int, ...], exact: bool) -> None:
        """Adds a step, unless its result has too many elements or no row dimension."""
        with torch.no_grad():
            value = step(*(self.tensors[place].value for place in places))
        if value[0].numel() > _LARGEST or value.dim() < 2:
            return
        self.program.steps.append((step, places))
        self.program.titles.append(f"{title}{list(places)} -> {list(value.shape[1:])}")
        exact = exact and all(self.tensors[place].exact for place in places)
        self.tensors.append(Example(value, exact))

    def fit(self, exact: bool) -> list[int]:
        """The places of tensors that are not indices. `exact`: of those with exact numbers."""
        return [
            place
            for place, tensor in enumerate(self.tensors)
            if place != 1 and (tensor.exact or not exact)
        ]

    def place(self, exact: bool = False, dims: int = 1) -> int | None:
        """The place of one of the last tensors that are not indices, with more dimensions."""
        fit = [place for place in self.fit(exact) if self.tensors[place].value.dim() > dims]
        return self.draw.choice(fit[-4:]) if fit else None

    def unary(self) -> None:
        """Adds a function of one tensor."""
        exact = self.draw.random() < 0.5
        title, step = self.draw.choice(list((UNARY_EXACT if exact else UNARY).items()))
        place = self.place(exact)
        if place is not None:
            self.add(title, step, (place,), exact)

    def binary(self) -> None:
        """Adds a function of two tensors of one shape."""
        exact = self.draw.random() < 0.5
        title, step = self.draw.choice(list((BINARY_EXACT if exact else BINARY).items()))
        first = self.place(exact)
        if first is None:
            return
        shape = self.tensors[first].value.shape
        fit = [place for place in self.fit(exact) if self.tensors[place].value.shape == shape]
        self.add(title, step, (first, self.draw.choice(fit)), exact)

    def view(self) -> None:
        """Adds a function that moves, repeats or leaves out elements."""
        place = self.place()
        assert place is not None
        shape = self.tensors[place].value.shape[1:]
        dim = self.draw.randrange(len(shape)) + 1
        size, count = shape[dim - 1], math.prod(shape)
        divisor = self.draw.choice([d for d in range(1, count + 1) if count % d == 0])
        order = [0, *(d + 1 for d in self.draw.sample(range(len(shape)), len(shape)))]
        first = self.draw.randrange(size)
        choices: dict[str, Apply] = {
            "permute": lambda a: a.permute(order),
            "reshape": lambda a: a.reshape(a.shape[0], divisor, count // divisor),
            "slice": lambda a: a.narrow(dim, first, size - first),
            "steps": lambda a: a.transpose(0, dim)[::2].transpose(0, dim),
            "flip": lambda a: a.flip(dim),
            "roll": lambda a: a.roll(first + 1, dim),
            "cat": lambda a: torch.cat([a, a.narrow(dim, 0, first + 1)], dim),
            "stack": lambda a: torch.stack([a, a * 2], dim),
            "pad": lambda a: F.pad(a, (1, 2), value=0.5),
            "repeat": lambda a: a.repeat_interleave(2, dim=dim),
            "expand": lambda a: a.unsqueeze(dim).expand(
                -1, *shape[: dim - 1], 2, *shape[dim - 1 :]
            ),
        }
        title = self.draw.choice(list(choices))
        self.add(title, choices[title], (place,), True)

    def reduce(self) -> None:
        """Adds a function along one dimension."""
        exact = self.draw.random() < 0.6
        place = self.place(exact, 1 if self.draw.random() < 0.3 else 2)
        if place is None:
            return
        dims = self.tensors[place].value.dim()
        dim, keep = self.draw.randrange(1, dims), dims == 2
        kept_exact: dict[str, Apply] = {
            "sum": lambda a: a.sum(dim, keepdim=keep),
            "amax": lambda a: a.amax(dim, keepdim=True).expand_as(a),
            "amin": lambda a: a.amin(dim, keepdim=keep),
            "cumsum": lambda a: a.cumsum(dim),
            "sort": lambda a: a.sort(dim).values,
            "topk": lambda a: a.topk((a.shape[dim] + 1) // 2, dim, largest=False).values,
            "argmax": lambda a: a.argmax(dim, keepdim=keep).float(),
            "order": lambda a: torch.sort(a, dim=dim, stable=True).indices.float(),
            "any": lambda a: (a > 1).any(dim, keepdim=keep).float(),
        }
        rounded: dict[str, Apply] = {
            "mean": lambda a: a.mean(dim, keepdim=keep),
            "softmax": lambda a: a.softmax(dim),
            "log softmax": lambda a: a.log_softmax(dim),
            "norm": lambda a: F.normalize(a, dim=dim, eps=1.0),
            "logsumexp": lambda a: a.logsumexp(dim, keepdim=keep),
        }
        choices = kept_exact if exact else rounded
        title = self.draw.choice(list(choices))
        self.add(title, choices[title], (place,), exact)

    def select(self) -> None:
        """Adds a function that reads or writes elements at indices."""
        place = self.place()
        assert place is not None
        shape = self.tensors[place].value.shape
        dim = self.draw.randrange(1, len(shape))
        size = shape[dim]
        some = torch.tensor([self.draw.randrange(size) for _ in range(3)])
        table = torch.arange(10.0).reshape(5, 2)
        choices: dict[str, tuple[Apply, tuple[int, ...]]] = {
            "index_select": (lambda a: a.index_select(dim, some), (place,)),
            "index_add": (lambda a: a.index_add(dim, some, a.narrow(dim, 0, 1).expand(
                *(-1 if d != dim else 3 for d in range(a.dim())))), (place,)),
            "embedding": (lambda i: F.embedding(i, table), (1,)),
            "gather": (lambda a, i: a.flatten(1).gather(1, i % math.prod(a.shape[1:])), (place, 1)),
            "scatter_add": (lambda a, i: torch.zeros_like(a).flatten(1).scatter_add(
                1, i % math.prod(a.shape[1:]), i.float()), (place, 1)),
            "compare": (lambda i: (i.unsqueeze(1) == i.unsqueeze(2)).float(), (1,)),
        }  # fmt: skip
        title = self.draw.choice(list(choices))
        step, places = choices[title]
        self.add(title, step, places, True)

    def product(self) -> None:
        """Adds a product of matrices, a convolution or a pool."""
        place = self.place()
        assert place is not None
        shape = self.tensors[place].value.shape
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        weights = torch.randn(5, shape[-1], generator=generator) / math.sqrt(shape[-1])
        choices: dict[str, Apply] = {"linear": lambda a: F.linear(a, weights)}
        if len(shape) == 3:
            kernel = torch.randn(4, shape[1], 3, generator=generator) / math.sqrt(3 * shape[1])
            choices["conv"] = lambda a: F.conv1d(a, kernel, padding=1)
            choices["pairs"] = lambda a: torch.tanh(a) @ torch.tanh(a).transpose(1, 2)
            choices["pool"] = lambda a: F.max_pool1d(a, 2, ceil_mode=True)
        title = self.draw.choice(list(choices))
        self.add(title, choices[title], (place,), False)


_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _divisor(b: Tensor) -> Tensor:
    """Another number in place of 0, and of -1: torch ends with a signal at -2^63 / -1."""
    zero = b == 0
    return torch.where(zero if b.dtype == torch.bool else zero | (~b == 0), torch.ones_like(b), b)


def _shifted(a: Tensor, left: Tensor | int, right: Tensor | int) -> Tensor:
    """Shifted to the left, and to the right. torch shifts no bools."""
    number = a.to(torch.int8) if a.dtype == torch.bool else a
    return (number << left) + (number >> right)


OF_INTEGER: dict[str, Apply] = {
    **{f"to {dtype}": lambda a, dtype=dtype: a.to(dtype) for dtype in (*_INTEGERS, torch.bool)},
    "neg": torch.neg,
    "abs": torch.abs,
    "not": torch.bitwise_not,
    "sign": torch.sign,
    "square": torch.square,
    "cube": lambda a: a**3,
    "shifts": lambda a: _shifted(a, 3, 2),
    "quotient": lambda a: a // 7,
    "negative quotient": lambda a: a // -3,
    "remainder": lambda a: a % 5,
    "negative remainder": lambda a: a % -9,
    "fmod": lambda a: torch.fmod(a, 6),
    "clamp": lambda a: a.clamp(-7, 90),
    "from 3": lambda a: 3 - a,
    "of 100": lambda a: 100 // _divisor(a),
    "above": lambda a: a > 3,
    "below": lambda a: a < 300,
    "some": lambda a: a != 0,
    "sum": lambda a: a.sum(1, keepdim=True),
    "cumsum": lambda a: a.cumsum(1),
    "prod": lambda a: a.prod(1, keepdim=True),
    "largest": lambda a: a.amax(1, keepdim=True),
    "least": lambda a: a.amin(1, keepdim=True),
    "where the largest is": lambda a: a.max(1, keepdim=True).indices,
    "where the least is": lambda a: a.min(1, keepdim=True).indices,
    "sort": lambda a: a.sort(1).values,
    "order": lambda a: torch.sort(a, dim=1, stable=True).indices,
    "any": lambda a: a.any(1, keepdim=True),
    "all": lambda a: a.all(1, keepdim=True),
    "flip": lambda a: a.flip(1),
    "hash": lambda a: (a * 40503 + 17) % 100,
    "one hot": lambda a: F.one_hot(a[:, 0].long() & 3, 4),
    "pick": lambda a: a.gather(1, (a.long() & 1).clamp(0, a.shape[1] - 1)),
}
OF_INTEGERS: dict[str, Apply] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "floor": lambda a, b: torch.div(a, _divisor(b), rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, _divisor(b), rounding_mode="trunc"),
    "remainder": lambda a, b: torch.remainder(a, _divisor(b)),
    "fmod": lambda a, b: torch.fmod(a, _divisor(b)),
    "less": torch.lt,
    "equal": torch.eq,
    "where": lambda a, b: torch.where(a > b, a, b),
    "fill": lambda a, b: a.masked_fill(b.bool(), 5),
    "shift": lambda a, b: _shifted(a, b.to(a.dtype) & 7, b & 7),
    "logical": torch.logical_xor,
    "cat": lambda a, b: torch.cat([a[:, :1], b[:, :1]], 1),
}


def integer_program(seed: int, steps: int, inputs: Sequence[Tensor]) -> Program:
    """A program of integers and bools. Steps that torch refuses are left out."""
    draw, program, tensors = random.Random(seed), Program(seed, dtype=torch.int64), [*inputs]
    while len(program.steps) < steps:
        count = draw.choice((1, 2))
        title, step = draw.choice(list((OF_INTEGER, OF_INTEGERS)[count - 1].items()))
        places = tuple(draw.randrange(len(tensors)) for _ in range(count))
        try:
            value = step(*(tensors[place] for place in places))
        except (RuntimeError, NotImplementedError):
            continue
        if value.dim() == 2 and value.dtype in (*_INTEGERS, torch.bool):
            tensors.append(value)
            program.steps.append((step, places))
            program.titles.append(f"{title}{list(places)} -> {value.dtype}")
    return program


def integer_examples(seed: int) -> list[Tensor]:
    """Three inputs of a dtype each: numbers of any size, small ones, and the limits."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(3):
        dtype = draw.choice(_INTEGERS)
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        ends = torch.tensor([low, low + 1, high - 1, high])
        kinds = [
            torch.randint(low, high, (MOST, 3), generator=generator),
            torch.randint(-9, 10, (MOST, 3), generator=generator),
            ends[torch.randint(0, 4, (MOST, 3), generator=generator)],
        ]
        kind = torch.randint(0, 3, (1, MOST, 3), generator=generator)
        inputs.append(torch.stack(kinds).gather(0, kind)[0].to(dtype))
    return inputs


def examples(seed: int) -> list[Tensor]:
    """Two inputs: quarters, with NaN and infinities in the last rows, and small integers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-12, 13, (MOST, 5, 4), generator=generator) / 4
    for row, value in zip(range(-6, 0), (math.nan, math.inf, -math.inf) * 2, strict=True):
        x[row, row % 5, :: 1 + row % 2] = value
    return [x, torch.randint(0, 5, (MOST, 6), generator=generator)]


def agrees(answers: Tensor, wanted: Tensor) -> bool:
    """Whether all numbers are equal up to rounding, and NaN and infinities the same."""
    same = (answers == wanted) | (answers.isnan() & wanted.isnan())
    largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    off = (answers - wanted).abs().nan_to_num(math.inf)
    return bool((same | (off <= _RELATIVE * (1 + largest))).all())


def wrong_programs(
    seeds: range, steps: int = 10, device: str = "cpu", integers: bool = False
) -> Iterator[Program]:
    """Compiles a program for each seed, all in one library; those that differ from eager torch."""
    inputs = integer_examples(seeds.start) if integers else examples(seeds.start)
    programs = [
        integer_program(seed, steps, inputs) if integers else _Writer(seed, inputs).write(steps)
        for seed in seeds
    ]
    # One output for all: torch.export takes longer for an output than for a program.
    together = {"y": lambda *rows: torch.cat([_columns(p(*rows)) for p in programs], 1)}
    library = compiled(Function(together), inputs, list(together), device)
    for n in (MOST, 3):
        rows = [values[:n] for values in inputs]
        wanted = [_columns(program(*rows)) for program in programs]
        parts = library(*rows)["y"].split([answer.shape[1] for answer in wanted], 1)
        for program, part, answer in zip(programs, parts, wanted, strict=True):
            right = torch.equal(part, answer) if integers else agrees(part, answer)
            if not right:
                yield program


def _columns(answer: Tensor) -> Tensor:
    """A program's answer as (rows, columns)."""
    return answer if answer.dim() > 1 else answer.unsqueeze(1)


def main() -> None:
    """Tries programs, and prints those that are wrong; the status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=12, help="of each program")
    parser.add_argument("--together", type=int, default=20, help="programs in one library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="or cuda:0")
    parser.add_argument("--integers", action="store_true", help="of integers of any size")
    options = parser.parse_args()
    begun, failed = time.monotonic(), 0
    for first in range(options.seed, options.seed + options.programs, options.together):
        seeds = range(first, first + options.together)
        for program in wrong_programs(seeds, options.steps, options.device, options.integers):
            failed += 1
            print(f"program {program.seed}: " + "; ".join(program.titles), flush=True)
        if sys.stderr.isatty():
            print(f"\r{first + options.together - options.seed}", end="", file=sys.stderr)
    print(f"{options.programs} programs, {failed} wrong, {time.monotonic() - begun:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
