from .fleet import EnvoyProxy as EnvoyProxy
from .fleet import Fleet as Fleet
from .fleet import find_envoy as find_envoy
from .fleet import serve_by as serve_by
from .triton import Ports as Ports
from .triton import ServerOptions as ServerOptions
from .triton import TritonServer as TritonServer
from .triton import find_triton as find_triton
