from .runner import SHIM as SHIM
from .runner import NativeExecutable as NativeExecutable
from .runner import PreparedCall as PreparedCall
from .runner import run_many as run_many
