from .everywhere import MultiDeviceSession as MultiDeviceSession
from .live import LiveBinding as LiveBinding
from .live import LiveSession as LiveSession
from .scheduler import Scheduler as Scheduler
from .scheduler import Workload as Workload
from .staging import Staging as Staging
