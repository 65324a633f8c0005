from .options import Site as Site
from .session import SiteSession as SiteSession
from .session import connect_site as connect_site
