"""No lowering swallows an argument: what it does not read has no effect, or is refused."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.lanes.operators import LOWERINGS
from engines.lanes.operators.registry import NO_EFFECT, arguments
from engines.lanes.tensor_builder import NotKnown


def overloads(name: str) -> Iterator[Any]:
    """The overloads of an operator that return new tensors."""
    for space in (torch.ops.aten, torch.ops.prims, torch.ops.soa_pipeline):
        packet = getattr(space, name, None)
        for overload in packet.overloads() if packet else ():
            target = getattr(packet, overload)
            schema = target._schema
            tensors = all("Tensor" in str(each.type) for each in schema.returns)
            if tensors and not schema.is_mutable and not any(a.is_out for a in schema.arguments):
                yield target


def harmless(name: str, argument: str) -> bool:
    return argument in NO_EFFECT or f"{name}.{argument}" in NO_EFFECT


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_argument_is_taken_or_refused(name: str) -> None:
    found = list(overloads(name))
    assert found, "no operator has this name"
    taken = 0
    for target in found:
        given = {each.name: object() for each in target._schema.arguments}
        read = {value for each, value in given.items() if not harmless(name, each)}
        try:
            positional, named = arguments(name, target, list(given.values()), {})
        except NotKnown:
            continue
        taken += 1
        assert {*positional, *named.values()} == read, target
        inspect.signature(LOWERINGS[name]).bind(None, None, *positional, **named)
    assert taken, "no overload is lowered"


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_parameter_is_read_and_has_the_default_of_torch(name: str) -> None:
    function = LOWERINGS[name]
    parameters = list(inspect.signature(function).parameters.values())[2:]
    loaded = {each.argval for each in dis.get_instructions(function) if "LOAD" in each.opname}
    for parameter in parameters:
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert parameter.name in loaded, parameter
    for target in overloads(name):
        for argument in target._schema.arguments:
            own = inspect.signature(function).parameters.get(argument.name)
            if own is None or own.kind is own.POSITIONAL_ONLY or own.default is own.empty:
                continue
            if target.namespace == "aten" and argument.default_value is not None:
                assert same(own.default, argument.default_value), (target, argument.name)


def same(own: Any, default: Any) -> bool:
    """True if two defaults mean the same: torch writes `(0,)` as [0, 0] for two dimensions."""
    if isinstance(default, list):
        return default in ([], [*own] * max(len(default), 1)) if own else default == []
    return bool(own == default)


def test_a_name_without_effect_is_one_of_torch() -> None:
    every = {
        each.name for name in LOWERINGS for t in overloads(name) for each in t._schema.arguments
    }
    assert {each.rpartition(".")[2] for each in NO_EFFECT} <= every
    assert {each.partition(".")[0] for each in NO_EFFECT if "." in each} <= set(LOWERINGS)
