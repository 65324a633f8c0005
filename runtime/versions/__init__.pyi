from .beside import shadowed as shadowed
from .beside import with_canary as with_canary
from .canary import CanaryLimits as CanaryLimits
from .canary import CanarySession as CanarySession
from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .shadow import ShadowedSession as ShadowedSession
