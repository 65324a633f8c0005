from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .shadow import ShadowedSession as ShadowedSession
from .shadowing import shadowed as shadowed
