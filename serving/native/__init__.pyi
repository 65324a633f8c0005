from .artifact import FILES as FILES
from .artifact import Backend as Backend
from .artifact import ProgramExecutable as ProgramExecutable
from .artifact import engine_for as engine_for
from .artifact import make_native as make_native
