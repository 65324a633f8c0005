"""Packages and names from other folders that `import pipeline` offers as well."""

import registry as registry
import runtime as runtime
import serving as serving
from engines.errors import EngineError as EngineError
from engines.errors import RunError as RunError
from engines.errors import TargetError as TargetError
from registry import Policy as Policy
from registry import Registry as Registry
from registry import Version as Version
from registry.errors import BundleError as BundleError
from registry.errors import RegistryError as RegistryError
from registry.errors import TrustError as TrustError
from registry.promotion import PromotionRefused as PromotionRefused
from runtime import BindError as BindError
from runtime import Binding as Binding
from runtime import CanaryLimits as CanaryLimits
from runtime import LoadError as LoadError
from runtime import Session as Session
from serving import RemoteOptions as RemoteOptions
from serving import Site as Site
from serving.errors import RemoteError as RemoteError
from soa import Collection as Collection
from soa import CollectionError as CollectionError
from soa import Layout as Layout
from soa import LayoutError as LayoutError
from soa import SoaPipelineError as SoaPipelineError
from soa import column as column
from soa import eigen as eigen
from soa import opaque as opaque
from soa import scalar as scalar
from soa.memory import as_collection as as_collection
from soa.memory import from_jagged as from_jagged
from soa.memory import to_arrow as to_arrow
from soa.memory import to_awkward as to_awkward
from soa.memory import to_numpy as to_numpy
