"""The one module of this project whose name nobody else uses.

Our packages have plain names (`registry`, `runtime`, ...), so a file or an installed package of the
same name may come first on `sys.path`. Python then imports that one, and what follows is an error,
or a wrong answer, far away. `check_origins` finds it first and says which file it is.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

# The version of both wheels and of the C++ library (docs/reference/versions.md).
__version__ = "1.0.0"
PACKAGES = ("soa", "engines", "registry", "runtime", "stages", "serving", "pipeline")


def check_origins() -> None:
    """Raise ImportError unless Python would import each of our packages from this file's folder.

    All packages lie there in a checkout, an editable install and a wheel. This imports nothing. For
    a package that is already imported, the file from which it was imported counts.
    """
    here = os.path.dirname(os.path.realpath(__file__))
    for name in PACKAGES:
        ours = os.path.join(here, name, "__init__.py")
        imported = _file_to_import(name)
        if os.path.realpath(imported) == ours:
            continue
        if not os.path.isfile(ours):
            raise ImportError(
                f"soa-pipeline: the package '{name}' is missing: there is no {ours}. "
                "Install soa-pipeline again."
            )
        if not imported:
            raise ImportError(
                f"soa-pipeline: the package '{name}' cannot be found: put {here} on sys.path."
            )
        path_entry = os.path.dirname(imported)
        if os.path.basename(imported) == "__init__.py":  # a package lies in a folder of its own
            path_entry = os.path.dirname(path_entry)
        raise ImportError(
            f"soa-pipeline: {imported} hides our package '{name}' ({os.path.dirname(ours)}). "
            f"Rename or remove it, or take {path_entry} off PYTHONPATH and sys.path; "
            "if pip installed it, use an environment without it."
        )


def _file_to_import(name: str) -> str:
    """Return the file that `import name` loads, or has loaded.

    For a package without `__init__.py` this is its folder; if nothing is found, it is empty.
    """
    module = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if module is None else module.__spec__
    origin = getattr(module, "__file__", None) or (spec.origin if spec else None)
    if origin is None and spec is not None and spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations))
    return origin or ""


def main() -> None:
    """Run the `pipeline` command, as `python -m pipeline` does.

    If another package hides one of ours, this prints one line and exits with status 2.
    """
    try:
        check_origins()
    except ImportError as error:
        print(f"pipeline: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    runpy.run_module("pipeline", run_name="__main__")


if __name__ == "__main__":
    main()
