from .measuring import revalidate as revalidate
from .measuring import runnable as runnable
from .promoting import import_with_aliases as import_with_aliases
from .promoting import promote as promote
from .pulling import pull as pull
