from .add_target import Added as Added
from .add_target import build as build
from .add_target import build_at_first_use as build_at_first_use
from .in_memory import compile as compile
from .run_config import RunResult as RunResult
from .run_config import run as run
from .run_state import Show as Show
