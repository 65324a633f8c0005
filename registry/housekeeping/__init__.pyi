from . import oci as oci
from .export_import import Imported as Imported
from .export_import import export_to as export_to
from .export_import import import_from as import_from
from .garbage import collect as collect
from .pushing import push as push
from .removal import find_removable as find_removable
from .removal import remove as remove
