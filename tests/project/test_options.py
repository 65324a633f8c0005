"""Options of `load` that do not exist are refused in one line, which names the nearest option."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

import pipeline
import runtime
from runtime.opening import Opening, Options
from soa import SoaPipelineError
from soa.errors import OptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mod": "test"}, "load has no option 'mod': did you mean 'mode'?"),
        ({"trusted_key": []}, "load has no option 'trusted_key': did you mean 'trusted_keys'?"),
        ({"Registry": None}, "load has no option 'Registry': did you mean 'registry'?"),
        ({"foo": 1}, "load has no option 'foo': it has: ref, device, mode, "),
    ],
)
@pytest.mark.parametrize("load", [pipeline.load, runtime.load])
def test_a_mistyped_option_is_refused_in_one_line(
    load: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        load("jets@production", **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_refusal_is_also_a_type_error() -> None:
    """As Python raises for a parameter that does not exist."""
    assert issubclass(OptionError, SoaPipelineError)
    assert issubclass(OptionError, TypeError)


@pytest.mark.parametrize("load", [pipeline.load, runtime.load])
def test_the_signature_names_each_option(load: Any) -> None:
    parameters = inspect.signature(load).parameters
    assert inspect.Parameter.VAR_KEYWORD not in {
        parameter.kind for parameter in parameters.values()
    }
    assert {field.name for field in fields(Opening)} <= {*parameters}


def test_type_checkers_know_the_same_options() -> None:
    options = {"ref", "mode", *Options.__annotations__}
    assert options == {field.name for field in fields(Opening)}
