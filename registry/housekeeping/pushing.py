"""Push: copy the folder of a bundle, as `pull` makes it, into a registry.

Aliases and promotions of the original registry are not taken over: the version is new, has no
alias, and was never promoted. Its tag `origin` records what is known about the original.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from registry import stamp
from registry.bundle import SIGNATURE, Bundle, open_folder, read_note
from registry.errors import RegistryError
from registry.mlflow import fetch_all_pages
from registry.ref import NAME_PATTERN, Ref
from registry.store import Registry, bundle_files
from registry.version import DIGEST, ORIGIN, Version


@dataclass(frozen=True)
class Pushed:
    """The result of a push: the version that has the files. `new`: the push created it."""

    version: Version
    new: bool
    added: tuple[str, ...]
    """Targets whose annexes were added to a version that already existed."""
    kept: tuple[str, ...]
    """Targets for which the version already had another annex, which it keeps."""
    signature: Literal["none", "carried", "kept"]
    """"carried": the version has the folder's signature; "kept": it keeps another one."""


def push(
    registry: Registry,
    folder: str | Path,
    name: str | None = None,
    *,
    origin: Mapping[str, str] | None = None,
) -> Pushed:
    """Make a version with the folder's bundle, annexes and signature, completely or not at all.

    If a version already has this digest, only add the annexes and the signature that it lacks.
    `name`: the model; by default the one that the manifest names. Without `name`, an existing
    version of any other model is accepted too. Every digest is checked. `origin`: content of the
    tag `origin`; by default it is taken from the note in the folder.
    """
    bundle = open_folder(folder, verify=False)
    annexes = tuple(bundle.annexes.values())
    version = _find_version(registry, bundle, name)
    new = False
    if version is None:
        text = json.dumps(_describe_origin(bundle, origin), sort_keys=True)
        version = registry.register(bundle, name, annexes, origin=text)
        new = version.tags.get(ORIGIN) == text  # else another process registered it meanwhile
    else:
        bundle.verify()
    added, kept = [], []
    for annex in annexes:
        if annex.target not in version.annexes:
            version = registry.add_target(version, annex)
            added.append(annex.target)
        elif version.annexes[annex.target] != annex.digest:
            kept.append(annex.target)
    signature: Literal["none", "carried", "kept"] = "none"
    if (own_signature := bundle.signature()) is not None:
        stored_signature = bundle_files.read_signature(registry, version)
        if stored_signature is None:
            bundle_files.publish_signature(registry, version, bundle.path / SIGNATURE)
        signature = "carried" if stored_signature in (None, own_signature) else "kept"
    return Pushed(version, new, tuple(added), tuple(kept), signature)


def _find_version(registry: Registry, bundle: Bundle, name: str | None) -> Version | None:
    """Find a version that has the bundle's digest; None if there is none.

    `name`: the model that it must be of; None: any model, but that of the manifest's name first.
    """
    if not registry.exists:
        return None
    with registry.client() as client:
        has_digest = f"tags.{DIGEST} = '{bundle.digest}'"
        versions = fetch_all_pages(client.search_model_versions, has_digest)
    preferred = Ref(name or bundle.manifest.name).name
    refs = [
        Ref(str(version.name), int(version.version))
        for version in versions
        # A model with another kind of name is not ours, even if it has our tags.
        if name in (None, version.name) and re.fullmatch(NAME_PATTERN, version.name)
    ]
    if not refs:
        return None
    return registry.find(min(refs, key=lambda ref: (ref.name != preferred, ref.name, ref.version)))


def _describe_origin(bundle: Bundle, exported: Mapping[str, str] | None) -> dict[str, str]:
    """Return the content of the tag `origin`: who pushes the version, and where it is from.

    The latter is what the export says; if `exported` is None, what the note of promotion in the
    folder says. Raises RegistryError if that note is of another bundle.
    """
    origin = {"pushed_by": stamp.user_at_host(), "pushed_at": stamp.now()}
    note = read_note(bundle.path)
    if exported is not None or note is None:
        return origin | dict(exported or {})
    if note.digest != bundle.digest:
        raise RegistryError(
            f"{bundle.path}: its note of promotion is of another bundle ({note.ref}, "
            f"{note.digest[:12]}…): pull it again, or remove the note"
        )
    return origin | {"version": note.ref, "promoted_by": note.by, "promoted_at": note.at}
