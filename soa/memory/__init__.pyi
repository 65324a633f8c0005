from .arguments import argument_tensors as argument_tensors
from .arguments import carrier as carrier
from .collection import Collection as Collection
from .foreign import allocate as allocate
from .foreign import import_bytes as import_bytes
from .transfer import fill_column as fill_column
from .transfer import read_block as read_block
