from .cluster import ClusterFiles as ClusterFiles
from .repository import Deployed as Deployed
from .repository import check_answers as check_answers
from .repository import deploy as deploy
