from .beside import open_with_canary as open_with_canary
from .beside import open_with_shadow as open_with_shadow
from .canary import CanaryLimits as CanaryLimits
from .canary import CanarySession as CanarySession
from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .shadow import ShadowedSession as ShadowedSession
