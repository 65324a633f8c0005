from .writing import Ask as Ask
from .writing import Request as Request
from .writing import Written as Written
from .writing import init as init
