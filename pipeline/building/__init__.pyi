from .runner import RunResult as RunResult
from .runner import run as run
from .target import Added as Added
from .target import build as build
from .target import build_at_first_use as build_at_first_use
from .work import Show as Show
