from .compiling import compiler as compiler
from .compiling import compiler_identity as compiler_identity
from .compiling import family as family
from .compiling import named_compiler as named_compiler
from .compiling import run_compiler as run_compiler
from .compiling import version_of as version_of
from .planning import HEADERS as HEADERS
from .planning import why_dependent as why_dependent
