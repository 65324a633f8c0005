from .input_columns import Ask as Ask
from .model import describe_model as describe_model
from .model import read_model as read_model
from .writing import Request as Request
from .writing import Written as Written
from .writing import init as init
from .writing import rewrite as rewrite
from .writing import write_config_for as write_config_for
