from .everywhere import MultiDeviceSession as MultiDeviceSession
from .scheduler import Scheduler as Scheduler
from .scheduler import Workload as Workload
from .staging import Staging as Staging
