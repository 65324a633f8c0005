from .cluster import ClusterFiles as ClusterFiles
from .repository import deploy as deploy
from .serve import check_answers as check_answers
