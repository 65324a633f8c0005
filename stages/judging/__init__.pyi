from .edge_rules import Special as Special
from .emulate import emulate_candidate as emulate_candidate
from .emulate import emulator_on_this_gpu as emulator_on_this_gpu
from .emulate import how_cpu_target_runs as how_cpu_target_runs
from .reproducing import reproduce as reproduce
from .validate import Trial as Trial
from .validate import validate_candidate as validate_candidate
from .validate import validate_session as validate_session
