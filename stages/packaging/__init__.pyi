from .bundle import NO_BASELINE as NO_BASELINE
from .bundle import TargetResult as TargetResult
from .bundle import package as package
from .bundle import package_annex as package_annex
