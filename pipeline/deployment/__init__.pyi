from .cluster import ClusterFiles as ClusterFiles
from .repository import Deployed as Deployed
from .repository import check_answers as check_answers
from .repository import deploy as deploy
from .running import LOADING as LOADING
from .running import load_on as load_on
from .running import unload_from as unload_from
