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
_MOST_ITEMS = 1 << 40  # of a collection: so few that no sum of such numbers wraps around
_FULL_WIDTH = ("bool", "int32", "int64")  # the arithmetic in functions.h has 32 or 64 bits


T = TypeVar("T", bound=Tensor)


class NotKnown(Exception):
    """There is no code for an operator, or for its arguments. Its text names what has no code, and
    becomes part of the error that the user sees."""


class Builder:
    """Adds tensors to a program.

    `line` and `operator` are those of the model that the tensors added next come from.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.program = Program(self.values)
        self.line, self.operator = "", ""
        self.counts: dict[Any, int] = {}
        """The index of each jagged collection, by torch's symbol for its number of items."""

    def count_of(self, size: Any) -> Value | None:
        """The value of a size of torch: a number, or a symbol that stands for the number of items
        of a collection. None if no collection has this symbol."""
        if isinstance(size, int):
            return self.values.literal(size, "int64")
        collection = self.counts.get(size.node.expr)
        if collection is None:
            return None
        number = self.values.literal(collection, "int64")
        return self.values.call("items", number, dtype="int64", bounds=(0, _MOST_ITEMS))

    def add(self, tensor: T) -> T:
        """Appends a tensor to the program, and returns it. Its sources must be there already."""
        tensor.line, tensor.operator = self.line, self.operator
        self.program.tensors.append(tensor)
        return tensor

    def as_tensor(self, argument: Any, dtype: str | None = None) -> Tensor:
        """Returns an operator's argument as a Tensor of the program, cast to `dtype` if that is
        given. The argument may be a tensor of torch (weights), a number, a Value, or a Tensor."""
        if isinstance(argument, Tensor):
            tensor: Tensor = argument
        elif isinstance(argument, torch.Tensor):
            data = argument if dtype is None else argument.to(getattr(torch, dtype))
            tensor = self.add(Constant(self.values, data))
        elif isinstance(argument, Value):
            tensor = self.add(Uniform(self.values, (), argument))
        else:
            dtype = dtype or dtype_of(argument)
            if dtype in HALF or dtype in RANGES:  # as torch does: -3 is 253 as an uint8
                argument = torch.tensor(argument).to(getattr(torch, dtype)).item()
            tensor = self.add(Uniform(self.values, (), self.values.literal(argument, dtype)))
        return tensor if dtype is None else self.cast(tensor, dtype)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """Returns the tensor converted to a dtype; the tensor itself if it has that dtype."""
        if tensor.dtype == dtype:
            return tensor
        converted = Map(self.values, dtype, lambda x: self.cast_value(x, dtype), [tensor], cost=1)
        if converted.bounds is not None and tensor.bounds is not None:
            (low, high), (least, most) = converted.bounds, tensor.bounds
            if low <= least and most <= high:  # no number wraps around
                converted.bounds = tensor.bounds
        return self.add(converted)

    def cast_value(self, value: Value, dtype: str) -> Value:
        """Returns a value converted to a dtype as torch does it: floats become integers by rounding
        towards zero; all else becomes the nearest number."""
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
        cast_to: str | None = None,
    ) -> Tensor:
        """Adds the results of one of `FUNCTIONS`, element by element, as a tensor.

        The arguments are first expanded to `shape`, and cast to the dtype `cast_to`; None means
        that of the result, `dtype`. Raises NotKnown if the function has no code for `cast_to`.
        """
        cast_to = cast_to or dtype
        cost, carriers = FUNCTIONS[function].cost, FUNCTIONS[function].carriers
        if carrier(cast_to) not in carriers:
            raise NotKnown(f"{function} of {cast_to}")
        sources = [self.expand(self.as_tensor(argument, cast_to), shape) for argument in arguments]

        def call(*values: Value) -> Value:
            return self.round_value(self.values.call(function, *values, dtype=dtype))

        return self.add(Map(self.values, dtype, call, sources, cost))

    def round_sums(self, sums: Tensor) -> Tensor:
        """Returns sums or products rounded to their dtype, if they were computed in a wider type.
        The function "same" changes nothing, but `map` rounds what it gives."""
        return self.map("same", [sums], sums.shape, sums.dtype) if _is_narrow(sums.dtype) else sums

    def round_value(self, value: Value) -> Value:
        """Returns the value rounded to its dtype if functions.h computed it in a wider type, else
        the value itself. Integers wrap around."""
        if not _is_narrow(value.dtype):
            return value
        return self.values.call(f"rounded_{value.dtype}", value, dtype=value.dtype)

    def view(self, base: Tensor, shape: Sequence[int], where: Callable[[Indices], Indices]) -> View:
        """Adds a view of this shape. `where` gives the index of an element in `base` from its index
        in the view."""
        return self.add(View(base, tuple(shape), where))

    def expand(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Returns a view that broadcasts the tensor to a shape by torch's rules; the tensor itself
        if it has this shape."""
        if tensor.shape == tuple(shape):
            return tensor
        if isinstance(tensor.root, Argument):
            tensor = self.copy(tensor)  # which is stored if it is converted and read often
        lacking, sizes = len(shape) - len(tensor.shape), tensor.shape
        is_whole = [own == wide for own, wide in zip(sizes, shape[lacking:], strict=True)]

        def where(index: Indices) -> Indices:
            own_dims = zip(index[lacking:], is_whole, strict=True)
            return tuple(i if whole else constant(0) for i, whole in own_dims)

        return self.view(tensor, shape, where)

    def copy(self, tensor: Tensor) -> Tensor:
        """Adds a copy of a tensor. The plan can store the copy even if the tensor itself is a view
        or an argument."""
        copied = self.add(Map(self.values, tensor.dtype, lambda x: x, [tensor], cost=0))
        copied.bounds = tensor.bounds
        return copied

    def storable(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a copy of it, such that the plan can store its elements at
        addresses that are linear in each index. Some readers need it (see
        `plan.tensors_in_memory`)."""
        base, index = tensor, tensor.variables()
        while isinstance(base, View):
            index = base.where(index)
            base = base.base
        if isinstance(base, Argument | Constant | Uniform) or not is_linear(index):
            return self.copy(tensor)
        return tensor


def _is_narrow(dtype: str) -> bool:
    """True if functions.h computes numbers of this dtype in a wider type."""
    return dtype in HALF or (dtype in RANGES and dtype not in _FULL_WIDTH)


def dtype_of(number: Any) -> str:
    """The dtype that torch gives to a Python number: bool, int64 or float32."""
    return {bool: "bool", int: "int64"}.get(type(number), "float32")
