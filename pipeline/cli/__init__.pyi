from . import main as main
from .options import say as say
from .options import tell as tell
