from .client import RemoteOptions as RemoteOptions
from .client import Tls as Tls
from .remote import RemoteSession as RemoteSession
from .site import Site as Site
from .site import SiteSession as SiteSession
