from .garbage import collect as collect
from .pushing import push as push
from .removal import removable as removable
from .removal import remove as remove
from .transport import Imported as Imported
from .transport import export_to as export_to
from .transport import import_from as import_from
