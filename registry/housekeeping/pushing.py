"""Push: the folder of a bundle, as `pull` makes it, into a registry.

Names and promotions of the registry that it came from count for nothing here: the version is new,
has no alias, and no gate has let it pass. Its tag `origin` keeps what is known of where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from registry import stamp
from registry.bundle import SIGNATURE, Bundle, open_folder, read_note
from registry.errors import RegistryError
from registry.mlflow import models
from registry.ref import Ref
from registry.store import Registry, artifacts
from registry.version import DIGEST, ORIGIN, Version
from soa.options import known_options


@dataclass(frozen=True)
class Pushed:
    """The version that has the files now. `new`: it was made for them."""

    version: Version
    new: bool
    added: tuple[str, ...]
    """Targets built later that a version which was there got from the folder."""
    kept: tuple[str, ...]
    """Those that it had, from another build: they stay."""
    signature: Literal["none", "carried", "kept"]
    """"kept": the version had another one, which stays."""


@known_options()
def push(
    registry: Registry,
    folder: str | Path,
    name: str | None = None,
    *,
    origin: Mapping[str, str] | None = None,
) -> Pushed:
    """A new version of `name` (else of the name in the manifest) with the folder's bundle, its
    annexes and its signature, whole or not at all; or the version that has this digest already,
    which gets what it lacks.

    Without a name, a version of any other model that has the digest counts too. Every digest is
    checked. `origin`: what is known of where it comes from; else what the folder's note says.
    """
    whole = open_folder(folder, verify=False)
    annexes = tuple(whole.annexes.values())
    version = _known(registry, whole, name)
    new = False
    if version is None:
        text = json.dumps(_origin(whole, origin), sort_keys=True)
        version = registry.register(whole, name, annexes, origin=text)
        new = version.tags.get(ORIGIN) == text
    else:
        whole.verify()
    added, kept = [], []
    for annex in annexes:
        if annex.target not in version.annexes:
            version = registry.add_target(version, annex)
            added.append(annex.target)
        elif version.annexes[annex.target] != annex.digest:
            kept.append(annex.target)
    signature: Literal["none", "carried", "kept"] = "none"
    if (ours := whole.signature()) is not None:
        theirs = artifacts.signature_of(registry, version)
        if theirs is None:
            artifacts.publish_signature(registry, version, whole.path / SIGNATURE)
        signature = "carried" if theirs in (None, ours) else "kept"
    return Pushed(version, new, tuple(added), tuple(kept), signature)


def _known(registry: Registry, bundle: Bundle, name: str | None) -> Version | None:
    if not registry.exists:
        return None
    with registry.client() as client:
        found = models.all_pages(client.search_model_versions, f"tags.{DIGEST} = '{bundle.digest}'")
    first = Ref(name or bundle.manifest.name).name
    places = [(str(v.name), int(v.version)) for v in found if name is None or v.name == name]
    places.sort(key=lambda place: (place[0] != first, place))
    return registry.find(Ref(*places[0])) if places else None


def _origin(bundle: Bundle, known: Mapping[str, str] | None) -> dict[str, str]:
    found = {"pushed_by": stamp.user_at_host(), "pushed_at": stamp.now()}
    note = read_note(bundle.path)
    if known is not None or note is None:
        return found | dict(known or {})
    if note.digest != bundle.digest:
        raise RegistryError(
            f"{bundle.path}: its note of promotion is of another bundle ({note.ref}, "
            f"{note.digest[:12]}…): pull it again, or remove the note"
        )
    return found | {"version": note.ref, "promoted_by": note.by, "promoted_at": note.at}
