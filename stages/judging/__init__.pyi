from .edge_rules import Special as Special
from .emulate import emulate_candidate as emulate_candidate
from .emulate import processor_here as processor_here
from .emulate import this_gpu as this_gpu
from .reproducing import reproduce as reproduce
from .validate import Trial as Trial
from .validate import validate_candidate as validate_candidate
from .validate import validate_session as validate_session
