from .options import Site as Site
from .site_session import SiteSession as SiteSession
from .site_session import connect_site as connect_site
