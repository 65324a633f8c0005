from .input_columns import Ask as Ask
from .model import model_of as model_of
from .model import read_model as read_model
from .writing import Request as Request
from .writing import Written as Written
from .writing import init as init
from .writing import rewrite as rewrite
from .writing import written as written
