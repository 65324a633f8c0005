"""No lowering swallows an argument: what it does not read has no effect, or is refused."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.lanes.operators import LOWERINGS
from engines.lanes.operators.registry import NO_EFFECT, bind_arguments
from engines.lanes.tensor_builder import NotKnown


def overloads(name: str) -> Iterator[Any]:
    """The overloads of an operator that return new tensors."""
    for space in (torch.ops.aten, torch.ops.prims, torch.ops.soa_pipeline):
        packet = getattr(space, name, None)
        for overload in packet.overloads() if packet else ():
            target = getattr(packet, overload)
            schema = target._schema
            returns_tensors = all("Tensor" in str(value.type) for value in schema.returns)
            writes = schema.is_mutable or any(argument.is_out for argument in schema.arguments)
            if returns_tensors and not writes:
                yield target


def without_effect(name: str, argument: str) -> bool:
    """Whether the argument changes no number, so that the lowering may leave it out."""
    return argument in NO_EFFECT or f"{name}.{argument}" in NO_EFFECT


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_argument_is_taken_or_refused(name: str) -> None:
    """An overload is refused by NotKnown; at least one must be lowered."""
    targets = list(overloads(name))
    assert targets, "no operator has this name"
    lowered = 0
    for target in targets:
        values = {argument.name: object() for argument in target._schema.arguments}
        read = {value for argument, value in values.items() if not without_effect(name, argument)}
        try:
            positional, named = bind_arguments(name, target, list(values.values()), {})
        except NotKnown:
            continue
        lowered += 1
        assert {*positional, *named.values()} == read, target
        # Raises TypeError if the lowering does not take them, after the builder and the operator.
        inspect.signature(LOWERINGS[name]).bind(None, None, *positional, **named)
    assert lowered, "no overload is lowered"


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_parameter_is_read(name: str) -> None:
    """In the function's byte code: a parameter that it does not load has no effect."""
    function = LOWERINGS[name]
    parameters = list(inspect.signature(function).parameters.values())[2:]
    loaded = {code.argval for code in dis.get_instructions(function) if "LOAD" in code.opname}
    for parameter in parameters:
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert parameter.name in loaded, parameter


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_default_is_that_of_torch(name: str) -> None:
    parameters = inspect.signature(LOWERINGS[name]).parameters
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters.values()
        if parameter.kind is not parameter.POSITIONAL_ONLY
        and parameter.default is not parameter.empty
    }
    for target in overloads(name):
        for argument in target._schema.arguments if target.namespace == "aten" else ():
            if argument.name in defaults and argument.default_value is not None:
                own = defaults[argument.name]
                assert same_default(own, argument.default_value), (target, argument.name)


def same_default(own: Any, default: Any) -> bool:
    """True if two defaults mean the same: torch writes `(0,)` as [0, 0] for two dimensions."""
    if isinstance(default, list):
        return default in ([], [*own] * max(len(default), 1)) if own else default == []
    return bool(own == default)


def test_a_name_without_effect_is_one_of_torch() -> None:
    targets = [target for name in LOWERINGS for target in overloads(name)]
    of_torch = {argument.name for target in targets for argument in target._schema.arguments}
    assert {entry.rpartition(".")[2] for entry in NO_EFFECT} <= of_torch


def test_an_operator_whose_argument_has_no_effect_is_lowered() -> None:
    """An entry is the name of an argument, or of an operator and its argument."""
    assert {entry.partition(".")[0] for entry in NO_EFFECT if "." in entry} <= set(LOWERINGS)
