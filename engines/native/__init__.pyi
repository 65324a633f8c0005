from .cxx_header import typed_header as typed_header
from .runner import SHIM as SHIM
from .runner import NativeExecutable as NativeExecutable
from .runner import PreparedCall as PreparedCall
from .runner import gpus as gpus
from .runner import run_many as run_many
from .runner import same_float_mode as same_float_mode
