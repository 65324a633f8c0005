"""Build a model: from a factory with weights, or from a file of a program, a network or trees."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.files import check_zip, digest_of
from stages.errors import SourceError
from stages.model.foreign import advise_on_file
from stages.model.fronts import Arranged, Arrangement, Features, Padded, Padding, Preprocessed
from stages.model.onnx import OnnxModel, onnx_files
from stages.model.trees import load_trees
from stages.model.weights import load_weights

_OWN_PACKAGES = ("soa", "engines", "registry", "runtime", "stages", "serving", "pipeline", "tests")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is from: exactly one of `factory`, `program`, `torchscript`, `onnx`, `trees`.

    `factory` is "module:callable" or "file.py:callable" (an absolute path), called with `kwargs`,
    and returns a module. `weights` is a `.safetensors` file or a state dict that
    `torch.load(weights_only=True)` reads; `weights_prefix` is cut from its keys. `preprocess` has
    one entry for each input block, or is empty. `padding` has one entry for each input of the
    model, or is empty if the blocks are the inputs. `arrangement`: how the model is called; None if
    it takes its inputs as they are.
    """

    factory: str | None = None
    program: Path | None = None
    torchscript: Path | None = None
    onnx: Path | None = None
    trees: Path | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    weights_prefix: str = ""
    preprocess: tuple[Features | None, ...] = ()
    padding: tuple[int | Padding, ...] = ()
    arrangement: Arrangement | None = None

    def fingerprint(self) -> dict[str, str]:
        """Digests of all that the model is made of, by name. If one of them changes, the source
        gives another model. Raises SourceError if a file cannot be read.

        Files that a factory's file imports are not included, since they are known only after it has
        run: see `loaded_sources`.
        """
        digests: dict[str, str] = {"kwargs": repr(sorted(self.kwargs.items()))}
        if self.factory is not None:
            digests["factory"] = self.factory.rpartition("/")[2]
            file_or_module, _, _ = self.factory.rpartition(":")
            if file_or_module.endswith(".py"):
                digests["code"] = _digest_of(Path(file_or_module))
            else:
                digests["code"] = _module_fingerprint(file_or_module)
        for name in ("program", "torchscript", "trees", "weights"):
            path = getattr(self, name)
            if path is not None:
                digests[name] = _digest_of(path)
        if self.onnx is not None:
            digests |= {f"onnx/{path.name}": _digest_of(path) for path in onnx_files(self.onnx)}
        digests["weights_prefix"] = self.weights_prefix
        if any(self.preprocess):
            digests["preprocess"] = repr(self.preprocess)
        if self.padding:
            digests["padding"] = repr(self.padding)
        if self.arrangement is not None and not self.arrangement.plain:
            digests["arrangement"] = repr(self.arrangement)
        return digests


def _digest_of(path: Path) -> str:
    """The digest of a file. Raises SourceError if it cannot be read."""
    try:
        return digest_of(path)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None


def loaded_sources() -> dict[str, str]:
    """Digests of the user's own Python files that are imported now, by absolute path: a model's
    code may be in more files than its factory's.

    Files that Python or pip installed are left out, since their versions are recorded instead; so
    are our own packages.
    """
    ours = Path(__file__).resolve().parents[2]
    libraries = tuple({f"{Path(at).resolve()}{os.sep}" for at in sysconfig.get_paths().values()})
    digests: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or module.__name__ == "__main__":
            continue
        if file.startswith(libraries):  # thousands of files: to resolve them takes half a second
            continue
        path = Path(file).resolve()
        is_ours = ours in path.parents and path.relative_to(ours).parts[0] in _OWN_PACKAGES
        if is_ours or path.parent == ours or str(path).startswith(libraries):
            continue
        if path.is_file():
            digests[str(path)] = _digest_of(path)
    return digests


def load_callable(spec: str) -> Callable[..., Any]:
    """Import the callable that "module:name" or "file.py:name" names.

    A file may import others from its own folder, as when Python runs it: the folder is added to
    `sys.path`, and stays there. Raises SourceError if there is no such callable, or its module
    fails.
    """
    where, _, name = spec.rpartition(":")
    if not where:
        raise SourceError(f"{spec!r} is not 'module:callable' or 'file.py:callable'")
    try:
        if where.endswith(".py"):
            module = _load_file(Path(where))
        else:
            module = importlib.import_module(where)
    except ImportError as error:
        raise SourceError(f"{where} cannot be imported: {error}") from error
    except SyntaxError as error:
        file = error.filename or where  # the error may be in a file that it imports
        raise SourceError(f"{file}, line {error.lineno}: {error.msg}") from error
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{where} fails as it loads: {type(error).__name__}: {error}") from error
    named = getattr(module, name, None)
    if not callable(named):
        raise SourceError(f"{where} has no callable {name!r}")
    return named  # type: ignore[no-any-return]


def build_model(
    source: ModelSource, note: Callable[[str], None] = lambda text: None
) -> torch.nn.Module:
    """Build the model on the CPU, in eval mode, with its weights and the preparation of its inputs.

    `note` gets sentences for the user: on layers that came in train mode and give other answers in
    eval mode, and on outputs that have numbers in place of text. Raises SourceError.
    """
    model = _load_user_model(source)
    if isinstance(model, OnnxModel):
        for text in model.notes:
            note(text)
    for text in put_in_eval_mode(model):
        note(text)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return with_fronts(model, source)


