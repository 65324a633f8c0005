from .cpu import cpu_code_settings as cpu_code_settings
from .cpu import cpu_flags as cpu_flags
from .cpu import host_cpu_levels as host_cpu_levels
from .cpu import inductor_settings as inductor_settings
from .cpu import missing_features as missing_features
