from .first_use import build_at_first_use as build_at_first_use
from .runner import RunResult as RunResult
from .runner import run as run
from .target import build as build
