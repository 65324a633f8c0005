from .annex import package_annex as package_annex
from .bundle import TargetResult as TargetResult
from .bundle import package as package
