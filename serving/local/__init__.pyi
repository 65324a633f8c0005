from .binary import find_triton as find_triton
from .fleet import Fleet as Fleet
from .fleet import serve_by as serve_by
from .triton import Ports as Ports
from .triton import ServerOptions as ServerOptions
from .triton import TritonServer as TritonServer
