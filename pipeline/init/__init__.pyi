from .input_columns import Ask as Ask
from .writing import Request as Request
from .writing import init as init
