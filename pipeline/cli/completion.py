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
_BREAKS = re.compile("[@:=]+")  # where bash divides words


@add_completion_class
class _Bash(BashComplete):
    """bash passes `jets@production` as three words, and replaces only the end, from the `@` on. It
    also divides words at `:` and `=`, and replaces what follows them."""

    _kept = ""
    """What bash leaves of the incomplete word."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words before the incomplete one, and the incomplete one, as they were before
        bash divided them. Stores in `_kept` what bash leaves of the incomplete one."""
        args, last_part = super().get_completion_args()
        *others, incomplete = _join_words([*args, last_part])
        if incomplete != last_part or _is_break(last_part):
            self._kept = _find_kept_part(incomplete)
        return others, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the completion without the part that bash leaves as it is."""
        item.value = item.value.removeprefix(self._kept)
        return super().format_completion(item)


def _is_break(word: str) -> bool:
    """True if the word consists of marks at which bash divides words."""
    return _BREAKS.fullmatch(word) is not None


def _join_words(parts: list[str]) -> list[str]:
    """Returns the words before bash divided them: `jets`, `@`, `prod` -> `jets@prod`."""
    words: list[str] = []
    for i, part in enumerate(parts):
        was_divided = _is_break(part) or (i > 0 and _is_break(parts[i - 1]))
        if words and was_divided:
            words[-1] += part
        else:
            words.append(part)
    return words


def _find_kept_part(word: str) -> str:
    """Returns the beginning that bash does not replace: `jets@prod` -> `jets`, and `--to=stag` ->
    `--to=`."""
    last_mark = max(word.rfind(mark) for mark in "@:=")
    if last_mark < 0:
        return word
    return word[:last_mark] if word[last_mark] == "@" else word[: last_mark + 1]


@add_completion_class
class _Fish(FishComplete):
    """Shows whole descriptions in fish, where click's script cuts them off at the first comma."""

    source_template = FishComplete.source_template.replace("string split ", "string split -m 1 ")


def complete_refs(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete a REF that begins with `begun`: to names of models, and if only one fits, to its
    aliases and versions too. The shell completes paths of folders."""
    if begun.startswith((".", "~", "/")):
        return [CompletionItem(begun, type="dir")]
    matches = _complete_in_time(context, begun)
    if not matches and "/" in begun:
        return [CompletionItem(begun, type="dir")]
    return [CompletionItem(match) for match in matches]


def complete_names(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a model that begins with `begun`."""
    matches = _complete_in_time(context, begun)
    return [CompletionItem(match) for match in matches if not re.search("[@/]", match)]


def _complete_in_time(context: click.Context, begun: str) -> list[str]:
    """Returns the words that complete `begun`, as far as the registry gives them in `_WAIT_S`. A
    registry that cannot be read gives none."""
    completions: list[str] = []

    def ask() -> None:
        with suppress(SoaPipelineError, OSError):
            completions.extend(_complete(context.params.get("registry_uri"), begun))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_S)
    return list(completions)  # a copy: the thread may still add to it


def _complete(uri: str | None, begun: str) -> Iterator[str]:
    """Yields the names of models that begin with `begun`, then the aliases and versions of one
    model: of the only one that fits, else of the one whose name is complete. Raises RegistryError.
    """
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
