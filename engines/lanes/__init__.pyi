from .compilers import compiler as compiler
from .compilers import family as family
from .compilers import run_compiler as run_compiler
from .source_file import HEADERS as HEADERS
