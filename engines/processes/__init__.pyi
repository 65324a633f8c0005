from .child import command as command
from .child import search_path as search_path
from .forks import Lock as Lock
from .forks import OwnProcess as OwnProcess
from .forks import require_openmp as require_openmp
from .forks import tell as tell
from .isolation import run_isolated as run_isolated
from .isolation import side_by_side as side_by_side
