from .calls import Client as Client
from .options import HEADERS as HEADERS
from .options import LARGEST as LARGEST
from .options import SCHEME as SCHEME
from .options import RemoteOptions as RemoteOptions
from .options import Tls as Tls
from .options import address_of as address_of
from .regions import Regions as Regions
