from .engine import cpu_code as cpu_code
