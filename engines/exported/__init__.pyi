from .archive import load_program as load_program
from .graph import as_node as as_node
from .graph import insert as insert
from .graph import sizes as sizes
from .quiet import quiet_torch as quiet_torch
