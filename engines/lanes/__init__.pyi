from .compilers import compiler as compiler
from .compilers import compiler_identity as compiler_identity
from .compilers import family as family
from .compilers import named_compiler as named_compiler
from .compilers import run_compiler as run_compiler
from .compilers import version_of as version_of
from .program import why_dependent as why_dependent
from .source_file import HEADERS as HEADERS
