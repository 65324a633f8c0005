"""Kinds of values that the keys of a config have, and what each of its parts is made from."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from engines.errors import TargetError
from engines.target import Target
from pipeline.config.wording import shown
from soa.layout import IDENTIFIER

T = TypeVar("T")


def _identifier(name: str) -> str:
    if not IDENTIFIER.fullmatch(name):
        raise ValueError(
            f"found {shown(name)}; allowed: letters, digits and '_', not a digit first"
        )
    return name


def _target(name: str) -> str:
    try:
        Target.parse(name)
    except TargetError as error:
        raise ValueError(str(error)) from None
    return name


def once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"found {twice[0]!r} a second time; each name once")
    return names


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"found {list(pair)}; expected [low, high]")
    return pair


Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[str, AfterValidator(_identifier)]
TargetName = Annotated[str, AfterValidator(_target)]
# `strict` below would refuse a YAML list for a tuple; what is in it stays strict.
Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]
Shape = Listed[PositiveInt]
Pair = Annotated[tuple[Number, Number], Field(strict=False), AfterValidator(_in_order)]


class Part(BaseModel):
    """Strict: `"64"` and `true` are no numbers, and a key that nobody reads is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
