from . import main as main
from .answers import say as say
