from .archive import load_program as load_program
from .quiet import quiet_torch as quiet_torch
