"""Options that are not there: refused by every public function, in one line with the nearest."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

import pipeline
import runtime
from runtime.opening import Opening, Options
from soa import SoaPipelineError
from soa.errors import OptionError
from soa_pipeline import PACKAGES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mod": "test"}, "load has no option 'mod': did you mean 'mode'?"),
        ({"trusted_key": []}, "load has no option 'trusted_key': did you mean 'trusted_keys'?"),
        ({"Registry": None}, "load has no option 'Registry': did you mean 'registry'?"),
        ({"foo": 1}, "load has no option 'foo': it has: ref, device, mode, "),
    ],
)
@pytest.mark.parametrize("load", [pipeline.load, runtime.load])
def test_a_typo_is_no_option(load: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        load("jets@production", **given)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert isinstance(caught.value, SoaPipelineError) and isinstance(caught.value, TypeError)


def functions() -> list[Any]:
    """Of the face of every package."""
    faces = [import_module(name) for name in PACKAGES]
    named = [(face.__name__, name) for face in faces for name in getattr(face, "__all__", ())]
    found = [pytest.param(getattr(import_module(f), n), id=f"{f}.{n}") for f, n in named]
    return [each for each in found if inspect.isfunction(each.values[0])]


@pytest.mark.parametrize("function", functions())
def test_every_public_function(function: Any) -> None:
    with pytest.raises(OptionError, match=f"{function.__name__} has no option 'no_such_option'"):
        function(no_such_option=1)
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds  # `help` names each


def test_type_checkers_know_the_same_options() -> None:
    said = {"ref", "mode", *Options.__annotations__}
    assert said == {field.name for field in fields(Opening)}
