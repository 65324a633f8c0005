"""soa-runtime: promoted models on Structure-of-Arrays memory, without torch and without MLflow.

    import soa_runtime

    session = soa_runtime.load("./jets")             # of `pipeline pull --runtime jets@production`
    jets = soa_runtime.as_collection(events, session.layout("jets"))
    tags = session.collection("tags", jets.n)
    session.run(jets, tags)

The modules are those of soa-pipeline. If soa-pipeline is installed too, its modules are used;
otherwise those in `lib`, a folder at the end of `sys.path`.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("soa_pipeline") is not None:
    import soa_pipeline

    soa_pipeline.check_origins()
else:
    lib = Path(__file__).resolve().parent / "lib"
    sys.path.append(str(lib))
    for name in ("soa", "engines", "registry", "runtime"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin != str(lib / name / "__init__.py"):
            raise ImportError(
                f"soa-runtime: {spec.origin if spec else 'nothing'} is found as '{name}', the "
                "name of a package of its own: take it off sys.path, or use an environment "
                "without it"
            )
    import soa.errors

    soa.errors.DISTRIBUTION = "soa-runtime"

from engines.errors import EngineError, RunError, TargetError
from registry.errors import BundleError, RegistryError, TrustError
from runtime.errors import BindError, LoadError
from runtime.loader import load
from runtime.session import Binding, Session
from soa.errors import SoaPipelineError
from soa.layout import Layout, column, eigen, scalar
from soa.memory import Collection, as_collection, to_arrow, to_numpy

__all__ = [
    "BindError",
    "Binding",
    "BundleError",
    "Collection",
    "EngineError",
    "Layout",
    "LoadError",
    "RegistryError",
    "RunError",
    "Session",
    "SoaPipelineError",
    "TargetError",
    "TrustError",
    "as_collection",
    "column",
    "eigen",
    "load",
    "scalar",
    "to_arrow",
    "to_numpy",
]
