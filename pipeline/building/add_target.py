"""Builds a version for one more target, on a host of that kind, from the contents of its bundle.

The portable programs, the reference, engines, options and tolerances come from the version. The
source code of the model is not needed. `build` adds the result to the version in its registry;
`build_at_first_use` keeps it only in this host's cache.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from engines.base import DEFAULT_ENGINES, known_engines
from engines.errors import EngineError
from engines.lanes import compiler_identity
from engines.target import Target, check_torch_runs, only_engines
from pipeline.building.candidates import build_targets
from pipeline.building.provenance import code_digest, host, tools
from pipeline.building.run_config import write_page
from pipeline.building.steps import Recipe
from pipeline.building.work import Say, Show, Work, content_key, show_nothing, silent
from pipeline.config import BuiltFrom
from registry.bundle import Annex, Bundle, Manifest
from registry.errors import BundleError
from registry.store import CACHE_VARIABLE, Registry, cache_root
from registry.version import Version, tag_of
from runtime.checked import recorded_tolerances
from runtime.errors import LoadError
from runtime.opening import Opening, open_version
from soa.signature import Signature
from stages.capture import Capture
from stages.package import TargetResult, package_annex


@dataclass(frozen=True)
class Added:
    """The result of `build`: the version, the target that was added to it, and its new files
    (`annex`). `bundle` is the version's bundle with the new target."""

    version: Version
    target: str
    annex: Annex
    bundle: Bundle


def build(
    registry: Registry,
    ref: str,
    target: str,
    engines: Sequence[str] = (),
    work: Path | None = None,
    say: Say = silent,
    show: Show = show_nothing,
) -> Added:
    """Compile, validate and race candidates for `target` here, and add the result to the version.

    `engines`: by default those of the version's config, unless only certain engines can build for
    this target. `work`, `say` and `show` are as for `run`. A target that is already verified in the
    version is refused before any work; an unverified or failed one can be replaced. Raises the
    error of the step that failed; then nothing was added.
    """
    version = registry.find(ref)
    wanted = Target.parse(target)
    version.require_free(str(wanted))
    check_torch_runs(wanted)
    say(f"checking the digests of {version.ref}")
    bundle = open_version(Opening(version.ref, mode="test", registry=registry), annexes=()).bundle
    progress = Work(work or Path("pipeline-work"), say, show, version.name)
    result = _build_candidates(bundle, wanted, engines, progress)
    progress.keep_seconds()
    with tempfile.TemporaryDirectory(prefix="soa-annex-") as folder:
        annex = package_annex(Path(folder) / "annex", bundle, result, tools(), host())
        say(f"adding {wanted} to {version.ref}")
        extended = registry.add_target(version, annex)
    bundle = open_version(Opening(extended.ref, mode="test", registry=registry)).bundle
    write_page(registry, extended, bundle, progress.root / "reports", say)
    return Added(extended, str(wanted), bundle.annexes[str(wanted)], bundle)


def build_at_first_use(bundle: Bundle, target: Target) -> Annex:
    """Return the artifact for `target` from this host's cache. If it is not there, build and
    validate it first.

    Its folder is `built/<digest of the bundle>/<target>/<key>`, where the key is a digest of the
    tools and of our code. The folder appears only when it is complete and has passed the same
    checks as in `pipeline run`. Its digests are checked each time it is opened, and a damaged
    artifact is built again. If several processes need it, one builds and the others wait. Raises
    LoadError if the cache cannot be written, or the error of the step that failed.
    """
    check_torch_runs(target)
    key = content_key(
        {"tools": tools(), "code": code_digest(), "compiler": compiler_identity(target)}
    )
    root = cache_root() / "built"
    folder = root / bundle.digest / tag_of(str(target)) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            annex = _open_if_intact(folder)
            if annex is not None and annex.record.base == bundle.digest:
                return annex
            work = folder.with_name(f"{folder.name}.work")
            result = _build_candidates(bundle, target, (), Work(work))
            annex = package_annex(folder, bundle, result, tools(), host(), replace=True)
            shutil.rmtree(work, ignore_errors=True)  # after a failure, its logs stay
            return annex
    except OSError as error:
        raise LoadError(
            f"cannot build {bundle.manifest.name} for {target} in {root}: {error.strerror}: name "
            f"another folder with {CACHE_VARIABLE}"
        ) from error


def _open_if_intact(folder: Path) -> Annex | None:
    """Open the annex in a folder. Returns None if there is none, or it is damaged."""
    try:
        return Annex.open(folder) if folder.is_dir() else None
    except BundleError:
        return None


def _build_candidates(
    bundle: Bundle, target: Target, engines: Sequence[str], work: Work
) -> TargetResult:
    """Build the candidates of one target as `pipeline run` does, but from a bundle, without the
    model's source code. `engines`: if empty, they are chosen as in `build`.
    EngineError if the bundle's portable files do not have the names that a capture gives them."""
    manifest = bundle.manifest
    names = ("program.pt2", "reference.safetensors", "model.ts")  # the names in a `Capture`
    recorded = (manifest.program, manifest.reference, manifest.torchscript or names[2])
    if recorded != names:
        raise EngineError(f"{bundle.path}: portable files {recorded} are not named {names}")
    captured = Capture(  # its folder is the bundle's, which is only read
        bundle.path,
        Signature.from_dict(manifest.signature),
        torchscript=manifest.capture.torchscript if manifest.torchscript else None,
        torchscript_note=manifest.capture.torchscript_note,
        precision=manifest.capture.precision,
        dependence=manifest.capture.dependence,
        tried=manifest.capture.tried,
    )
    recipe = read_recipe(manifest, engines or only_engines(target))
    return build_targets(work, captured, [target], recipe)[str(target)]


def read_recipe(manifest: Manifest, engines: Sequence[str] = ()) -> Recipe:
    """Read the recipe of a version from its manifest: the options of its config, the tolerances,
    and its engines unless `engines` names others. There is no eager model to race against.
    EngineError if an engine is not known on this host."""
    recorded = BuiltFrom(manifest).compile
    chosen = tuple(dict.fromkeys(engines or BuiltFrom(manifest).engines))
    if unknown := [name for name in chosen if name not in known_engines()]:
        raise EngineError(f"unknown engine {unknown[0]!r}: use one of {', '.join(known_engines())}")
    return Recipe(
        chosen,
        {str(name): options for name, options in recorded.options.items()},
        timeout_s=recorded.timeout_s,
        tolerances=recorded_tolerances(manifest),
        classifiers=frozenset(manifest.classifiers),
        baseline=None,
        benchmark_s=recorded.benchmark_s,
        special_values=BuiltFrom(manifest).gates.special_values,
        by_default=chosen == DEFAULT_ENGINES,
    )
