from .everywhere import MultiDeviceSession as MultiDeviceSession
from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .scheduler import Scheduler as Scheduler
from .scheduler import Workload as Workload
from .shadow import ShadowedSession as ShadowedSession
from .shadowing import shadowed as shadowed
from .staging import Staging as Staging