def put_in_eval_mode(model: torch.nn.Module) -> tuple[str, ...]:
    """Put a model into eval mode, in place. Returns a note for the user if layers give other
    answers than before, else an empty tuple."""
    if isinstance(model, torch.fx.GraphModule):  # exported: its mode is part of the graph
        return ()
    training = list(_layers_in_training(model))
    if hasattr(model, "training"):  # torch.jit.freeze takes it away
        model.eval()
    if not training:
        return ()
    layers = ", ".join(training[:3])
    if len(training) > 3:
        layers += f" and {len(training) - 3} more"
    return (f"the model comes in train mode, and is exported in eval mode: {layers}",)


def with_fronts(model: torch.nn.Module, source: ModelSource) -> torch.nn.Module:
    """The model with modules in front that prepare its inputs as `source` describes: reordering,
    padding and preprocessing. The model itself if nothing has to be prepared."""
    if source.arrangement is not None and not source.arrangement.plain:
        model = Arranged(model, (source.arrangement,))
    if source.padding:
        model = Padded(model, source.padding)
    return Preprocessed(model, source.preprocess) if any(source.preprocess) else model


def _load_user_model(source: ModelSource) -> torch.nn.Module:
    """Load the user's own model with its weights, and change nothing in it. Raises SourceError."""
    if source.factory is not None:
        model = _call_factory(source)
        if source.weights is not None:
            load_weights(model, source.weights, source.weights_prefix)
        return model
    if source.program is not None:
        path = source.program
        kind = "an ExportedProgram, which torch.export.save writes"
        return _load_module(path, kind, lambda: torch.export.load(path).module(check_guards=True))
    if source.torchscript is not None:
        script = source.torchscript
        kind = "TorchScript, which torch.jit.save writes"
        return _load_module(script, kind, lambda: torch.jit.load(script, map_location="cpu"))
    if source.onnx is not None:
        return OnnxModel(source.onnx)
    if source.trees is not None:
        return load_trees(source.trees)
    raise SourceError("no model: give factory, program, torchscript, onnx or trees")


def _layers_in_training(model: torch.nn.Module) -> Iterator[str]:
    """Yield the class and name of each layer that is in train mode and would give other answers in
    eval mode."""
    for name, layer in model.named_modules():
        kind = getattr(layer, "original_name", type(layer).__name__)  # TorchScript's name
        if getattr(layer, "training", False) and _reads_training(layer):
            yield f"{kind} {name!r}" if name else kind


def _reads_training(layer: torch.nn.Module) -> bool:
    """Whether a layer gives other answers in eval mode, as dropout and batch norm do.

    It does if its `forward` reads `self.training`, except at a dropout rate of 0, and in a norm
    that keeps no statistics.
    """
    rates = [getattr(layer, name, None) for name in ("p", "dropout")]
    rates = [rate for rate in rates if isinstance(rate, float | int)]
    if 0 in rates or getattr(layer, "track_running_stats", None) is False:
        return False
    if isinstance(layer, torch.jit.ScriptModule):
        return ".training" in getattr(layer, "code", "")
    if type(layer).__module__.startswith("torch.nn.") and not rates and any(layer.children()):
        return False  # its child layers are asked instead
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and "training" in code.co_names


def _call_factory(source: ModelSource) -> torch.nn.Module:
    """Call a user's factory with its arguments, and return the module that it makes. Raises
    SourceError if the arguments do not fit, the factory fails, or it returns something else."""
    assert source.factory is not None
    factory = load_callable(source.factory)
    try:
        inspect.signature(factory).bind(**source.kwargs)
    except TypeError as error:
        raise SourceError(f"{source.factory}: kwargs do not fit: {error}") from None
    except ValueError:
        pass  # the callable has no signature to check against
    try:
        model = factory(**source.kwargs)
    except Exception as error:
        raise SourceError(f"{source.factory} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise SourceError(f"{source.factory} returned a {type(model).__name__}, not a module")
    return model


def _load_module(path: Path, kind: str, load: Callable[[], Any]) -> torch.nn.Module:
    """Load a module from a file by `load`. If this fails, raises a SourceError that says that the
    file is not of this `kind` or, if it is of another known kind, what to do with it."""
    with quiet_torch():
        try:
            check_zip(path)
            module: torch.nn.Module = load()
        except Exception as error:
            why = first_line(error).partition(". ")[0]
            raise SourceError(advise_on_file(path) or f"{path} is not {kind}: {why}") from error
    return module


def _load_file(path: Path) -> Any:
    """Import a Python file. It is loaded anew only if its content has changed. Raises SourceError
    if there is no such file, or what the file itself raises."""
    if not path.is_file():
        raise SourceError(f"no such file: {path}")
    # One module object per file and content. Its name cannot hide an installed module.
    identity = str(path.resolve()).encode() + b"\0" + path.read_bytes()  # trusted
    name = f"_soa_model_{hashlib.sha256(identity).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_fingerprint(module: str) -> str:
    """What identifies a module's code: `package==version` if it is from an installed package, else
    the digest of its file. Raises SourceError if there is no such module."""
    top_level = module.partition(".")[0]
    for distribution in packages_distributions().get(top_level, []):
        try:
            return f"{distribution}=={version(distribution)}"
        except PackageNotFoundError:
            continue
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise SourceError(f"{module} cannot be imported: no such module")
    return _digest_of(Path(spec.origin))
