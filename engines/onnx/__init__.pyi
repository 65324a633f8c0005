from .apart import answers_apart as answers_apart
from .engine import open_session as open_session
from .program import OUTPUTS as OUTPUTS
from .program import OnnxProgram as OnnxProgram
from .program import Output as Output
from .program import input_name as input_name
from .program import read_outputs as read_outputs
from .program import return_columns as return_columns
