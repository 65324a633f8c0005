from .archive import load_program as load_program
from .engine import quiet_torch as quiet_torch
from .graph import as_node as as_node
from .graph import bounds as bounds
from .graph import insert as insert
from .graph import placed as placed
from .graph import sizes as sizes
from .rows import why_dependent as why_dependent
