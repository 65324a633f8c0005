"""What Tab completes in a shell: the models, versions and aliases of the registry.

Nothing is said about a registry that is not there or answers slowly: Tab then completes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, add_completion_class

from soa.errors import SoaPipelineError

_WAIT_S = 2.0
_BREAKS = re.compile("[@:=]+")


@add_completion_class
class _Bash(BashComplete):
    """bash passes `jets@production` as three words, and replaces only the end, from the `@` on. It
    also divides words at `:` and `=`, and replaces what follows them."""

    _kept = ""
    """What bash leaves of the incomplete word."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the incomplete one, and that one, put together again."""
        args, last = super().get_completion_args()
        *others, whole = _joined([*args, last])
        if whole != last or _breaks(last):
            self._kept = _left_by_bash(whole)
        return others, whole

    def format_completion(self, item: CompletionItem) -> str:
        """The completion without what bash leaves as it is."""
        item.value = item.value.removeprefix(self._kept)
        return super().format_completion(item)


def _breaks(word: str) -> bool:
    """True if bash made a word of the marks at which it divides."""
    return _BREAKS.fullmatch(word) is not None


def _joined(parts: list[str]) -> list[str]:
    """The words before bash divided them: `jets`, `@`, `prod` is `jets@prod`."""
    words: list[str] = []
    for number, part in enumerate(parts):
        divided = _breaks(part) or (number > 0 and _breaks(parts[number - 1]))
        if words and divided:
            words[-1] += part
        else:
            words.append(part)
    return words


def _left_by_bash(word: str) -> str:
    """The beginning that bash does not replace: `jets` of `jets@prod`, `--to=` of `--to=stag`."""
    last = max(word.rfind(mark) for mark in "@:=")
    if last < 0:
        return word
    return word[:last] if word[last] == "@" else word[: last + 1]


@add_completion_class
class _Fish(FishComplete):
    """click's script for fish ends a description at its first comma."""

    source_template = FishComplete.source_template.replace("string split ", "string split -m 1 ")


def refs(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """The REFs that begin so: names, and the aliases and versions of the only model that fits. For
    a path: folders."""
    if begun.startswith((".", "~", "/")):
        return [CompletionItem(begun, type="dir")]
    matches = _completions_in_time(context, begun)
    if not matches and "/" in begun:
        return [CompletionItem(begun, type="dir")]
    return [CompletionItem(each) for each in matches]


def names(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """The names of models that begin so."""
    completions = _completions_in_time(context, begun)
    return [CompletionItem(each) for each in completions if not re.search("[@/]", each)]


def _completions_in_time(context: click.Context, begun: str) -> list[str]:
    """The words that complete `begun`, as far as the registry answers within `_WAIT_S`."""
    completions: list[str] = []

    def ask() -> None:
        with suppress(SoaPipelineError, OSError):
            completions.extend(_completions(context.params.get("registry_uri"), begun))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_S)
    return list(completions)  # a copy: the thread may still add to it


def _completions(uri: str | None, begun: str) -> Iterator[str]:
    """Model names that begin so, then aliases and versions: of the only model that fits, else of
    the one that is typed in full."""
    from registry.store import Registry

    registry = Registry(uri)
    name = re.split("[@/]", begun)[0]
    models = [model for model in registry.list() if model.name.startswith(name)]
    yield from (model.name for model in models if model.name.startswith(begun))
    if len(models) > 1 or name != begun:
        models = [model for model in models if model.name == name]
    for model in models:
        aliases = (f"{model.name}@{alias}" for alias in sorted(model.aliases))
        numbers = (version.ref for version in reversed(registry.versions(model.name)))
        yield from (each for each in (*aliases, *numbers) if each.startswith(begun))
