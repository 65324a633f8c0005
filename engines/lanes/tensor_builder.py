"""Building blocks of operators: tensors from numbers and weights, casts, maps, views, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from engines.lanes.functions import FUNCTIONS, RANGES, carrier
from engines.lanes.index import Indices, constant, is_linear
from engines.lanes.tensors import Argument, Constant, Map, Program, Uniform, View
from engines.lanes.values import Call, Literal, Shape, Tensor, Value, Values

HALF = ("float16", "bfloat16")
_MOST_ITEMS = 1 << 40  # of a collection, so that no sum of such numbers wraps around
_FULL_WIDTH = ("bool", "int32", "int64")  # the arithmetic in functions.h has 32 or 64 bits


T = TypeVar("T", bound=Tensor)


class NotKnown(Exception):
    """There is no code for an operator, or for its arguments. The text is used in an error."""


class Builder:
    """Adds tensors to a program. `line`, `operator`: those of the model from which they come."""

    def __init__(self) -> None:
        self.values = Values()
        self.program = Program(self.values)
        self.line, self.operator = "", ""
        self.counts: dict[Any, int] = {}
        """For each jagged collection: the symbol of its number of items, and its index."""

    def count_of(self, size: Any) -> Value | None:
        """The number of items of a collection, given by torch's symbol, or a known number. None if
        no collection has this symbol."""
        if isinstance(size, int):
            return self.values.literal(size, "int64")
        collection = self.counts.get(size.node.expr)
        if collection is None:
            return None
        place = self.values.literal(collection, "int64")
        return self.values.call("items", place, dtype="int64", bounds=(0, _MOST_ITEMS))

    def add(self, tensor: T) -> T:
        """Appends a tensor to the program; its sources must be there already. Returns it."""
        tensor.line, tensor.operator = self.line, self.operator
        self.program.tensors.append(tensor)
        return tensor

    def tensor(self, argument: Any, dtype: str | None = None) -> Tensor:
        """Weights, a number, a Value or a Tensor as a Tensor. Cast to `dtype` if it is given."""
        if isinstance(argument, Tensor):
            tensor: Tensor = argument
        elif isinstance(argument, torch.Tensor):
            data = argument if dtype is None else argument.to(getattr(torch, dtype))
            tensor = self.add(Constant(self.values, data))
        elif isinstance(argument, Value):
            tensor = self.add(Uniform(self.values, (), argument))
        else:
            dtype = dtype or dtype_of(argument)
            if dtype in HALF:
                argument = torch.tensor(argument).to(getattr(torch, dtype)).item()
            tensor = self.add(Uniform(self.values, (), self.values.literal(argument, dtype)))
        return tensor if dtype is None else self.cast(tensor, dtype)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor with another dtype; itself if it has this one."""
        if tensor.dtype == dtype:
            return tensor
        converted = Map(self.values, dtype, lambda x: self.cast_value(x, dtype), [tensor], 1)
        if converted.bounds is not None and tensor.bounds is not None:
            (low, high), (least, most) = converted.bounds, tensor.bounds
            if low <= least and most <= high:  # no number wraps around
                converted.bounds = tensor.bounds
        return self.add(converted)

    def cast_value(self, value: Value, dtype: str) -> Value:
        """Converts as torch does: to integers towards zero, else to the nearest number."""
        if value.dtype == dtype:
            return value
        if isinstance(value, Call) and value.function == "to_float32":
            (narrow,) = value.arguments  # float32 holds each number of 16 bits
            if narrow.dtype == dtype in HALF:
                return narrow
        if isinstance(value, Literal):
            converted = torch.tensor(value.number).to(getattr(torch, dtype)).item()
            return self.values.literal(converted, dtype)
        return self.values.call(f"to_{dtype}", value, dtype=dtype, bounds=value.bounds)

    def map(
        self,
        function: str,
        arguments: Sequence[Any],
        shape: Shape,
        dtype: str,
        of: str | None = None,
    ) -> Tensor:
        """Apply one of `FUNCTIONS` to arguments that are cast to `of` (default: `dtype`) and
        expanded to `shape`. NotKnown if it has no code for this dtype."""
        of = of or dtype
        cost, carriers = FUNCTIONS[function].cost, FUNCTIONS[function].carriers
        if carrier(of) not in carriers:
            raise NotKnown(f"{function} of {of}")
        sources = [self.expand(self.tensor(argument, of), shape) for argument in arguments]

        def call(*values: Value) -> Value:
            return self.rounded(self.values.call(function, *values, dtype=dtype))

        return self.add(Map(self.values, dtype, call, sources, cost))

    def total(self, sums: Tensor) -> Tensor:
        """Sums or products, rounded to their dtype."""
        return self.map("same", [sums], sums.shape, sums.dtype) if _narrow(sums.dtype) else sums

    def rounded(self, value: Value) -> Value:
        """The value rounded to its dtype, if functions.h computes in a wider type."""
        if not _narrow(value.dtype):
            return value
        return self.values.call(f"rounded_{value.dtype}", value, dtype=value.dtype)

    def view(self, base: Tensor, shape: Sequence[int], where: Callable[[Indices], Indices]) -> View:
        """A view of this shape. `where`: the index in `base`, from that in the view."""
        return self.add(View(base, tuple(shape), where))

    def expand(self, tensor: Tensor, shape: Shape) -> Tensor:
        """A view with the given shape, by torch's rules of broadcasting."""
        if tensor.shape == tuple(shape):
            return tensor
        if isinstance(tensor.root, Argument):
            tensor = self.copy(tensor)  # which is stored if it is converted and read often
        lacking, sizes = len(shape) - len(tensor.shape), tensor.shape
        is_same = [own == wide for own, wide in zip(sizes, shape[lacking:], strict=True)]

        def where(index: Indices) -> Indices:
            own = zip(index[lacking:], is_same, strict=True)
            return tuple(place if same else constant(0) for place, same in own)

        return self.view(tensor, shape, where)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy, which the plan can store though the tensor itself is a view or an argument."""
        copied = self.add(Map(self.values, tensor.dtype, lambda x: x, [tensor], 0))
        copied.bounds = tensor.bounds
        return copied

    def in_memory(self, tensor: Tensor) -> Tensor:
        """The tensor or a copy, for a reader that needs it in memory (see `plan.in_memory`) so that
        an element's address is linear in each index."""
        base, index = tensor, tensor.variables()
        while isinstance(base, View):
            index = base.where(index)
            base = base.base
        if isinstance(base, Argument | Constant | Uniform) or not is_linear(index):
            return self.copy(tensor)
        return tensor


def _narrow(dtype: str) -> bool:
    """True if functions.h computes in a wider type."""
    return dtype in HALF or (dtype in RANGES and dtype not in _FULL_WIDTH)


def dtype_of(number: Any) -> str:
    """The dtype that torch gives to a Python number."""
    return {bool: "bool", int: "int64"}.get(type(number), "float32")
