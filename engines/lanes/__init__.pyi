from .compilers import compiler as compiler
from .compilers import family as family
from .compilers import run_compiler as run_compiler
from .source import HEADERS as HEADERS
