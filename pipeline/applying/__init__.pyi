from .plan import Execute as Execute
from .plan import Input as Input
from .plan import Job as Job
from .plan import Model as Model
from .plan import Output as Output
from .plan import Piece as Piece
from .plan import Plan as Plan
from .plan import Scored as Scored
