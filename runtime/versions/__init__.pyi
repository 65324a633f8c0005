from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .open_shadow import shadowed as shadowed
from .shadow import ShadowedSession as ShadowedSession
